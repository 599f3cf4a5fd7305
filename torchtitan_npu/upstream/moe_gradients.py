"""Gradients of TorchTitan's MoE under tensor parallel that are those of one rank.

Two of them are not in TorchTitan 0.2.2 (llama4/infra/parallelize.py, ``apply_moe_ep_tp``), and nothing says so:

- The router's weight is replicated over the tensor-parallel ranks, but each rank's gradient of the scores covers
  only its own share of the experts' output (its hidden columns, or its tokens): the ranks' copies of the weight
  drift apart.
- When expert parallel takes the tensor-parallel ranks, each of them routes a share of the tokens. TorchTitan cuts
  the batch and the sequence as one dimension; but a rank keeps the gradient of its share of the *sequence*, and
  drops what it computed for the rest. With one sequence a batch the two cuts are the same, with more they are not.

In the layout of :mod:`torchtitan_npu.distributed.moe_tensor_parallel` there is neither: a rank's router sees its own
tokens only.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate
from torchtitan.models.moe.moe import MoE


def mend_moe_gradients(model: nn.Module, tp_mesh: DeviceMesh, tokens_are_split: bool) -> None:
    """Mend both in TorchTitan's layout of a model; ``tokens_are_split`` where expert parallel takes the same ranks."""
    for moe in model.modules():
        if not isinstance(moe, MoE):
            continue
        if tokens_are_split:
            _split_by_sequence(moe, tp_mesh)
        # scores that multiply the experts' input get a gradient that TorchTitan has summed over the ranks already
        if tokens_are_split or not moe.score_before_experts:
            _sum_gradient_of_scores(moe.router, tp_mesh)


def _sum_gradient_of_scores(router: nn.Module, tp_mesh: DeviceMesh) -> None:
    def hook(module: nn.Module, args: Any, outputs: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
        top_scores, *rest = outputs
        scores = DTensor.from_local(top_scores, tp_mesh, [Replicate()], run_check=False)
        return (scores.to_local(grad_placements=[Partial()]), *rest)

    router.register_forward_hook(hook)


def _split_by_sequence(moe: MoE, tp_mesh: DeviceMesh) -> None:
    """Let each rank route its share of the sequence, in place of TorchTitan's ReordererSequenceParallel."""
    rank, ranks, top_k = tp_mesh.get_local_rank(), tp_mesh.size(), moe.router.top_k
    batch = sequence = 0

    def note_shape(module: nn.Module, args: tuple[torch.Tensor, ...]) -> None:
        nonlocal batch, sequence
        batch, sequence, _ = args[0].shape  # (batch, sequence, dim), gathered over the ranks

    def take_share(module: nn.Module, args: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
        # (batch * sequence, top_k) -> (batch * share, top_k)
        return tuple(x.view(batch, ranks, -1, top_k)[:, rank].reshape(-1, top_k) for x in args)

    def number_globally(
        module: nn.Module, args: Any, outputs: tuple[torch.Tensor, torch.Tensor, torch.Tensor]
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        scores, places, tokens_per_expert = outputs
        share = sequence // ranks * top_k  # places of one sequence on this rank
        return scores, (places // share * ranks + rank) * share + places % share, tokens_per_expert

    moe.reorderer._forward_pre_hooks.clear()
    moe.reorderer._forward_hooks.clear()
    moe.register_forward_pre_hook(note_shape)
    moe.reorderer.register_forward_pre_hook(take_share)
    moe.reorderer.register_forward_hook(number_globally)
