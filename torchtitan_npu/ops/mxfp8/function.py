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

from torchtitan_npu.ops.grouped_matmul.function import group_arguments
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
    return _Linear.apply(x, weight, recipe)


def mx_grouped_matmul(x: Tensor, weight: Tensor, counts: Tensor, recipe: Recipe) -> Tensor:
    """Multiply each expert's rows of ``x`` by the transpose of its matrix.

    ``x`` (T, K) sorted by expert, ``weight`` (E, N, K), ``counts`` (E) int64: the rows of each expert, with the sum T.
    Returns (T, N). An expert without rows gets a zero gradient.
    """
    return _Grouped.apply(x, weight, counts, recipe)


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, recipe: Recipe) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.recipe = recipe
        rows, x_scale = _quantized(_rows(x), -1, recipe)
        matrix, scale = _quantized(weight, -1, recipe)
        y = _matmul(rows, x_scale, matrix.t(), scale.transpose(0, 1), x.dtype)
        return y.view(*x.shape[:-1], len(weight))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        x, weight = ctx.saved_tensors
        recipe, dx, dw = ctx.recipe, None, None
        rows = _rows(dy)
        if ctx.needs_input_grad[0]:
            gradient, gradient_scale = _quantized(rows, -1, recipe, recipe.gradient_type)
            dx = _matmul(gradient, gradient_scale, *_quantized(weight, 0, recipe), x.dtype).view(x.shape)
        if ctx.needs_input_grad[1]:
            inputs = _rows(x)
            if recipe.weight_gradient:
                gradient, gradient_scale = _quantized(rows, 0, recipe, recipe.gradient_type)
                factors = _quantized(inputs, 0, recipe)
                dw = _matmul(gradient.t(), gradient_scale.transpose(0, 1), *factors, x.dtype)
            else:
                dw = rows.t() @ inputs
        return dx, dw, None


class _Grouped(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, counts: Tensor, recipe: Recipe) -> Tensor:
        x = x.contiguous()
        ctx.save_for_backward(x, weight, counts)
        ctx.recipe = recipe
        matrices, scale = _quantized(weight, -1, recipe)
        rows, x_scale = _quantized(x, -1, recipe)
        return _grouped(rows, x_scale, matrices.mT, scale.transpose(1, 2), counts, 0, x.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, Tensor | None, None, None]:
        x, weight, counts = ctx.saved_tensors
        recipe, dx, dw = ctx.recipe, None, None
        dy = dy.contiguous()
        if ctx.needs_input_grad[0]:
            gradient, gradient_scale = _quantized(dy, -1, recipe, recipe.gradient_type)
            dx = _grouped(gradient, gradient_scale, *_quantized(weight, 1, recipe), counts, 0, x.dtype)
        if ctx.needs_input_grad[1]:
            dw = _grouped_weight_gradient(x, dy, counts, recipe)
        return dx, dw, None, None


def _grouped_weight_gradient(x: Tensor, dy: Tensor, counts: Tensor, recipe: Recipe) -> Tensor:
    """Return dyᵀ x of each group, (E, N, K)."""
    if not recipe.weight_gradient:
        return torch.ops.npu.npu_grouped_matmul([dy.t()], [x], **group_arguments(counts, 2))[0]
    ends = counts.cumsum(0).int()

    def quantized(rows: Tensor, dst_type: int) -> tuple[Tensor, Tensor]:
        return torch.ops.npu.npu_grouped_dynamic_mx_quant(
            rows, ends, round_mode=recipe.round_mode, dst_type=dst_type, scale_alg=recipe.scale_alg
        )

    gradient, gradient_scale = quantized(dy, recipe.gradient_type)
    inputs, scale = quantized(x, E4M3)
    return _grouped(gradient.t(), gradient_scale.transpose(0, 1), inputs, scale, counts, 2, x.dtype)


def _rows(x: Tensor) -> Tensor:
    return x.reshape(-1, x.shape[-1]).contiguous()


def _quantized(x: Tensor, axis: int, recipe: Recipe, dst_type: int = E4M3) -> tuple[Tensor, Tensor]:
    return torch.ops.npu.npu_dynamic_mx_quant(
        x, axis=axis, round_mode=recipe.round_mode, dst_type=dst_type, scale_alg=recipe.scale_alg
    )


def _matmul(x1: Tensor, scale1: Tensor, x2: Tensor, scale2: Tensor, dtype: torch.dtype) -> Tensor:
    return torch.ops.npu.npu_quant_matmul(
        x1,
        x2,
        scale2,
        pertoken_scale=scale1,
        output_dtype=_NUMBERS[dtype],
        pertoken_scale_dtype=E8M0,
        scale_dtype=E8M0,
        group_sizes=[1, 1, BLOCK],
    )


def _grouped(
    x: Tensor, x_scale: Tensor, weight: Tensor, scale: Tensor, counts: Tensor, group_type: int, dtype: torch.dtype
) -> Tensor:
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
