"""The divisors of losses, with which the gradients of any layout are those of the mean loss over all tokens."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torchtitan.distributed import ParallelDims

from torchtitan_npu.layers.auxiliary_loss import AuxiliaryLoss


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
