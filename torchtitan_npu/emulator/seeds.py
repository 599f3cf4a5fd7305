"""Change the order of streams within a process that was started with ``torchtitan-npu emulate --seed``."""

from __future__ import annotations

import ctypes
import os
from pathlib import Path


def set_seed(seed: int) -> None:
    """Wait for everything launched, and draw the order of what is launched from now on from ``seed``, at least 1."""
    if "NPU_EMULATOR_SEED" not in os.environ:
        raise RuntimeError("set_seed needs a seeded order: start the program with torchtitan-npu emulate --seed 1")
    if seed < 1:
        raise ValueError(f"the seed must be at least 1, not {seed}")
    library = ctypes.CDLL(str(Path(os.environ["ASCEND_HOME_PATH"], "lib64", "libascendcl.so")))
    library.emulator_set_seed(ctypes.c_uint64(seed))
