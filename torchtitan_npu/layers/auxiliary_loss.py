"""Auxiliary losses: they add gradients, and each has a metric.

The reported loss stays that of the next token, so that loss curves with and without them can be compared.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from torchtitan_npu.errors import UsageError
from torchtitan_npu.ops.core.run_backward_once import gradients_once


class AuxiliaryLoss(nn.Module):
    """Add a loss to the gradients of the parent module, as part of the mean over the global batch.

    The loss is summed in the backward pass, and so once, however often activation checkpointing runs the forward pass.
    The sum belongs to one step; the module has no state.
    """

    def __init__(self, name: str, weight: float, of_labels: bool = False) -> None:
        super().__init__()
        self.name = name
        self.weight = weight
        self.of_labels = of_labels
        """True if only tokens with a label have this loss, like the main loss; otherwise all tokens have it."""
        self.rank_weight = 1.0
        """Weight of this rank's loss: less than 1 if the tensor-parallel ranks average their losses."""
        # Both are written in place: device graphs read and write them at the addresses of the first step.
        self.tokens: Tensor | None = None
        self.total: Tensor | None = None
        self.replicas = 1

    def extra_repr(self) -> str:
        return f"{self.name}, weight={self.weight}"

    def start_step(self) -> None:
        """Reset the sum."""
        if self.total is not None:
            self.total.zero_()

    def start_batch(self, tokens: Tensor, replicas: int = 1) -> None:
        """Set the number of ``tokens`` in the global batch that have this loss.

        ``replicas`` is the number of ranks over which gradients will be averaged; they are scaled up by it.
        """
        self.replicas = replicas
        if self.tokens is None:
            self.tokens, self.total = tokens.clone(), torch.zeros_like(tokens)
        else:
            self.tokens.copy_(tokens)

    def scale(self) -> Tensor:
        """Return the gradient of the mean loss over the global batch with respect to one token's loss."""
        if self.tokens is None:
            raise UsageError(f"{self.name} needs `-m torchtitan_npu.train`: TorchTitan's entry does not scale it")
        return self.weight * self.rank_weight * self.replicas / self.tokens

    def count(self, loss: Tensor) -> None:
        """Add a sum over tokens to the step's total, in a backward pass."""
        assert self.total is not None
        self.total += self.rank_weight * loss.detach().to(self.total.dtype)

    def attach(self, output: Tensor, loss: Tensor) -> Tensor:
        """Return ``output``, whose backward pass counts ``loss``, a sum over tokens, and starts that of ``loss``."""
        return _Attach.apply(output, loss, self)


class _Attach(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, output: Tensor, loss: Tensor, aux_loss: AuxiliaryLoss) -> Tensor:
        ctx.save_for_backward(loss)
        ctx.aux_loss = aux_loss
        return output.view_as(output)

    @staticmethod
    def backward(ctx: Any, output_grad: Tensor) -> tuple[Tensor, Tensor | None, None]:
        def compute(loss: Tensor) -> list[Tensor]:
            scale = ctx.aux_loss.scale()
            ctx.aux_loss.count(loss)
            return [scale.to(loss.dtype)]

        (loss_grad,) = gradients_once(ctx, [1], compute)
        return output_grad, loss_grad, None


def auxiliary_losses(model_parts: Iterable[nn.Module]) -> list[AuxiliaryLoss]:
    """Return all auxiliary losses of a model."""
    return [module for part in model_parts for module in part.modules() if isinstance(module, AuxiliaryLoss)]
