"""Calls of matrix products that overlap with a collective. No kernel runs, so the group's name is arbitrary."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from tests._helpers.op_cases import Case

Arguments = Callable[[str], tuple[tuple[Any, ...], dict[str, Any]]]


def call(
    *shapes: tuple[int, ...],
    ranks: int = 4,
    dtype: torch.dtype = torch.bfloat16,
    transposed: bool = False,
    **others: Any,
) -> Arguments:
    """Return a product of two matrices. With ``transposed``, the second is a transposed view."""

    def build(device: str) -> tuple[tuple[Any, ...], dict[str, Any]]:
        left, right = (torch.randn(shape, dtype=dtype, device=device) for shape in shapes)
        return (left, right.t() if transposed else right, "group", ranks), others

    return build


CASES = [
    Case("npu_all_gather_base_mm", "bf16", call((16, 256), (256, 64))),
    Case("npu_all_gather_base_mm", "float16", call((16, 256), (256, 64), dtype=torch.float16)),
    Case("npu_all_gather_base_mm", "a layer's weight", call((16, 256), (64, 256), transposed=True)),
    Case("npu_all_gather_base_mm", "columns that do not fit", call((16, 256), (64, 256)), "torch_npu"),
    Case("npu_mm_reduce_scatter_base", "bf16", call((16, 256), (256, 64))),
    Case("npu_mm_reduce_scatter_base", "a layer's weight", call((16, 256), (64, 256), transposed=True)),
    Case("npu_mm_reduce_scatter_base", "columns that do not fit", call((16, 256), (64, 256)), "torch_npu"),
    Case("npu_mm_reduce_scatter_base", "rows left over", call((18, 256), (256, 64)), "torch_npu"),
    Case("npu_mm_reduce_scatter_base", "another reduction", call((16, 256), (256, 64), reduce_op="max"), "us"),
]
