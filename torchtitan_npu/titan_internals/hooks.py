"""Private functions and attributes of TorchTitan 0.2.2, each of which one module of this package needs."""

from __future__ import annotations

from torch import Tensor
from torchtitan.components import metrics
from torchtitan.models.moe.moe import TokenChoiceTopKRouter
from torchtitan.models.qwen3.infra import parallelize as qwen3

build_metric_logger = metrics._build_metric_logger
"""Build the loggers for TensorBoard and wandb that a job asks for."""

qwen3_saved_operators = qwen3._op_sac_save_list
"""The operators whose results Qwen3's plan saves in selective activation checkpointing."""


def forces_load_balance(router: TokenChoiceTopKRouter) -> bool:
    """Return whether TorchTitan's debug option makes ``router`` assign the experts in turn."""
    return router._debug_force_load_balance


def limit_to_groups(router: TokenChoiceTopKRouter, scores: Tensor) -> Tensor:
    """Return ``scores`` (tokens, experts) with -inf outside the groups of experts that ``router`` selects."""
    return router._get_node_limited_routing_scores(scores)
