"""Workaround: two gradients of TorchTitan's MoE layers are wrong under tensor parallel.

Faults of TorchTitan 0.2.2 (llama4/infra/parallelize.py, ``apply_moe_ep_tp``), both silent:

- The router's weight is replicated over the tensor-parallel ranks. Each rank's gradient of the scores covers only its
  own part of the experts' output (its hidden columns, or its tokens), and nothing sums them. The copies of the weight
  drift apart.
- If expert parallel spans the tensor-parallel ranks, each of them routes a part of the tokens. TorchTitan splits batch
  and sequence as one dimension, but a rank keeps only the gradient of its part of the *sequence*, and drops the rest.
  With one sequence per batch the two splits are equal, with more they are not.

The layout of :mod:`torchtitan_npu.distributed.moe_tensor_parallel` has neither fault. Delete this file when
``apply_moe_ep_tp`` sums the gradient of the scores and splits by sequence.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate
from torch.distributed.tensor.parallel import ParallelStyle
from torchtitan.distributed.expert_parallel import ReordererSequenceParallel
from torchtitan.models.moe.moe import MoE


def fix_moe_gradients(model: nn.Module, tp_mesh: DeviceMesh, tokens_are_split: bool) -> None:
    """Correct both gradients in every MoE layer of ``model``, parallelized with :class:`SplitBySequence`.

    ``tokens_are_split`` tells whether expert parallel spans the tensor-parallel ranks.
    """
    for moe in model.modules():
        if not isinstance(moe, MoE):
            continue
        if tokens_are_split:
            moe.register_forward_pre_hook(_record_batch)
        # TorchTitan sums the gradient of scores that multiply the experts' input
        if tokens_are_split or not moe.score_before_experts:
            _sum_gradient_of_scores(moe.router, tp_mesh)


def _sum_gradient_of_scores(router: nn.Module, tp_mesh: DeviceMesh) -> None:
    def hook(module: nn.Module, args: Any, outputs: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
        top_scores, *rest = outputs
        scores = DTensor.from_local(top_scores, tp_mesh, [Replicate()], run_check=False)
        return (scores.to_local(grad_placements=[Partial()]), *rest)

    router.register_forward_hook(hook)


def _record_batch(moe: MoE, args: tuple[torch.Tensor, ...]) -> None:
    moe.reorderer.batch = args[0].shape[0]  # type: ignore[assignment]  # (batch, sequence, dim)


class SplitBySequence(ParallelStyle):
    """In place of TorchTitan's ``ReordererSequenceParallel``, which splits batch and sequence as one dimension."""

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        rank, ranks = device_mesh.get_local_rank(), device_mesh.size()

        def take_own_part(reorderer: Any, args: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
            # (batch * sequence, top_k) -> (batch * sequence / ranks, top_k)
            top_k = reorderer.top_k
            return tuple(x.view(reorderer.batch, ranks, -1, top_k)[:, rank].reshape(-1, top_k) for x in args)

        def use_global_indices(
            reorderer: Any, args: Any, outputs: tuple[torch.Tensor, torch.Tensor, torch.Tensor]
        ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
            scores, indices, tokens_per_expert = outputs
            part = scores.shape[0] // reorderer.batch  # pairs of one sequence on this rank
            return scores, (indices // part * ranks + rank) * part + indices % part, tokens_per_expert

        module.register_forward_pre_hook(take_own_part)
        module.register_forward_hook(use_global_indices)
        return module


SPLITTING_BY_SEQUENCE = {ReordererSequenceParallel: SplitBySequence}
"""The style that a parallel plan uses in place of TorchTitan's."""
