"""Calls of SwiGLU and its gradient."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from tests._helpers.op_cases import Case

Arguments = Callable[[str], tuple[tuple[Any, ...], dict[str, Any]]]


def call(*shapes: tuple[int, ...], dtype: torch.dtype = torch.bfloat16, **others: Any) -> Arguments:
    return lambda device: (tuple(torch.randn(shape, dtype=dtype, device=device) for shape in shapes), others)


def transposed(*shapes: tuple[int, ...], **others: Any) -> Arguments:
    """Return the call with the last matrix transposed. Its shape is the one in memory."""

    def build(device: str) -> tuple[tuple[Any, ...], dict[str, Any]]:
        tensors, kwargs = call(*shapes, **others)(device)
        return (*tensors[:-1], tensors[-1].t()), kwargs

    return build


CASES = [
    Case("npu_swiglu", "bf16", call((16, 64))),
    Case("npu_swiglu", "float32", call((2, 3, 64), dtype=torch.float32)),
    Case("npu_swiglu", "float16", call((2, 3, 64), dtype=torch.float16)),
    Case("npu_swiglu", "along the first dimension", call((8, 3), dim=0)),
    Case("npu_swiglu", "no tokens", call((0, 64))),
    Case("npu_swiglu", "one dimension", call((64,))),
    Case("npu_swiglu", "not contiguous", transposed((64, 16))),
    Case("npu_swiglu", "an odd size", call((16, 63)), "us"),
    Case("npu_swiglu", "dim too large", call((16, 64), dim=2), "torch_npu"),
    Case("npu_swiglu", "dim too small", call((16, 64), dim=-3), "torch_npu"),
    Case("npu_swiglu_backward", "bf16", call((16, 32), (16, 64))),
    Case("npu_swiglu_backward", "along the first dimension", call((4, 3), (8, 3), dim=0)),
    Case("npu_swiglu_backward", "not contiguous", transposed((16, 32), (64, 16))),
    Case("npu_swiglu_backward", "grad_output of another shape", call((16, 64), (16, 64)), "us"),
]
