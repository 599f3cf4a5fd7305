"""What lies beyond a tensor is out of reach of the kernels in these tests."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = """
import sys, torch, triton, triton.language as tl
from forbidden_pages import forbidden_pages

@triton.jit
def add_one(x, count, BLOCK: tl.constexpr):
    places = tl.arange(0, BLOCK)
    tl.store(x + places, tl.load(x + places, mask=places < count) + 1, mask=places < count)

x = torch.zeros(int(sys.argv[1]) + 8)[:-8]
with forbidden_pages():
    add_one[(1,)](x, 5, BLOCK=8)
assert x.tolist() == [1] * 5
"""


@pytest.mark.parametrize(("size", "ends"), [(5, 0), (4, -signal.SIGSEGV)], ids=["within", "beyond"])
def test_beyond_a_tensor_is_out_of_reach(size: int, ends: int) -> None:
    """Though the memory after it is there: the tensor is a part of a larger one."""
    variables = {**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": str(Path(__file__).resolve().parents[3])}
    done = subprocess.run([sys.executable, "-c", PROGRAM, str(size)], env=variables, capture_output=True, text=True)
    assert done.returncode == ends, done.stderr
