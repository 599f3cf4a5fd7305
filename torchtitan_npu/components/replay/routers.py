"""Routers whose experts come from, or go to, a record. The scores are computed, with their gradients, as before."""

from __future__ import annotations

import torch
from torch import Tensor
from torchtitan.models.moe.moe import TokenChoiceTopKRouter

from torchtitan_npu.converters.gating import EPSILON, NpuRouter
from torchtitan_npu.layers.routing_decisions import Choices
from torchtitan_npu.titan_internals.hooks import limit_to_groups


class ReplayRouter(TokenChoiceTopKRouter):
    """TorchTitan's router, except that its selection passes through ``choices``."""

    choices: Choices

    def forward(self, x: Tensor, expert_bias: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor]:
        """Return scores (tokens, top_k), experts (tokens, top_k) and tokens per expert, for ``x`` (tokens, dim)."""
        scores = all_scores(self, self.gate(x))
        with torch.no_grad():
            order = scores if expert_bias is None else scores + expert_bias
            if self.num_expert_groups is not None:
                order = limit_to_groups(self, order)
            own = torch.topk(order, k=self.top_k, dim=-1, sorted=False).indices
        experts = self.choices(own)
        return weights(self, scores, experts), experts, count(self, experts)


class ReplayNpuRouter(NpuRouter):
    """:class:`NpuRouter`, except that its selection passes through ``choices``.

    The operator weighs the experts that it selects itself. Its weights are used for the tokens whose experts are those
    of the record, in any order. Other tokens get theirs from TorchTitan's formula.
    """

    choices: Choices

    def forward(self, x: Tensor, expert_bias: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor]:
        logits = self.gate(x).float()
        fused, own = self.select(logits, expert_bias)
        experts = self.choices(own)
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
