"""Launches of kernels: workspaces, errors, and accesses beyond a tensor."""

from __future__ import annotations

import math
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.profiler import profile
from triton.runtime.errors import OutOfResources

from tests.gpu_kernels.kernel_checks import DEVICE
from torchtitan_npu.errors import UsageError
from torchtitan_npu.gpu_kernels.launch import uninitialized
from torchtitan_npu.ops.core import gpu

SHAPE = (3, 5)


def is_filled(allocate: Callable[[], Tensor]) -> bool:
    with profile(record_shapes=True) as events:
        allocate()
    filled = [event.input_shapes[0] for event in events.key_averages(True) if event.key == "aten::fill_"]
    return any(math.prod(shape) == math.prod(SHAPE) for shape in filled)


def test_a_workspace_is_not_filled() -> None:
    device = torch.device(DEVICE)
    torch.use_deterministic_algorithms(True)
    assert is_filled(lambda: torch.empty(SHAPE, device=device))
    assert not is_filled(lambda: uninitialized(SHAPE, torch.float32, device))
    workspace = uninitialized(SHAPE, torch.bfloat16, device)
    assert workspace.shape == SHAPE and workspace.dtype == torch.bfloat16 and workspace.is_contiguous()


@pytest.mark.parametrize(
    ("raised", "error", "message"),
    [
        (
            OutOfResources(116224, 101376, "shared memory"),
            UsageError,
            r"npu_x: .* more shared memory .* \(116224 needed, 101376 available\): use a GPU with 227 KiB",
        ),
        (ZeroDivisionError("by"), ZeroDivisionError, "by"),
    ],
    ids=["resources", "another error"],
)
def test_error_of_a_kernel(
    raised: Exception, error: type[Exception], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def kernel(**_: Any) -> None:
        raise raised

    monkeypatch.setattr(gpu, "choose", lambda op: gpu.GpuKernel("x"))
    monkeypatch.setattr(gpu, "_loaded", lambda module, name: kernel)
    with pytest.raises(error, match=message):
        gpu.run("npu_x", kernel)


PROGRAM = """
import torch, triton, triton.language as tl
from tests.gpu_kernels.interpreter import forbidden_pages

@triton.jit
def add_one(x, count, BLOCK: tl.constexpr):
    entries = tl.arange(0, BLOCK)
    tl.store(x + entries, tl.load(x + entries, mask=entries < count) + 1, mask=entries < count)

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
