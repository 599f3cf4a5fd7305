"""The balancing of experts by the right numbers of tokens, each token counted once.

TorchTitan's optimizer compares the counts of each MoE layer's experts before its step. Two things it takes for granted
do not hold here:

- TorchTitan's layers count again when a block is recomputed, and the optimizer halves the counts of checkpointed
  blocks, rounded down. The optimizers made here take the counts of ``npu_permute``'s layers as they are, and tell the
  layers to count once. With an optimizer made elsewhere, of a train spec that is not adapted, they count again.
- TorchTitan's layers count the same tokens on every tensor-parallel rank, and the optimizer adds up the others' only.
  Where the ranks route tokens of their own (distributed/moe_tensor_parallel.py), theirs are added up here.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import CheckpointImpl
from torchtitan.components.optimizer import OptimizersContainer
from torchtitan.models.moe.moe import MoE
from torchtitan.protocols.train_spec import OptimizersBuilder

from torchtitan_npu.converters.permute import NpuMoE
from torchtitan_npu.upstream.rebind import rebound


def counting_once(build_optimizers: OptimizersBuilder) -> OptimizersBuilder:
    """``build_optimizers`` that takes the counts of our layers as they are, those of all tensor-parallel ranks."""

    def build(model_parts: list[nn.Module], *args: Any, **kwargs: Any) -> OptimizersContainer:
        layers = [module for part in model_parts for module in part.modules() if isinstance(module, MoE)]
        ours = [moe for moe in layers if isinstance(moe, NpuMoE)]
        for moe in ours:
            moe.counts_again = False
        # TorchTitan knows a checkpointed block by this (components/optimizer.py, _is_recomputation_enabled)
        replacements = {CheckpointImpl: SimpleNamespace(NO_REENTRANT=object())} if ours else {}
        optimizers = rebound(build_optimizers, replacements)(model_parts, *args, **kwargs)
        _add_up_first(optimizers, [moe for moe in layers if hasattr(moe, "counts_mesh")])
        return optimizers

    return build


def _add_up_first(optimizers: OptimizersContainer, layers: list[Any]) -> None:
    """Before TorchTitan's hook compares the counts of ``layers`` and resets them; qwen3's experts have no such hook."""
    hooks = optimizers._optimizer_step_pre_hooks
    if layers and hooks:
        handle = optimizers.register_step_pre_hook(lambda *_: add_up_counts(layers))
        hooks.move_to_end(handle.id, last=False)


def add_up_counts(layers: list[Any]) -> None:
    """Sum ``tokens_per_expert`` (num_experts) of each layer over its tensor-parallel ranks, all in one collective."""
    counts = torch.stack([moe.tokens_per_expert for moe in layers])
    dist.all_reduce(counts, group=layers[0].counts_mesh.get_group())
    for moe, total in zip(layers, counts, strict=True):
        moe.tokens_per_expert.copy_(total)
