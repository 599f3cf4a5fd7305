"""Add the recording or replaying of decisions to a model, and start the job's session."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torchtitan.distributed import ParallelDims
from torchtitan.models.moe.moe import MoE, TokenChoiceTopKRouter

from torchtitan_npu.components.replay.record_files import EXPERTS, KEYS
from torchtitan_npu.components.replay.recorder import Recorder
from torchtitan_npu.components.replay.replayer import Replayer
from torchtitan_npu.components.replay.session import Session, job_header, layers_of
from torchtitan_npu.config.job_config import JobConfig, replay_options
from torchtitan_npu.converters.base import replace_modules, swap_forward
from torchtitan_npu.converters.gating import EPSILON, NpuRouter
from torchtitan_npu.errors import UsageError
from torchtitan_npu.layers.routing_decisions import RoutingDecisions, routing_decisions_of
from torchtitan_npu.titan_internals.hooks import limit_to_groups


def install_routing_decisions(model: nn.Module, seq_len: int) -> None:
    """Let the routers and indexers of ``model`` pass their decisions through :class:`RoutingDecisions`.

    Called on a model or a pipeline stage after the converters, before it is parallelized, checkpointed or compiled.
    """
    routers: dict[nn.Module, nn.Module] = {}
    for fqn, module in model.named_modules():
        if isinstance(module, TokenChoiceTopKRouter):
            routers[module] = _replay_router(fqn, module)
        elif getattr(module, "selects_keys", False):  # attention with an indexer
            module.use_routing_decisions(RoutingDecisions(KEYS, _layer(fqn), module.inner_attention.topk, seq_len))
    replace_modules(model, routers)


def _replay_router(fqn: str, router: TokenChoiceTopKRouter) -> nn.Module:
    forward = type(router).forward
    if forward is NpuRouter.forward:
        new: Any = swap_forward(router, ReplayNpuRouter)
    elif forward is TokenChoiceTopKRouter.forward:
        new = swap_forward(router, ReplayRouter)
    else:
        raise UsageError(f"[replay] does not support {fqn}: {type(router).__name__} has its own forward")
    new.decisions = RoutingDecisions(EXPERTS, _layer(fqn), router.top_k, router.num_experts)
    return new


def _layer(fqn: str) -> int:
    """Return the number of the layer in a name like ``layers.3.moe.router``."""
    return next(int(part) for part in fqn.split(".") if part.isdecimal())


def header_of_model(job_config: JobConfig, model: Any) -> Any:
    """Return the header of a record of ``model``, which has all its layers and gets :class:`RoutingDecisions` here."""
    install_routing_decisions(model, job_config.training.seq_len)
    return job_header(job_config, model.model_args, layers_of(routing_decisions_of(model)))


def start_session(
    job_config: JobConfig, dims: ParallelDims, model_parts: Sequence[nn.Module], model_args: Any, batches_per_step: int
) -> Session | None:
    """Return the session of a job that records or replays, or ``None``. Its model has been parallelized."""
    options = replay_options(job_config)
    if not options.is_used:
        return None
    for part in model_parts:
        for module in part.modules():
            if isinstance(module, MoE):  # set by distributed/moe_tensor_parallel.py
                module.router.decisions.token_mesh = getattr(module, "counts_mesh", None)
    arguments = job_config, dims, model_parts, model_args, batches_per_step
    return Replayer(options.replay, *arguments) if options.replay else Recorder(options.record, *arguments)


class ReplayRouter(TokenChoiceTopKRouter):
    """TorchTitan's router, except that its selection passes through ``decisions``."""

    decisions: RoutingDecisions

    def forward(self, x: Tensor, expert_bias: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor]:
        """Return scores (tokens, top_k), experts (tokens, top_k) and tokens per expert, for ``x`` (tokens, dim)."""
        scores = all_scores(self, self.gate(x))
        with torch.no_grad():
            order = scores if expert_bias is None else scores + expert_bias
            if self.num_expert_groups is not None:
                order = limit_to_groups(self, order)
            own = torch.topk(order, k=self.top_k, dim=-1, sorted=False).indices
        experts = self.decisions(own)
        return weights(self, scores, experts), experts, count(self, experts)


class ReplayNpuRouter(NpuRouter):
    """:class:`NpuRouter`, except that its selection passes through ``decisions``.

    The operator weighs the experts that it selects itself. Its weights are used for the tokens whose experts are those
    of the record, in any order. Other tokens get theirs from TorchTitan's formula.
    """

    decisions: RoutingDecisions

    def forward(self, x: Tensor, expert_bias: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor]:
        logits = self.gate(x).float()
        fused, own = self.select(logits, expert_bias)
        experts = self.decisions(own)
        is_same = experts.unsqueeze(2) == own.unsqueeze(1)  # (tokens, top_k, own top_k)
        in_order = torch.where(is_same, fused.unsqueeze(1), 0).sum(dim=2)
        agrees = is_same.any(dim=2).all(dim=1, keepdim=True)
        scores = torch.where(agrees, in_order, weights(self, all_scores(self, logits), experts))
        return scores, experts, count(self, experts)


def all_scores(router: TokenChoiceTopKRouter, logits: Tensor) -> Tensor:
    """Return the score of every expert, float32 (tokens, experts)."""
    logits = logits.float()
    return logits.sigmoid() if router.score_func == "sigmoid" else logits.softmax(dim=1)


def weights(router: TokenChoiceTopKRouter, scores: Tensor, experts: Tensor) -> Tensor:
    """Return the weights (tokens, top_k) of ``experts``, by TorchTitan's formula."""
    chosen = scores.gather(dim=1, index=experts)
    if router.route_norm:
        chosen = chosen / (chosen.sum(dim=-1, keepdim=True) + EPSILON)
    return chosen * router.route_scale


def count(router: TokenChoiceTopKRouter, experts: Tensor) -> Tensor:
    """Return the number of tokens of each expert, as TorchTitan does."""
    return torch.histc(experts.view(-1), bins=router.num_experts, min=0, max=router.num_experts)
