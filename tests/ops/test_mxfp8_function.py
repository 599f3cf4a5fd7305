"""Linear and grouped products in MXFP8: output and gradients against torchao's, which emulates them in bfloat16."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torchao.prototype.moe_training.mxfp8_grouped_mm import _to_mxfp8_then_scaled_grouped_mm
from torchao.prototype.moe_training.mxfp8_linear import mx_mm
from torchao.prototype.mx_formats.config import (
    MXFP8Dim0CastKernelChoice,
    MXFP8Dim1CastKernelChoice,
    ScaleCalculationMode,
)
from torchao.quantization.quantize_.common.kernel_preference import KernelPreference

from tests._helpers.error_budget import assert_within
from torchtitan_npu.ops.mxfp8.function import Recipe, mx_grouped_matmul, mx_linear

RECIPES = [Recipe(), Recipe(scale_alg=0), Recipe(weight_gradient=False)]
MODES = {0: ScaleCalculationMode.FLOOR, 1: ScaleCalculationMode.RCEIL}


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).bfloat16()


def results(output: Tensor, *inputs: Tensor) -> tuple[Tensor, ...]:
    return output.detach(), *torch.autograd.grad(output, inputs, random(*output.shape, seed=9))


def assert_same(found: tuple[Tensor, ...], expected: tuple[Tensor, ...], terms: int) -> None:
    """The factors are the same bits; sums differ in their order and are rounded to bfloat16."""
    for name, actual, oracle in zip(("y", "dx", "dw"), found, expected, strict=True):
        assert actual.dtype == torch.bfloat16 and actual.shape == oracle.shape
        order = oracle.double().abs().max() * terms * 2.0**-23
        assert_within(name, actual, oracle.double(), oracle.double().abs() * 2.0**-7 + order)


@pytest.mark.parametrize("recipe", RECIPES, ids=str)
def test_linear_agrees_with_torchao(recipe: Recipe) -> None:
    x, weight = random(2, 64, 96).requires_grad_(), random(160, 96, seed=1).requires_grad_()
    element = torch.float8_e4m3fn
    choices = MXFP8Dim0CastKernelChoice.TORCH, MXFP8Dim1CastKernelChoice.TORCH, MODES[recipe.scale_alg]
    expected = mx_mm.apply(
        *(x, weight, element, element, element, 32, KernelPreference.EMULATED, *choices, not recipe.weight_gradient)
    )
    assert_same(results(mx_linear(x, weight, recipe), x, weight), results(expected, x, weight), 160)


@pytest.mark.parametrize("recipe", RECIPES, ids=str)
def test_grouped_product_agrees_with_torchao(recipe: Recipe) -> None:
    """torchao takes groups that are multiples of 32 rows."""
    counts = torch.tensor([32, 0, 64, 96])
    x, weight = random(192, 64).requires_grad_(), random(4, 96, 64, seed=1).requires_grad_()
    expected = _to_mxfp8_then_scaled_grouped_mm(
        x,
        weight.mT,
        offs=counts.cumsum(0).int(),
        kernel_preference=KernelPreference.EMULATED,
        wgrad_with_hp=not recipe.weight_gradient,
        scale_calculation_mode=MODES[recipe.scale_alg],
    )
    assert_same(results(mx_grouped_matmul(x, weight, counts, recipe), x, weight), results(expected, x, weight), 192)


def test_a_group_is_a_linear_layer() -> None:
    """Groups of any size, none included, give what a linear layer gives for their rows."""
    counts = [5, 0, 70, 1]
    x, weight = random(sum(counts), 64).requires_grad_(), random(len(counts), 32, 64, seed=1).requires_grad_()
    recipe = Recipe(gradient_type=23)
    y, dx, dw = results(mx_grouped_matmul(x, weight, torch.tensor(counts), recipe), x, weight)
    gradient, start = random(*y.shape, seed=9), 0
    for expert, count in enumerate(counts):
        if not count:
            assert not dw[expert].any()
            continue
        rows, matrix = (t.detach().clone().requires_grad_() for t in (x[start : start + count], weight[expert]))
        output = mx_linear(rows, matrix, recipe)
        grads = torch.autograd.grad(output, (rows, matrix), gradient[start : start + count])
        assert_same((y[start : start + count], dx[start : start + count], dw[expert]), (output.detach(), *grads), 70)
        start += count


@pytest.mark.parametrize("counts", [None, [20, 0, 44]], ids=["linear", "grouped"])
def test_compiles(counts: list[int] | None) -> None:
    x, weight = random(64, 32).requires_grad_(), random(96, 32, seed=1).requires_grad_()

    def product(rows: Tensor, matrix: Tensor) -> Tensor:
        if counts is None:
            return mx_linear(rows, matrix, Recipe())
        return mx_grouped_matmul(rows, matrix.unflatten(0, (3, 32)), torch.tensor(counts), Recipe())

    compiled = torch.compile(product, backend="aot_eager", fullgraph=True)
    for found, expected in zip(
        results(compiled(x, weight), x, weight), results(product(x, weight), x, weight), strict=True
    ):
        assert torch.equal(found, expected)
