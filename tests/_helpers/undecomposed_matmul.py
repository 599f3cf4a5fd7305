"""Make ``aten.matmul`` and ``aten.matmul_backward`` reach DTensor on the CPU as they do on an NPU, not decomposed."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from torchtitan_npu.distributed.matmul_sharding import use_matmul_sharding
from torchtitan_npu.torch_internals.dispatch import below_autograd

aten = torch.ops.aten


class UndecomposedMatmul(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, left: Tensor, right: Tensor) -> Tensor:
        ctx.save_for_backward(left, right)
        with below_autograd():
            return aten.matmul(left, right)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return aten.matmul_backward(grads[0], *ctx.saved_tensors, list(ctx.needs_input_grad))


def matmul_backward(
    grad: Tensor, left: Tensor, right: Tensor, mask: Sequence[bool]
) -> tuple[Tensor | None, Tensor | None]:
    """Return both gradients, each summed over the broadcast dimensions to the shape of its operand."""
    rows = left.unsqueeze(0) if left.ndim == 1 else left
    columns = right.unsqueeze(1) if right.ndim == 1 else right
    grad = grad.unsqueeze(-1) if right.ndim == 1 else grad
    grad = grad.unsqueeze(-2) if left.ndim == 1 else grad
    return (
        (grad @ columns.mT).sum_to_size(rows.shape).view(left.shape) if mask[0] else None,
        (rows.mT @ grad).sum_to_size(columns.shape).view(right.shape) if mask[1] else None,
    )


@contextmanager
def undecomposed_matmul() -> Iterator[None]:
    """Keep all matrix products of this process on the CPU undecomposed in this context."""
    library = torch.library.Library("aten", "IMPL")
    library.impl("matmul", UndecomposedMatmul.apply, "AutogradCPU")
    library.impl("matmul_backward", matmul_backward, "CPU")
    # torch_npu's shape function returns both gradients, whatever the mask is
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
def our_matmul_sharding(mesh: DeviceMesh) -> Iterator[None]:
    """Use our strategies on ``mesh`` in this context, and DTensor's own after it."""
    use_matmul_sharding(mesh, True)
    try:
        yield
    finally:
        use_matmul_sharding(mesh, False)
