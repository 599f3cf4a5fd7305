"""tools/kernel_memory.py compiles the kernels for a GPU that is not present, and reports which do not fit."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tools.kernel_memory import reads_before_warp_groups

ROOT = Path(__file__).parents[2]


@pytest.mark.slow  # compiles ten kernels
def test_a_kernel_that_does_not_fit_is_reported(tmp_path: Path) -> None:
    """The gradient of RMSNorm with 16384 features on an A100 needs two tensors of three rows in shared memory."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    printed = subprocess.run(
        [sys.executable, ROOT / "tools/kernel_memory.py", "80", "--without-attention", "--norm-width", "16384"],
        env=environment | {"PYTHONPATH": str(ROOT), "TRITON_CACHE_DIR": str(tmp_path)},
        stdout=subprocess.PIPE,
        text=True,
        check=True,
        timeout=300,
    ).stdout.splitlines()
    assert printed[0] == "compute capability 8.0, 166912 bytes"
    size, name, *refusal = printed[1].split()
    assert name == "rms_norm._backward" and refusal == ["does", "not", "fit"]
    assert 3 * 2 * 16384 * 2 <= int(size) < 232448
    fitting = [line.split() for line in printed[2:]]
    assert {"grouped_matmul._rows", "moe_permute._gather"} <= {line[1] for line in fitting}
    assert all(len(line) == 2 for line in fitting)


@pytest.mark.parametrize(
    ("steps", "reads"),
    [
        (["setmaxnreg.inc", "ld.shared.b32", "barrier.sync 1"], True),
        (["setmaxnreg.inc", "ld.shared.b32", "bar.sync 0", "st.shared.b32", "barrier.sync 1"], True),  # Triton 3.7.1
        (["setmaxnreg.inc", "barrier.sync 1", "ld.shared.b32"], False),
        (["ld.shared.b32", "st.shared.b32"], False),
    ],
    ids=["before", "before a barrier", "in a warp group", "no warp groups"],
)
def test_reads_before_warp_groups(steps: list[str], reads: bool) -> None:
    assert reads_before_warp_groups("\n".join(steps)) == reads
