"""Linear and grouped products in MXFP8 with gradients, which torch_npu does not have.

Three products make a layer: y = x Wᵀ, dx = dy W, dW = dyᵀ x. Each quantizes its two factors along the dimension that it
sums, so every tensor is quantized twice, by the features and by the rows. The saved tensors are those of a layer
without quantization, as in torchao.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from torchtitan_npu.ops.grouped_matmul.op import group_arguments
from torchtitan_npu.ops.mxfp8.reference import BLOCK, E4M3, E8M0, OUTPUTS

_NUMBERS = {dtype: number for number, dtype in OUTPUTS.items()}


@dataclass(frozen=True)
class Recipe:
    """How a layer is quantized."""

    scale_alg: int = 1
    """Of ``npu_dynamic_mx_quant``: 0 (OCP, torchao's FLOOR) or 1 (cuBLAS, torchao's RCEIL)."""
    round_mode: str = "rint"
    """Of ``npu_dynamic_mx_quant``."""
    gradient_type: int = E4M3
    """The element type of dy, as ``dst_type``: 24 (E4M3) or 23 (E5M2). Inputs and weights are E4M3."""
    weight_gradient: bool = True
    """Compute dW in MXFP8. If false, in the dtype of the layer."""


def mx_linear(x: Tensor, weight: Tensor, recipe: Recipe) -> Tensor:
    """Multiply ``x`` (..., K) by the transpose of ``weight`` (N, K), both of one dtype. Returns (..., N)."""
    return _MXProduct.apply(x, weight, None, recipe)


def mx_grouped_matmul(x: Tensor, weight: Tensor, counts: Tensor, recipe: Recipe) -> Tensor:
    """Multiply each expert's rows of ``x`` by the transpose of its matrix.

    ``x`` (T, K) sorted by expert, ``weight`` (E, N, K), ``counts`` (E) int64: the rows of each expert, with the sum T.
    Returns (T, N). An expert without rows gets a zero gradient.
    """
    return _MXProduct.apply(x, weight, counts, recipe)


class _MXProduct(torch.autograd.Function):
    """A product with one matrix or, with ``counts``, with one for each group of rows."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, counts: Tensor | None, recipe: Recipe) -> Tensor:
        ctx.save_for_backward(x, weight, counts)
        ctx.recipe = recipe
        rows, x_scale = _quantized(_rows(x), -1, recipe)
        matrix, scale = _quantized(weight, -1, recipe)
        y = _product(rows, x_scale, matrix.mT, scale.transpose(-3, -2), counts, 0, x.dtype)
        return y.view(*x.shape[:-1], weight.shape[-2])

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, Tensor | None, None, None]:
        x, weight, counts = ctx.saved_tensors
        recipe, dx, dw = ctx.recipe, None, None
        d_rows, rows = _rows(dy), _rows(x)
        if ctx.needs_input_grad[0]:
            gradient, scale = _quantized(d_rows, -1, recipe, recipe.gradient_type)
            dx = _product(gradient, scale, *_quantized(weight, weight.dim() - 2, recipe), counts, 0, x.dtype).view(
                x.shape
            )
        if ctx.needs_input_grad[1] and recipe.weight_gradient:
            gradient, scale = _quantized_by_rows(d_rows, counts, recipe, recipe.gradient_type)
            factors = _quantized_by_rows(rows, counts, recipe, E4M3)
            dw = _product(gradient.t(), scale.transpose(0, 1), *factors, counts, 2, x.dtype)
        elif ctx.needs_input_grad[1] and counts is None:
            dw = d_rows.t() @ rows
        elif ctx.needs_input_grad[1]:
            (dw,) = torch.ops.npu.npu_grouped_matmul([d_rows.t()], [rows], **group_arguments(counts, 2))
        return dx, dw, None, None


def _rows(x: Tensor) -> Tensor:
    return x.reshape(-1, x.shape[-1]).contiguous()


def _quantized(x: Tensor, axis: int, recipe: Recipe, dst_type: int = E4M3) -> tuple[Tensor, Tensor]:
    return torch.ops.npu.npu_dynamic_mx_quant(
        x, axis=axis, round_mode=recipe.round_mode, dst_type=dst_type, scale_alg=recipe.scale_alg
    )


def _quantized_by_rows(rows: Tensor, counts: Tensor | None, recipe: Recipe, dst_type: int) -> tuple[Tensor, Tensor]:
    """Quantize along the rows; a block holds rows of one group."""
    if counts is None:
        return _quantized(rows, 0, recipe, dst_type)
    return torch.ops.npu.npu_grouped_dynamic_mx_quant(
        rows, counts.cumsum(0).int(), round_mode=recipe.round_mode, dst_type=dst_type, scale_alg=recipe.scale_alg
    )


def _product(
    x: Tensor,
    x_scale: Tensor,
    weight: Tensor,
    scale: Tensor,
    counts: Tensor | None,
    group_type: int,
    dtype: torch.dtype,
) -> Tensor:
    if counts is None:
        return torch.ops.npu.npu_quant_matmul(
            x,
            weight,
            scale,
            pertoken_scale=x_scale,
            output_dtype=_NUMBERS[dtype],
            pertoken_scale_dtype=E8M0,
            scale_dtype=E8M0,
            group_sizes=[1, 1, BLOCK],
        )
    return torch.ops.npu.npu_grouped_matmul(
        [x],
        [weight],
        scale=[scale],
        per_token_scale=[x_scale],
        output_dtype=_NUMBERS[dtype],
        scale_dtype=E8M0,
        per_token_scale_dtype=E8M0,
        **group_arguments(counts, group_type),
    )[0]
