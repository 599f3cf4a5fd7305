"""Workaround: TorchTitan's balancing of experts counts some tokens twice, and others not at all.

TorchTitan 0.2.2's optimizer compares the token counts of each MoE layer's experts before its step, and corrects the
experts' biases (components/optimizer.py, ``build_optimizers_with_moe_load_balancing``). Two of its assumptions do not
hold here:

- It halves the counts of checkpointed blocks, because TorchTitan's layers count again in the recomputation. The layers
  of ``npu_permute`` count once if the optimizer is built here. An optimizer built elsewhere, for a train spec that is
  not adapted, gets TorchTitan's double counts from them.
- It assumes that all tensor-parallel ranks count the same tokens. In the layout of
  :mod:`torchtitan_npu.distributed.moe_tensor_parallel` each rank counts its tokens, and the counts have to be summed.

Delete when TorchTitan counts each token once, in the forward pass, and sums the counts over all ranks.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torchtitan.components.optimizer import OptimizersContainer
from torchtitan.distributed import ParallelDims

from torchtitan_npu.converters.permute import NpuMoE
from torchtitan_npu.torch_internals.activation_checkpoint import is_checkpointed


def balance_experts(optimizers: OptimizersContainer, model_parts: list[nn.Module], parallel_dims: ParallelDims) -> None:
    """Balance the experts of ``model_parts`` before each step of ``optimizers``."""
    blocks = [block for part in model_parts for block in part.get_submodule("layers").values() if block.moe_enabled]  # type: ignore[operator]
    for block in blocks:
        if isinstance(block.moe, NpuMoE):
            block.moe.count_in_recomputation = False
    if blocks and blocks[0].moe.load_balance_coeff:  # the same for all blocks
        optimizers.register_step_pre_hook(lambda *args, **kwargs: update_expert_biases(blocks, parallel_dims))


@torch.no_grad()
def update_expert_biases(blocks: list[Any], parallel_dims: ParallelDims) -> None:
    """Raise the bias of experts with fewer tokens than the mean, lower that of experts with more, reset the counts."""
    sum_over_tensor_parallel([block.moe for block in blocks if hasattr(block.moe, "counts_mesh")])
    # (layers, num_experts)
    counts = torch.vstack([block.moe.tokens_per_expert for block in blocks])
    for block, count in zip(blocks, counts, strict=True):
        count_in_recomputation = getattr(block.moe, "count_in_recomputation", True)  # TorchTitan's layers do
        if count_in_recomputation and is_checkpointed(block):
            count //= 2
    if (loss_mesh := parallel_dims.get_optional_mesh("loss")) is not None:
        dist.all_reduce(counts, group=loss_mesh.get_group())
    for block, count in zip(blocks, counts.float(), strict=True):
        delta = block.moe.load_balance_coeff * torch.sign(count.mean() - count)
        block.moe.expert_bias.add_(delta - delta.mean())
        block.moe.tokens_per_expert.zero_()


def sum_over_tensor_parallel(layers: list[Any]) -> None:
    """Sum ``tokens_per_expert`` (num_experts) of each layer over its tensor-parallel ranks, in one collective."""
    if not layers:
        return
    counts = torch.stack([moe.tokens_per_expert for moe in layers])
    dist.all_reduce(counts, group=layers[0].counts_mesh.get_group())
    for moe, total in zip(layers, counts, strict=True):
        moe.tokens_per_expert.copy_(total)


@torch.no_grad()
def reset_token_counts(model_parts: list[nn.Module]) -> None:
    """Forget the tokens since the last update: of a step whose update is not applied, or of a validation."""
    for part in model_parts:
        for name, buffer in part.named_buffers():
            if name.endswith("tokens_per_expert"):
                buffer.zero_()
