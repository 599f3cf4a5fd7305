"""``aten.matmul`` and ``aten.matmul_backward`` on the CPU as torch_npu has them: whole, so that DTensor sees them.

For tests and benchmarks of the strategies; no job uses it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from torchtitan_npu.distributed.matmul_sharding import use_matmul_sharding

aten = torch.ops.aten


class WholeMatmul(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, left: Tensor, right: Tensor) -> Tensor:
        ctx.save_for_backward(left, right)
        with torch._C._AutoDispatchBelowAutograd():
            return aten.matmul(left, right)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return aten.matmul_backward(grads[0], *ctx.saved_tensors, list(ctx.needs_input_grad))


def matmul_backward(
    grad: Tensor, left: Tensor, right: Tensor, mask: Sequence[bool]
) -> tuple[Tensor | None, Tensor | None]:
    """Both gradients by their formulas, each summed over what was broadcast, to the shape of its operand."""
    rows = left.unsqueeze(0) if left.ndim == 1 else left
    columns = right.unsqueeze(1) if right.ndim == 1 else right
    grad = grad.unsqueeze(-1) if right.ndim == 1 else grad
    grad = grad.unsqueeze(-2) if left.ndim == 1 else grad
    return (
        (grad @ columns.mT).sum_to_size(rows.shape).view(left.shape) if mask[0] else None,
        (rows.mT @ grad).sum_to_size(columns.shape).view(right.shape) if mask[1] else None,
    )


@contextmanager
def whole_matmul() -> Iterator[None]:
    """In this context, all of the process's matrix products on the CPU."""
    library = torch.library.Library("aten", "IMPL")
    library.impl("matmul", WholeMatmul.apply, "AutogradCPU")
    library.impl("matmul_backward", matmul_backward, "CPU")
    # torch_npu's gives both shapes, whatever the mask says
    library.impl(
        "matmul_backward",
        lambda grad, left, right, mask: (left.new_empty(left.shape), right.new_empty(right.shape)),
        "Meta",
    )
    try:
        yield
    finally:
        library._destroy()


@contextmanager
def our_matmul_sharding() -> Iterator[None]:
    """Our strategies in this context, and what DTensor had before after it."""
    use_matmul_sharding(True)
    try:
        yield
    finally:
        use_matmul_sharding(False)
