"""The forbidden pages of these tests work: a kernel that accesses memory beyond a tensor ends the process."""

import os
import signal
import subprocess
import sys
from pathlib import Path

PROGRAM = """
import torch, triton, triton.language as tl
from tests.gpu_kernels.forbidden_pages import forbidden_pages

@triton.jit
def add_one(x, count, BLOCK: tl.constexpr):
    places = tl.arange(0, BLOCK)
    tl.store(x + places, tl.load(x + places, mask=places < count) + 1, mask=places < count)

x = torch.zeros(13)[:5]
with forbidden_pages():
    add_one[(1,)](x, 5, BLOCK=8)
assert x.tolist() == [1] * 5
with forbidden_pages():
    add_one[(1,)](x[:4], 5, BLOCK=8)
"""


def test_access_beyond_a_tensor_ends_the_process() -> None:
    """The tensor is a part of a larger one, so the memory after it exists."""
    variables = {**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": str(Path(__file__).resolve().parents[2])}
    done = subprocess.run([sys.executable, "-c", PROGRAM], env=variables, capture_output=True, text=True)
    assert done.returncode == -signal.SIGSEGV, done.stderr
