"""Calls of matrix products that overlap with a collective. No kernel runs, so the group's name is arbitrary."""

from __future__ import annotations

from typing import Any

from tests._helpers.op_cases import Arguments, Case, Shape, changed, fp16, strided, tensors


def call(*shapes: Shape, **others: Any) -> Arguments:
    """Return a product of two matrices on four ranks."""

    def build(device: str) -> tuple[tuple[Any, ...], dict[str, Any]]:
        matrices, keywords = tensors(*shapes, **others)(device)
        return (*matrices, "group", 4), keywords

    return build


ALL_GATHER, REDUCE_SCATTER = "npu_all_gather_base_mm", "npu_mm_reduce_scatter_base"

CASES = [
    Case(ALL_GATHER, "bf16", call((16, 256), (256, 64))),
    Case(ALL_GATHER, "float16", call((16, 256), (256, 64), dtype=fp16)),
    Case(ALL_GATHER, "a layer's weight", changed(call((16, 256), (256, 64)), 1, strided)),
    Case(ALL_GATHER, "columns that do not fit", call((16, 256), (64, 256)), "torch_npu"),
    Case(REDUCE_SCATTER, "bf16", call((16, 256), (256, 64))),
    Case(REDUCE_SCATTER, "a layer's weight", changed(call((16, 256), (256, 64)), 1, strided)),
    Case(REDUCE_SCATTER, "columns that do not fit", call((16, 256), (64, 256)), "torch_npu"),
    Case(REDUCE_SCATTER, "rows left over", call((18, 256), (256, 64)), "torch_npu"),
    Case(REDUCE_SCATTER, "another reduction", call((16, 256), (256, 64), reduce_op="max"), "us"),
]
