"""``npu_gating``: one operator scores the experts of each token, selects them and normalises their weights.

TorchTitan's router has a small operator for each step. ``npu_moe_gating_top_k`` has a gradient for sigmoid scores that
are normalised, as in DeepSeek-V3 and V3.2. Other routers are not converted.
"""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor, nn
from torchtitan.models.moe.moe import TokenChoiceTopKRouter

from torchtitan_npu.converters.base import Converter, register, swap_forward
from torchtitan_npu.errors import UsageError
from torchtitan_npu.log import log_on_first_rank
from torchtitan_npu.ops import OPS
from torchtitan_npu.ops.moe_gating import SIGMOID, SUM_OF_TWO_BEST
from torchtitan_npu.titan_internals.hooks import forces_load_balance

EPSILON = 1e-20
"""TorchTitan adds it to the sum of a token's scores."""


class NpuRouter(TokenChoiceTopKRouter):
    """TorchTitan's router on ``npu_moe_gating_top_k``."""

    def extra_repr(self) -> str:
        return f"experts={self.num_experts}, top_k={self.top_k}, selection=npu_moe_gating_top_k"

    def forward(self, x: Tensor, expert_bias: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor]:
        """Return scores (tokens, top_k), experts (tokens, top_k) and tokens per expert, for ``x`` (tokens, dim)."""
        scores, experts = self.select(self.gate(x).float(), expert_bias)
        tokens_per_expert = torch.histc(experts.view(-1), bins=self.num_experts, min=0, max=self.num_experts)
        return scores, experts, tokens_per_expert

    def select(self, logits: Tensor, expert_bias: Tensor | None) -> tuple[Tensor, Tensor]:
        """Return scores and experts, both (tokens, top_k), for ``logits`` (tokens, experts).

        The best expert comes first, and the lower number among equal scores. TorchTitan has no order.
        """
        scores, experts, _ = torch.ops.npu.npu_moe_gating_top_k(
            logits,
            self.top_k,
            bias=None if expert_bias is None else expert_bias.float(),
            **_groups(self),
            group_select_mode=SUM_OF_TWO_BEST,
            norm_type=SIGMOID,
            out_flag=True,  # the scores of all experts, for the gradient
            routed_scaling_factor=self.route_scale,
            eps=EPSILON,
        )
        # as TorchTitan; histc returns its input's dtype, and npu_grouped_matmul takes counts in int64
        return scores, experts.long()


def _groups(router: TokenChoiceTopKRouter) -> dict[str, Any]:
    """Return the operator's arguments for the groups of experts."""
    if router.num_expert_groups is None:
        return {"k_group": 1, "group_count": 1}
    return {"k_group": router.num_limited_groups, "group_count": router.num_expert_groups}


def reason_not_converted(router: TokenChoiceTopKRouter) -> str | None:
    """Return a setting of ``router`` for which the operator has another result or no gradient, or ``None``."""
    experts, groups = router.num_experts, router.num_expert_groups
    if type(router).forward is not TokenChoiceTopKRouter.forward:
        return f"{type(router).__name__} has its own forward"
    if router.score_func != "sigmoid":
        return f'score_func is "{router.score_func}", and the operator has a gradient for "sigmoid" only'
    if not router.route_norm:
        return "route_norm is not set, and the operator normalises the scores"
    if groups is not None and router.num_limited_groups is None:
        return f"num_expert_groups is {groups}, and num_limited_groups is not set"
    if groups is not None and experts % groups:
        return f"num_experts is {experts}, which is not divisible by num_expert_groups, {groups}"
    if forces_load_balance(router):
        return "debug.moe_force_load_balance is set, and the operator selects the experts by score"
    return None


@register
class GatingConverter(Converter):
    """Replaces every ``TokenChoiceTopKRouter`` with normalised sigmoid scores."""

    name = "npu_gating"
    looks_for = "TorchTitan TokenChoiceTopKRouter"
    operators = ("npu_moe_gating_top_k",)
    chip_series = ("910B", "910_93")  # aclnnMoeGatingTopKBackward of CANN 9.1
    chip_limit = "CANN documents the gradient of npu_moe_gating_top_k for the series 910B and 910_93 only"

    def job_error(self) -> str | None:
        if self.job_config.debug.moe_force_load_balance:
            return f"debug.moe_force_load_balance is set: unset it, or remove {self.name} from model.converters"
        return super().job_error()

    def targets(self, model: nn.Module) -> list[tuple[str, nn.Module]]:
        return [(fqn, router) for fqn, router, reason in _routers(model) if reason is None]

    def found_targets(self, model: nn.Module) -> list[tuple[str, nn.Module]]:
        """Return the targets, and log the other routers. Raise if there are no targets."""
        refused = [(fqn, reason) for fqn, _, reason in _routers(model) if reason is not None]
        if refused and not self.targets(model):
            fqn, reason = refused[0]
            advice = f"remove {self.name} from model.converters"
            raise UsageError(f"model.converters: {self.name} cannot replace {fqn}: {reason}; {advice}")
        for fqn, reason in refused:
            log_on_first_rank(f"{self.name}: not converted: {fqn}: {reason}")
        return super().found_targets(model)

    def replacement(self, fqn: str, module: nn.Module) -> nn.Module:
        return swap_forward(module, NpuRouter)

    def limit_errors(self, fqn: str, module: nn.Module) -> list[str]:
        router = cast(TokenChoiceTopKRouter, module)
        logits = torch.empty(1, router.num_experts, device="meta")
        return OPS["npu_moe_gating_top_k"].limit_errors(x=logits, renorm=0, **_groups(router))


def _routers(model: nn.Module) -> list[tuple[str, TokenChoiceTopKRouter, str | None]]:
    """Return name, router and :func:`reason_not_converted` of each router in ``model``."""
    return [
        (fqn, module, reason_not_converted(module))
        for fqn, module in model.named_modules()
        if isinstance(module, TokenChoiceTopKRouter) and module is not model
    ]
