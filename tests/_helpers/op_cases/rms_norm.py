"""Calls of RMS normalisation and its gradient."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from tests._helpers.op_cases import Case

Arguments = Callable[[str], tuple[tuple[Any, ...], dict[str, Any]]]
Shape = tuple[int, ...]


def tensors(*shapes: Shape, dtype: torch.dtype = torch.bfloat16, **others: Any) -> Arguments:
    return lambda device: (tuple(torch.randn(shape, dtype=dtype, device=device) for shape in shapes), others)


def norm(shape: Shape, gamma: Shape, dtype: torch.dtype = torch.bfloat16) -> Arguments:
    return tensors(shape, gamma, dtype=dtype)


def add_norm(x1: Shape, x2: Shape, gamma: Shape, **others: Any) -> Arguments:
    return tensors(x1, x2, gamma, **others)


def transposed(shape: Shape, gamma: Shape) -> Arguments:
    """Return a call whose first summand has its first two dimensions swapped in memory."""

    def build(device: str) -> tuple[tuple[Any, ...], dict[str, Any]]:
        (x1, x2, weight), kwargs = add_norm(shape, shape, gamma)(device)
        return (x1.transpose(0, 1).contiguous().transpose(0, 1), x2, weight), kwargs

    return build


def norm_backward(shape: Shape, gamma: Shape, dtype: torch.dtype = torch.bfloat16) -> Arguments:
    def build(device: str) -> tuple[tuple[Any, ...], dict[str, Any]]:
        (dy, x, weight), kwargs = tensors(shape, shape, gamma, dtype=dtype)(device)
        statistics = (*shape[: len(shape) - len(gamma)], *(1 for _ in gamma))
        return (dy, x, weight, torch.randn(statistics, device=device)), kwargs

    return build


CASES = [
    Case("npu_rms_norm", "bf16", norm((2, 16, 64), (64,))),
    Case("npu_rms_norm", "float32", norm((2, 16, 64), (64,), torch.float32)),
    Case("npu_rms_norm", "one token", norm((1, 64), (64,))),
    Case("npu_rms_norm", "no tokens", norm((0, 64), (64,))),
    Case("npu_rms_norm", "gamma of two dimensions", norm((2, 3, 4, 8), (4, 8))),
    Case("npu_rms_norm", "gamma of the wrong size", norm((2, 16, 64), (63,)), "us"),
    Case("npu_rms_norm_backward", "bf16", norm_backward((2, 16, 64), (64,))),
    Case("npu_rms_norm_backward", "float32", norm_backward((2, 16, 64), (64,), torch.float32)),
    Case("npu_rms_norm_backward", "no tokens", norm_backward((0, 64), (64,))),
    Case("npu_rms_norm_backward", "gamma of two dimensions", norm_backward((2, 3, 4, 8), (4, 8))),
    Case("npu_add_rms_norm", "bf16", add_norm((2, 16, 64), (2, 16, 64), (64,))),
    Case("npu_add_rms_norm", "float32", add_norm((2, 16, 64), (2, 16, 64), (64,), dtype=torch.float32, epsilon=1e-5)),
    Case("npu_add_rms_norm", "no tokens", add_norm((0, 64), (0, 64), (64,))),
    Case("npu_add_rms_norm", "gamma of two dimensions", add_norm((2, 4, 8), (2, 4, 8), (4, 8))),
    Case("npu_add_rms_norm", "x1 not contiguous", transposed((2, 16, 64), (64,))),
    Case("npu_add_rms_norm", "x2 that would broadcast", add_norm((2, 16, 64), (2, 1, 64), (64,)), "us"),
    Case("npu_add_rms_norm", "gamma of the wrong size", add_norm((2, 16, 64), (2, 16, 64), (63,)), "us"),
]
