"""The balancing of experts under activation checkpointing, for layers that count their tokens once.

TorchTitan's MoE layers count the tokens of each expert again when a block is recomputed, and its optimizer halves the
counts of checkpointed blocks, rounded down, before it compares them. ``npu_permute``'s layers do not count again.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import CheckpointImpl
from torchtitan.components.optimizer import OptimizersContainer
from torchtitan.protocols.train_spec import OptimizersBuilder

from torchtitan_npu.converters.permute import NpuMoE
from torchtitan_npu.rebind import rebound


def counting_once(build_optimizers: OptimizersBuilder) -> OptimizersBuilder:
    """``build_optimizers`` that takes the counts of our layers as they are."""

    def build(model_parts: list[nn.Module], *args: Any, **kwargs: Any) -> OptimizersContainer:
        ours = any(isinstance(module, NpuMoE) for part in model_parts for module in part.modules())
        # TorchTitan knows a checkpointed block by this (components/optimizer.py, _is_recomputation_enabled)
        replacements = {CheckpointImpl: SimpleNamespace(NO_REENTRANT=object())} if ours else {}
        return rebound(build_optimizers, replacements)(model_parts, *args, **kwargs)

    return build
