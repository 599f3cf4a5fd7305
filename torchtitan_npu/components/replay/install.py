"""Add the recording or replaying of decisions to a model, and start the job's session."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torchtitan.distributed import ParallelDims
from torchtitan.models.moe.moe import MoE, TokenChoiceTopKRouter

from torchtitan_npu.components.replay.record_files import EXPERTS, KEYS
from torchtitan_npu.components.replay.replayer import Replayer
from torchtitan_npu.components.replay.session import Recorder, ReplaySession, job_header, layers_of
from torchtitan_npu.config.job_config import JobConfig, with_all_sections
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
        is_router = isinstance(module, TokenChoiceTopKRouter)
        if not is_router and not getattr(module, "selects_keys", False):  # attention with an indexer
            continue
        layer = next(int(part) for part in fqn.split(".") if part.isdecimal())  # layers.3.moe.router
        if not is_router:
            module.use_routing_decisions(RoutingDecisions(KEYS, layer, module.inner_attention.topk, seq_len))  # type: ignore[operator, union-attr]
            continue
        replaying = REPLAYING.get(type(module).forward)
        if replaying is None:
            raise UsageError(f"[replay] does not support {fqn}: {type(module).__name__} has its own forward")
        router: Any = swap_forward(module, replaying)
        router.decisions = RoutingDecisions(EXPERTS, layer, router.top_k, router.num_experts)
        routers[module] = router
    replace_modules(model, routers)


def header_of_model(job_config: JobConfig, model: Any) -> Any:
    """Return the header of a record of ``model``, which has all its layers and gets :class:`RoutingDecisions` here."""
    install_routing_decisions(model, job_config.training.seq_len)
    return job_header(job_config, model.model_args, layers_of(routing_decisions_of(model)))


def start_session(
    job_config: JobConfig, dims: ParallelDims, model_parts: Sequence[nn.Module], model_args: Any, batches_per_step: int
) -> ReplaySession | None:
    """Return the session of a job that records or replays, or ``None``. Its model has been parallelized."""
    options = with_all_sections(job_config).replay
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
            experts = torch.topk(order, k=self.top_k, dim=-1, sorted=False).indices
        experts = self.decisions(experts)
        return weights(self, scores, experts), experts, count(self, experts)


class ReplayNpuRouter(NpuRouter):
    """:class:`NpuRouter`, except that its selection passes through ``decisions``.

    The operator weighs the experts that it selects. Its weights are used for the tokens whose experts are those of the
    record, in any order. The weights of other tokens come from TorchTitan's formula.
    """

    decisions: RoutingDecisions

    def forward(self, x: Tensor, expert_bias: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor]:
        logits = self.gate(x).float()
        fused, selected = self.select(logits, expert_bias)
        experts = self.decisions(selected)
        is_same = experts.unsqueeze(2) == selected.unsqueeze(1)  # (tokens, top_k, selected top_k)
        in_order = torch.where(is_same, fused.unsqueeze(1), 0).sum(dim=2)
        agrees = is_same.any(dim=2).all(dim=1, keepdim=True)
        scores = torch.where(agrees, in_order, weights(self, all_scores(self, logits), experts))
        return scores, experts, count(self, experts)


REPLAYING: dict[Any, type[nn.Module]] = {
    TokenChoiceTopKRouter.forward: ReplayRouter,
    NpuRouter.forward: ReplayNpuRouter,
}
"""The replaying router for each forward method."""


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
