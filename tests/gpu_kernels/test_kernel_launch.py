"""Helpers to launch kernels."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor
from torch.profiler import profile

from tests.gpu_kernels.kernel_checks import DEVICE
from torchtitan_npu.gpu_kernels.launch import uninitialized

SHAPE = (3, 5)


def is_filled(allocate: Callable[[], Tensor]) -> bool:
    with profile(record_shapes=True) as events:
        allocate()
    filled = [event.input_shapes[0] for event in events.key_averages(True) if event.key == "aten::fill_"]
    return any(math.prod(shape) == math.prod(SHAPE) for shape in filled)


def test_a_workspace_is_not_filled() -> None:
    device = torch.device(DEVICE)
    torch.use_deterministic_algorithms(True)
    try:
        assert is_filled(lambda: torch.empty(SHAPE, device=device))
        assert not is_filled(lambda: uninitialized(SHAPE, torch.float32, device))
    finally:
        torch.use_deterministic_algorithms(False)
    workspace = uninitialized(SHAPE, torch.bfloat16, device)
    assert workspace.shape == SHAPE and workspace.dtype == torch.bfloat16 and workspace.is_contiguous()
