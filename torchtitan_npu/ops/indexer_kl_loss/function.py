"""The lightning indexer's loss with gradients: torch_npu's operator returns them, but has no autograd."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from torchtitan_npu.ops.core.run_backward_once import gradients_once

TRAINED = ("query_index", "key_index", "weights")


class Account(Protocol):
    """The weight of a loss in the total, and the sum of its values."""

    def scale(self) -> Tensor:
        """Return the factor of the loss's gradients."""

    def count(self, loss: Tensor) -> None:
        """Add a value of the loss to the sum."""


Loss = Callable[..., Sequence[Tensor]]
"""Returns the gradients of :data:`TRAINED` and the loss (1,), given its arguments by name."""


def with_indexer_loss(output: Tensor, account: Account, loss: Loss, **arguments: Any) -> Tensor:
    """Return ``output``. Its backward pass computes the indexer's loss and its gradients, exactly once.

    The loss is the sum over tokens of the KL divergence of the indexer's distribution over the attended keys from
    attention's. ``output`` is the result of attention. ``loss`` computes the loss and its gradients from ``arguments``:
    :func:`~torchtitan_npu.ops.indexer_kl_loss.spans.loss_in_spans` for selected keys. ``query_index``, ``key_index``
    and ``weights`` get gradients. The loss does not train attention: its tensors get none.
    """
    tensors = {name: value for name, value in arguments.items() if isinstance(value, Tensor)}
    options = {name: value for name, value in arguments.items() if name not in tensors}
    return _IndexerLoss.apply(output, account, loss, options, tuple(tensors), *tensors.values())


class _IndexerLoss(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        output: Tensor,
        account: Account,
        loss: Loss,
        options: dict[str, Any],
        names: tuple[str, ...],
        *tensors: Tensor,
    ) -> Tensor:
        ctx.account, ctx.loss, ctx.options, ctx.names = account, loss, options, names
        ctx.save_for_backward(*tensors)
        return output.view_as(output)

    @staticmethod
    def backward(ctx: Any, output_grad: Tensor) -> tuple[Tensor | None, ...]:
        def compute(*tensors: Tensor) -> list[Tensor]:
            by_name = dict(zip(ctx.names, tensors, strict=True))
            scale = ctx.account.scale().expand(1)
            *gradients, loss = ctx.loss(**by_name, **ctx.options)
            ctx.account.count(loss.squeeze(0))
            # in the wider dtype: rounding the scale to bfloat16 first would bias all gradients alike
            return [
                (gradient * scale).to(by_name[name].dtype) for name, gradient in zip(TRAINED, gradients, strict=True)
            ]

        # among the tensor inputs, output comes first
        gradients = gradients_once(ctx, [1 + ctx.names.index(name) for name in TRAINED], compute)
        by_name = dict(zip(TRAINED, gradients, strict=True))
        return output_grad, None, None, None, None, *(by_name.get(name) for name in ctx.names)
