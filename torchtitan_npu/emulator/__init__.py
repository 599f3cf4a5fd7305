"""The emulator of CANN: a compiled runtime, kernels in Python, tables of CANN's documents."""

from __future__ import annotations

import ctypes
import os
from pathlib import Path


def set_seed(seed: int) -> None:
    """Wait for everything launched, and draw the order of what is launched from now on from ``seed``.

    0 stands for the order of an unseeded process. The process must have been started with
    ``torchtitan-npu emulate --seed``.
    """
    if "NPU_EMULATOR_SEED" not in os.environ:
        raise RuntimeError("set_seed needs a seeded order: start the program with torchtitan-npu emulate --seed 1")
    if seed < 0:
        raise ValueError(f"the seed must be at least 0, not {seed}")
    library = ctypes.CDLL(str(Path(os.environ["ASCEND_HOME_PATH"], "lib64", "libascendcl.so")))
    library.emulator_set_seed(ctypes.c_uint64(seed))
