"""Floating-point operations of a step: torch's formulas, and those of the operators that torch has none for.

As torch counts: only products, a multiplication and an addition each, and attention without regard to its mask.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils import flop_counter

from torchtitan_npu.ops.core.arguments import by_name
from torchtitan_npu.torch_internals.dispatch import OpOverload

aten = torch.ops.aten
Arguments = dict[str, Any]


def _grouped(x: Tensor, weight: Tensor) -> int:
    """Rows (rows, k) by their expert's (k, n); of a weight's gradient (m, rows) by (rows, n): as many either way."""
    return 2 * x.numel() * weight.shape[-1]


def _grouped_matmul(a: Arguments, output: Any) -> int:
    return sum(_grouped(x, weight) for x, weight in zip(a["x"], a["weight"], strict=True))


def _rows(query: Tensor) -> int:
    """Tokens × heads."""
    return query.numel() // query.shape[-1]


def _key_size(a: Arguments) -> int:
    rope = a.get("query_rope")
    return a["query"].shape[-1] + (rope.shape[-1] if rope is not None else 0)


def _selected(a: Arguments) -> int:
    return a["sparse_indices"].shape[-1] * (a.get("sparse_block_size") or 1)


def _sparse_attention(a: Arguments, output: Any) -> int:
    values = (a["value"] if a["value"] is not None else a["key"]).shape[-1]
    return 2 * _rows(a["query"]) * _selected(a) * (_key_size(a) + values)


def _sparse_attention_grad(a: Arguments, output: Any) -> int:
    """The scores again, and the gradients of scores, queries, keys and values."""
    values = (a["value"] if a["value"] is not None else a["key"]).shape[-1]
    return 2 * _rows(a["query"]) * _selected(a) * (3 * _key_size(a) + 2 * values)


def _sequence(key: Tensor, layout: str) -> int:
    return key.shape[layout.index("T" if "T" in layout else "S")]


def _indexer(a: Arguments, output: Any) -> int:
    return 2 * a["query"].numel() * _sequence(a["key"], a["layout_key"])


def _indexer_grad(a: Arguments, output: Any) -> int:
    return 6 * a["query"].numel() * _selected(a)


def _indexer_loss(a: Arguments, output: Any) -> int:
    """Attention's scores and the indexer's, and the gradients of the indexer's queries and keys."""
    dense = "sparse_indices" not in a
    keys = _sequence(a["key"], a["layout"]) if dense else _selected(a)
    return 2 * keys * (_rows(a["query"]) * _key_size(a) + 3 * a["query_index"].numel())


def _fusion_attention(a: Arguments, output: Any) -> int:
    """Scores and their product with the values."""
    query, layout = a["query"], a["input_layout"]
    keys = _sequence(a["key"], layout)
    return 2 * keys * (query.numel() + query.numel() * a["value"].shape[-1] // a["key"].shape[-1])


def _fusion_attention_grad(a: Arguments, output: Any) -> int:
    return 5 * _fusion_attention(a, output) // 2


def _matmul_backward(a: Arguments, output: Any) -> int:
    return 2 * a["grad"].numel() * a["self"].shape[-1] * sum(a["mask"])


def _cpu_attention(a: Arguments, output: Any) -> int:
    return flop_counter.sdpa_flop_count(a["query"].shape, a["key"].shape, a["value"].shape)


def _cpu_attention_backward(a: Arguments, output: Any) -> int:
    shapes = (a[name].shape for name in ("grad_out", "query", "key", "value"))
    return flop_counter.sdpa_backward_flop_count(*shapes)


FORMULAS: dict[str, Callable[[Arguments, Any], int]] = {
    "npu::npu_grouped_matmul": _grouped_matmul,
    "npu::npu_grouped_matmul_add_": lambda a, output: _grouped(a["x"], a["weight"]),
    "npu::npu_sparse_flash_attention": _sparse_attention,
    "npu::npu_sparse_flash_attention_grad": _sparse_attention_grad,
    "npu::npu_lightning_indexer": _indexer,
    "npu::npu_lightning_indexer_grad": _indexer_grad,
    "npu::npu_sparse_lightning_indexer_grad_kl_loss": _indexer_loss,
    "npu::npu_dense_lightning_indexer_grad_kl_loss": _indexer_loss,
    "npu::npu_fusion_attention": _fusion_attention,
    "npu::npu_fusion_attention_v3": _fusion_attention,
    "npu::npu_fusion_attention_grad": _fusion_attention_grad,
    "npu::npu_fusion_attention_grad_v3": _fusion_attention_grad,
    "aten::matmul": lambda a, output: 2 * output.numel() * a["self"].shape[-1],
    "aten::matmul_backward": _matmul_backward,
    "aten::linear": lambda a, output: 2 * output.numel() * a["input"].shape[-1],
    "aten::_grouped_mm": lambda a, output: _grouped(a["self"], a["mat2"]),
    "aten::_scaled_dot_product_flash_attention_for_cpu": _cpu_attention,
    "aten::_scaled_dot_product_flash_attention_for_cpu_backward": _cpu_attention_backward,
}
"""By name of the operator: what a call with these arguments takes."""


def flops(op: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> int:
    """What one call takes; 0 for operators that multiply no matrices."""
    formula = FORMULAS.get(op._schema.name)
    if formula is not None:
        return formula(by_name(op, args, kwargs), output)
    known = flop_counter.flop_registry.get(op.overloadpacket)
    return known(*args, **kwargs, out_val=output) if known is not None else 0
