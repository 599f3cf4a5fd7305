"""Sorting the tokens that arrived from other ranks by expert, in plain PyTorch."""

from __future__ import annotations

import torch
from torch import Tensor

from torchtitan_npu.errors import UsageError


def npu_moe_re_routing(
    tokens: Tensor,
    expert_token_num_per_rank: Tensor,
    per_token_scales: Tensor | None,
    expert_token_num_type: int,
    idx_type: int,
    tokens_dtype: int | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """From rank by rank, expert by expert within each, to expert by expert, rank by rank within each.

    ``tokens`` (tokens, hidden) as an all-to-all leaves them, ``expert_token_num_per_rank`` (ranks, experts): how many
    came from each rank for each expert. Returns ``permute_tokens = tokens[permute_token_idx]``, the scales (tokens,)
    alike (zeros without ``per_token_scales``), ``permute_token_idx`` (tokens,) in int32, and the tokens of each expert.
    """
    counts = expert_token_num_per_rank
    total = int(counts.sum())
    if total != tokens.shape[0]:
        raise UsageError(
            f"npu_moe_re_routing: expert_token_num_per_rank must add up to the {tokens.shape[0]} tokens, not {total}"
        )
    experts = torch.arange(counts.shape[1], device=counts.device).repeat(counts.shape[0])
    expert_of_token = experts.repeat_interleave(counts.flatten())
    order = expert_of_token.argsort(stable=True)
    scales = tokens.new_zeros(len(tokens), dtype=torch.float32) if per_token_scales is None else per_token_scales[order]
    return tokens[order], scales, order.int(), counts.sum(0, dtype=counts.dtype)
