"""A loss function whose sum over tokens is divided before the backward pass."""

from __future__ import annotations

from typing import Protocol, runtime_checkable

import torch
from torchtitan.components.loss import LossFunction


@runtime_checkable
class LogitsWithLosses(Protocol):
    """Output of a model with auxiliary losses on the labels: logits, and a method that attaches these losses."""

    def with_loss(self, loss_fn: LossFunction, labels: torch.Tensor) -> torch.Tensor:
        """Return the logits, whose backward pass starts that of the auxiliary losses too."""


class LossPerToken:
    """Divide a loss, summed over tokens, by :attr:`tokens`.

    Pipeline schedules start the backward pass from the value of the loss function. TorchTitan divides only the loss it
    reports, so that the gradients would be those of the sum (torchtitan/train.py, forward_backward_step).
    """

    def __init__(self, loss_fn: LossFunction) -> None:
        self.loss_fn = loss_fn
        """Returns the sum over tokens."""
        self.tokens: float | torch.Tensor = 1.0

    def __call__(self, pred: torch.Tensor | LogitsWithLosses, labels: torch.Tensor) -> torch.Tensor:
        if isinstance(pred, LogitsWithLosses):
            pred = pred.with_loss(self.loss_fn, labels)
        return self.mean(pred, labels)

    def mean(self, pred: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return self.loss_fn(pred, labels) / self.tokens
