"""A loss function whose sum over tokens is divided before the backward pass."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol, runtime_checkable

import torch
from torchtitan.components.loss import LossFunction
from torchtitan.distributed import ParallelDims

from torchtitan_npu.layers.auxiliary_loss import AuxiliaryLoss


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


class GradientScale:
    """Divides the losses of one rank's batches so that the sum of gradients over ranks and batches is right."""

    def __init__(self, dims: ParallelDims, accumulation_steps: int, auxiliary_losses: Sequence[AuxiliaryLoss]) -> None:
        # DDP averages the gradients of its replicas, which are already divided by the tokens of all replicas
        self.replicas = dims.dp_replicate if not (dims.fsdp_enabled or dims.ep_enabled) else 1
        # all batches have the same size, on all ranks and in all accumulation steps
        self.batches = dims.dp_replicate * dims.dp_shard * accumulation_steps
        self.auxiliary_losses = auxiliary_losses

    def start_batch(self, labels: torch.Tensor, global_valid_tokens: Any, device: torch.device) -> Any:
        """Set the divisors of the auxiliary losses for a batch, and return that of the sum of its main loss.

        ``labels`` (bsz, seqlen) are not split over context-parallel ranks yet.
        """
        if self.auxiliary_losses:
            labelled = torch.as_tensor(global_valid_tokens, dtype=torch.float32, device=device)
            all_tokens = torch.full_like(labelled, labels.numel() * self.batches)
            for loss in self.auxiliary_losses:
                loss.start_batch(labelled if loss.of_labels else all_tokens, self.replicas)
        return global_valid_tokens / self.replicas
