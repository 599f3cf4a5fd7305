"""``npu_permute``: fused operators sort tokens by expert and combine the experts' outputs.

TorchTitan sorts the (token, expert) pairs, gathers the tokens' rows, and after the experts scatters and adds them.
``npu_moe_token_permute`` and ``npu_moe_token_unpermute`` are one call each. The dispatch and combine of expert parallel
use them too: :mod:`torchtitan_npu.distributed.expert_parallel`.
"""

from __future__ import annotations

from typing import cast

import torch
from torch import Tensor, nn
from torchtitan.models.moe.moe import MoE, TokenReorderer
from torchtitan.protocols.train_spec import get_train_spec

from torchtitan_npu import platform
from torchtitan_npu.converters.base import Converter, register, swap_forward
from torchtitan_npu.errors import UsageError
from torchtitan_npu.ops import OPS
from torchtitan_npu.ops.moe_permute import unpermute, weighted_unpermute
from torchtitan_npu.torch_internals.autograd import in_backward_pass


class NpuTokenReorderer(TokenReorderer):
    """Selects the (token, choice) pairs that this rank routes, and leaves the sorting to the operator.

    Parallel plans hook into this module, so it keeps TorchTitan's arguments and results. If expert parallel uses the
    tensor-parallel ranks, each rank routes a part of the pairs.
    """

    def forward(self, top_scores: Tensor, selected_experts_indices: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return scores and indices of the pairs, and pairs per expert, from scores and experts (tokens, top_k)."""
        experts = selected_experts_indices.view(-1)
        tokens_per_expert = torch.histc(experts, bins=self.num_experts, min=0, max=self.num_experts)
        return top_scores.view(-1), torch.arange(experts.numel(), device=experts.device), tokens_per_expert


class NpuMoE(MoE):
    """TorchTitan's ``MoE`` on ``npu_moe_token_permute`` and ``npu_moe_token_unpermute``."""

    count_in_recomputation = True
    """Count tokens also in the recomputation of a checkpointed forward, as TorchTitan's optimizer hook expects.
    :mod:`torchtitan_npu.components.expert_balance` unsets it."""
    counts_tokens: bool | None = None
    """Set to decide whether the next forward counts tokens. A compiled forward cannot find out itself:
    :mod:`torchtitan_npu.compile.block_regions` sets it."""
    waits_for_counts = False
    """The host needs the number of tokens per expert."""
    combine_dtype: str = "rows"
    """Sum the experts' outputs in the dtype of the scores, or of the outputs: ``npu.moe_combine_dtype``."""

    def extra_repr(self) -> str:
        return f"top_k={self.router.top_k}, permutation=npu_moe_token_permute"

    def forward(self, x: Tensor) -> Tensor:
        """Apply to each token of ``x`` (batch, sequence, dim) its experts."""
        shape, dim, top_k = x.shape, x.shape[-1], self.router.top_k
        x = x.view(-1, dim)

        # (tokens, top_k), (tokens, top_k), (num_experts)
        top_scores, experts, tokens_per_expert = self.router(x, self.expert_bias)
        counts = self.is_counted() if self.counts_tokens is None else self.counts_tokens
        if counts:
            with torch.no_grad():
                self.tokens_per_expert.add_(tokens_per_expert)

        # the (token, choice) pairs that this rank routes: all, or a part
        scores, pairs, tokens_per_expert = self.reorderer(top_scores, experts)
        tokens = None
        if pairs.numel() < experts.numel():
            experts = experts.view(-1)[pairs].view(-1, top_k)
            tokens = pairs[::top_k] // top_k
        scores = scores.view(-1, top_k)

        # rows (pairs, dim); row_of_pair (pairs) is the row of each pair
        rows, row_of_pair = torch.ops.npu.npu_moe_token_permute(x if tokens is None else x[tokens], experts.int())
        if self.score_before_experts:
            score_of_row = scores.new_empty(scores.numel()).scatter(0, row_of_pair.long(), scores.view(-1))
            rows = (rows.float() * score_of_row.unsqueeze(1)).to(x.dtype)
        rows = self.experts(rows, tokens_per_expert)

        # before the combine, so that it overlaps with expert parallel's communication
        shared = None if self.shared_experts is None else self.shared_experts(x)

        if self.score_before_experts:
            out = unpermute(rows, row_of_pair).view(-1, top_k, dim).sum(dim=1)
        else:
            dtype = torch.promote_types(rows.dtype, x.dtype)
            if self.combine_dtype == "scores":  # float32, as TorchTitan
                dtype = torch.promote_types(dtype, scores.dtype)
            out = weighted_unpermute(rows, row_of_pair, scores, dtype).to(x.dtype)
        if tokens is not None:
            out = out.new_zeros(x.shape).index_copy(0, tokens, out)
        return (out if shared is None else shared + out).view(shape)

    def is_counted(self) -> bool:
        """Return whether a forward that runs now counts its tokens."""
        return self.count_in_recomputation or not in_backward_pass()


@register
class PermuteConverter(Converter):
    """Replaces every ``MoE``, and every subclass with its forward."""

    name = "npu_permute"
    looks_for = "TorchTitan MoE"
    operators = ("npu_moe_token_permute", "npu_moe_token_unpermute")
    sorts_tokens = True

    def job_error(self) -> str | None:
        return super().job_error() or self._dispatch_error()

    def _dispatch_error(self) -> str | None:
        name, degree = self.job_config.model.name, self.job_config.parallelism.expert_parallel_degree
        if degree == 1 or getattr(get_train_spec(name), "is_adapted", False):
            return None
        return (
            f"{self.name} with expert parallel needs this package's dispatch: register the TrainSpec of model.name "
            f"{name!r} as torchtitan_npu.train_specs.adapt.adapt(spec)"
        )

    def targets(self, model: nn.Module) -> list[tuple[str, nn.Module]]:
        return [
            (fqn, module)
            for fqn, module in model.named_modules()
            if isinstance(module, MoE) and type(module).forward is MoE.forward and module is not model
        ]

    def found_targets(self, model: nn.Module) -> list[tuple[str, nn.Module]]:
        """Return the targets, and raise if there are none or their experts need tokens that TorchTitan has padded."""
        targets = super().found_targets(model)
        # other backends do not use torch._grouped_mm, and npu_gmm replaces it
        if platform.job_backend() != "cuda" or "npu_gmm" in self.job_config.model.converters:
            return targets
        grouped_mm = any(getattr(cast(MoE, module).experts, "use_grouped_mm", False) for _, module in targets)
        if self.parallel_dims.ep_enabled and grouped_mm:
            raise UsageError(
                f"model.converters: {self.name} with expert parallel needs npu_gmm here: torch._grouped_mm takes only "
                f"tokens that TorchTitan has sorted and padded; list npu_gmm too, or remove {self.name}"
            )
        return targets

    def replacement(self, fqn: str, module: nn.Module) -> nn.Module:
        moe = swap_forward(module, NpuMoE)
        moe.combine_dtype = self.job_config.npu.moe_combine_dtype
        reorderer = type(moe.reorderer)
        if reorderer.forward is not TokenReorderer.forward:
            raise UsageError(
                f"model.converters: {self.name} replaces TorchTitan's TokenReorderer, but {fqn}.reorderer is a "
                f"{reorderer.__name__} with its own forward; remove {self.name} from the list"
            )
        moe.reorderer = swap_forward(moe.reorderer, NpuTokenReorderer)
        return moe

    def limit_errors(self, fqn: str, module: nn.Module) -> list[str]:
        """Check the limits for a rank's tokens. The number that expert parallel dispatches to it varies by step."""
        router = cast(MoE, module).router
        gate = cast(nn.Linear, router.gate).weight
        rows = max(sequences * length for sequences, length in self.batches())
        dims = self.parallel_dims
        if dims.ep_enabled and not dims.etp_enabled:  # each tensor-parallel rank routes a part
            rows //= dims.tp
        tokens = torch.empty(rows, gate.shape[1], dtype=gate.dtype, device="meta")
        experts = torch.empty(rows, router.top_k, dtype=torch.int32, device="meta")
        return OPS["npu_moe_token_permute"].limit_errors(tokens=tokens, indices=experts)
