"""``npu_grouped_matmul`` with gradients, which torch_npu does not have."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable


def grouped_matmul(x: Tensor, weight: Tensor, counts: Tensor) -> Tensor:
    """Multiply each expert's rows of ``x`` by its matrix; differentiable in ``x`` and ``weight``.

    ``x`` (T, K) sorted by expert, ``weight`` (E, K, N), ``counts`` (E) int64: the number of rows of each expert, with
    the sum T. Returns (T, N). An expert without rows gets a zero gradient.
    """
    return _GroupedMatmul.apply(x, weight, counts)


class _GroupedMatmul(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, counts: Tensor) -> Tensor:
        # an NPU takes contiguous matrices, and transposed views of the weights
        x = x.contiguous()
        weight = weight if weight.mT.is_contiguous() else weight.contiguous()
        ctx.save_for_backward(x, weight, counts)
        return _product(x, weight, counts, group_type=0)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        x, weight, counts = ctx.saved_tensors
        dy = dy.contiguous()
        x_wanted, weight_wanted, _ = ctx.needs_input_grad
        dx = _product(dy, weight.mT, counts, group_type=0) if x_wanted else None
        return dx, _weight_gradient(x, dy, weight, counts) if weight_wanted else None, None


def _weight_gradient(x: Tensor, dy: Tensor, weight: Tensor, counts: Tensor) -> Tensor:
    """Return the gradient in the strides of ``weight``. Autograd would copy a gradient with other strides."""
    if weight.is_contiguous():
        return _product(x.t(), dy, counts, group_type=2)
    return _product(dy.t(), x, counts, group_type=2).mT


def _product(x: Tensor, weight: Tensor, counts: Tensor, group_type: int) -> Tensor:
    return torch.ops.npu.npu_grouped_matmul([x], [weight], **group_arguments(counts, group_type))[0]


def group_arguments(counts: Tensor, group_type: int) -> dict[str, Any]:
    """Return the arguments of ``npu_grouped_matmul`` for groups with these ``counts`` of rows."""
    # An NPU does not take a list of one size, but it takes a list of one end, and for one group they are equal.
    group_list_type = 0 if counts.shape == (1,) else 1
    return {"group_list": counts, "split_item": 3, "group_type": group_type, "group_list_type": group_list_type}
