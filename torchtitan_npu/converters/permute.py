"""``npu_permute``: tokens go to their experts and come back by the fused operators.

TorchTitan sorts the (token, expert) pairs, gathers the tokens' rows, and after the experts scatters and adds them up.
``npu_moe_token_permute`` and ``npu_moe_token_unpermute`` do either in one call. Where expert parallel moves tokens
between ranks, its dispatch and combine use them too: :mod:`torchtitan_npu.distributed.expert_parallel`.
"""

from __future__ import annotations

from typing import cast

import torch
from torch import Tensor, nn
from torchtitan.config import JobConfig
from torchtitan.models.moe.moe import MoE, TokenReorderer
from torchtitan.protocols.train_spec import get_train_spec

from torchtitan_npu.converters.base import Converter, register, with_forward
from torchtitan_npu.errors import UsageError
from torchtitan_npu.ops import OPS
from torchtitan_npu.upstream.adapted_spec import AdaptedTrainSpec


class NpuTokenReorderer(TokenReorderer):
    """Says which of the (token, choice) pairs this rank routes, and leaves the sorting to the operator.

    It stays a module with TorchTitan's arguments and results because parallel plans hook on to it: where expert
    parallel takes the tensor-parallel ranks, each rank routes a share of the pairs.
    """

    def forward(self, top_scores: Tensor, selected_experts_indices: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """From scores and experts (tokens, top_k): the pairs' scores, their numbers, the experts' numbers of pairs."""
        experts = selected_experts_indices.view(-1)
        tokens_per_expert = torch.histc(experts, bins=self.num_experts, min=0, max=self.num_experts)
        return top_scores.view(-1), torch.arange(experts.numel(), device=experts.device), tokens_per_expert


class NpuMoE(MoE):
    """TorchTitan's ``MoE`` on ``npu_moe_token_permute`` and ``npu_moe_token_unpermute``."""

    counts_again = True
    """Whether a forward that is repeated for the backward pass counts too, as TorchTitan's optimizer expects. One that
    takes the counts as they are says otherwise: :mod:`torchtitan_npu.components.expert_balance`."""
    told_to_count: bool | None = None
    """Whether the next forward counts. A compiled one is told, since it cannot ask; others ask. See
    :mod:`torchtitan_npu.compile.regions`."""
    waits_for_counts = False
    """Whether the host has to know how many tokens an expert gets."""

    def extra_repr(self) -> str:
        return f"top_k={self.router.top_k}, permutation=npu_moe_token_permute"

    def forward(self, x: Tensor) -> Tensor:
        """``x`` (batch, sequence, dim) through its experts."""
        shape, dim, top_k = x.shape, x.shape[-1], self.router.top_k
        x = x.view(-1, dim)

        # (tokens, top_k), (tokens, top_k), (num_experts)
        top_scores, experts, tokens_per_expert = self.router(x, self.expert_bias)
        counts = self.is_counted() if self.told_to_count is None else self.told_to_count
        if counts:
            with torch.no_grad():
                self.tokens_per_expert.add_(tokens_per_expert)

        # the pairs of a token and a choice that this rank routes: all of them, or a share
        scores, pairs, tokens_per_expert = self.reorderer(top_scores, experts)
        tokens = None
        if pairs.numel() < experts.numel():
            experts = experts.view(-1)[pairs].view(-1, top_k)
            tokens = pairs[::top_k] // top_k
        scores = scores.view(-1, top_k)

        # (pairs, dim); row_of_pair (pairs) says where each pair's row is
        rows, row_of_pair = torch.ops.npu.npu_moe_token_permute(x if tokens is None else x[tokens], experts.int())
        if self.score_before_experts:
            score_of_row = scores.new_empty(scores.numel()).scatter(0, row_of_pair.long(), scores.view(-1))
            rows = (rows.float() * score_of_row.unsqueeze(1)).to(x.dtype)
        rows = self.experts(rows, tokens_per_expert)

        # before the sum over the experts, so that it may overlap with expert parallel's communication
        shared = None if self.shared_experts is None else self.shared_experts(x)

        if self.score_before_experts:
            out = torch.ops.npu.npu_moe_token_unpermute(rows, row_of_pair).view(-1, top_k, dim).sum(dim=1)
        else:  # weighted in the wider dtype, as TorchTitan does in float32
            rows = rows.to(torch.promote_types(rows.dtype, x.dtype))
            out = torch.ops.npu.npu_moe_token_unpermute(rows, row_of_pair, scores).to(x.dtype)
        if tokens is not None:
            out = out.new_zeros(x.shape).index_copy(0, tokens, out)
        return (out if shared is None else shared + out).view(shape)

    def is_counted(self) -> bool:
        """Whether a forward that runs now counts its tokens."""
        return self.counts_again or not _recomputing()


def deepep_objection(name: str, job_config: JobConfig) -> str | None:
    """Why the converter ``name`` of experts' work cannot be had with DeepEP, if the job asks for that."""
    if job_config.parallelism.expert_parallel_comm_backend != "deepep":
        return None
    return (
        f'{name} and parallelism.expert_parallel_comm_backend = "deepep" collide: DeepEP orders the tokens in a way of '
        f'its own; set it to "standard", or take {name} off the list'
    )


def _recomputing() -> bool:
    """Whether this forward is activation checkpointing's second one, which runs inside the backward pass."""
    return torch._C._current_graph_task_id() != -1


@register
class PermuteConverter(Converter):
    """Replaces every ``MoE``, and every subclass of it that has its forward."""

    name = "npu_permute"
    looks_for = "TorchTitan MoE"
    operators = ("npu_moe_token_permute", "npu_moe_token_unpermute")

    def objection(self) -> str | None:
        return super().objection() or deepep_objection(self.name, self.job_config) or self._dispatch_objection()

    def _dispatch_objection(self) -> str | None:
        name, degree = self.job_config.model.name, self.job_config.parallelism.expert_parallel_degree
        if degree == 1 or isinstance(get_train_spec(name), AdaptedTrainSpec):
            return None
        return (
            f"{self.name} with expert parallel needs a train spec that brings its dispatch: register that of {name} as "
            "torchtitan_npu.upstream.train_specs.adapt(spec)"
        )

    def targets(self, model: nn.Module) -> list[tuple[str, nn.Module]]:
        return [
            (fqn, module)
            for fqn, module in model.named_modules()
            if isinstance(module, MoE) and type(module).forward is MoE.forward and module is not model
        ]

    def replacement(self, fqn: str, module: nn.Module) -> nn.Module:
        moe = with_forward(module, NpuMoE)
        reorderer = type(moe.reorderer)
        if reorderer.forward is not TokenReorderer.forward:
            raise UsageError(
                f"model.converters: {self.name} takes the place of TorchTitan's TokenReorderer, and {fqn}.reorderer is "
                f"a {reorderer.__name__} with a forward of its own; take {self.name} off the list"
            )
        moe.reorderer = with_forward(moe.reorderer, NpuTokenReorderer)
        return moe

    def refusals(self, fqn: str, module: nn.Module) -> list[str]:
        """Of a rank's own tokens. How many expert parallel brings to it, their routing decides step by step."""
        router = cast(MoE, module).router
        gate = cast(nn.Linear, router.gate).weight
        rows = max(sequences * length for sequences, length in self.batches())
        dims = self.parallel_dims
        if dims.ep_enabled and not dims.etp_enabled:  # each tensor-parallel rank routes a share
            rows //= dims.tp
        tokens = torch.empty(rows, gate.shape[1], dtype=gate.dtype, device="meta")
        experts = torch.empty(rows, router.top_k, dtype=torch.int32, device="meta")
        return OPS["npu_moe_token_permute"].refusals(tokens=tokens, indices=experts)
