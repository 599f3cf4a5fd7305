"""Floating-point operations of a call: torch's formulas, and formulas for the operators that torch has none for.

Counted as torch counts: matrix products only, a multiplication and an addition each, without regard to masks. This
package's operators have their formulas in ``ops/``.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch.utils import flop_counter

from torchtitan_npu.ops import OPS
from torchtitan_npu.ops.core.arguments import by_name
from torchtitan_npu.ops.grouped_matmul.op import product_flops
from torchtitan_npu.torch_internals.dispatch import OpOverload, op_schema

Arguments = dict[str, Any]
Formula = Callable[[Arguments, Any], int]


def _of(op: str) -> Formula:
    """Return the formula of one of this package's operators."""
    formula = OPS[op].flops
    assert formula is not None
    return lambda arguments, output: formula(**arguments)


def _matmul_backward(a: Arguments, output: Any) -> int:
    return 2 * a["grad"].numel() * a["self"].shape[-1] * sum(a["mask"])


def _cpu_attention(a: Arguments, output: Any) -> int:
    return flop_counter.sdpa_flop_count(a["query"].shape, a["key"].shape, a["value"].shape)


def _cpu_attention_backward(a: Arguments, output: Any) -> int:
    shapes = (a[name].shape for name in ("grad_out", "query", "key", "value"))
    return flop_counter.sdpa_backward_flop_count(*shapes)


FORMULAS: dict[str, Formula] = {
    **{f"npu::{op.name}": _of(op.name) for op in OPS.values() if op.flops is not None},
    # operators of torch_npu that this package does not define
    "npu::npu_fusion_attention_v3": _of("npu_fusion_attention"),
    "npu::npu_fusion_attention_grad_v3": _of("npu_fusion_attention_grad"),
    "aten::matmul": lambda a, output: 2 * output.numel() * a["self"].shape[-1],
    "aten::matmul_backward": _matmul_backward,
    "aten::linear": lambda a, output: 2 * output.numel() * a["input"].shape[-1],
    "aten::_grouped_mm": lambda a, output: product_flops(a["self"], a["mat2"]),
    "aten::_scaled_dot_product_flash_attention_for_cpu": _cpu_attention,
    "aten::_scaled_dot_product_flash_attention_for_cpu_backward": _cpu_attention_backward,
}
"""The formulas by the name of the operator."""


def flops(op: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> int:
    """Return the FLOPs of one call; 0 for an operator without matrix products."""
    formula = FORMULAS.get(op_schema(op).name)
    if formula is not None:
        return formula(by_name(op, args, kwargs), output)
    known = flop_counter.flop_registry.get(op.overloadpacket)
    return known(*args, **kwargs, out_val=output) if known is not None else 0
