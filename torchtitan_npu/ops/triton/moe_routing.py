"""Tokens from other ranks sorted by expert; where each comes from is found on the device, without a wait for it."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def npu_moe_re_routing(
    tokens: Tensor, expert_token_num_per_rank: Tensor, per_token_scales: Tensor | None, **_: Any
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """As the reference, but that the counts add up to the tokens is not checked: that would wait for the device."""
    counts = expert_token_num_per_rank
    before = (counts.flatten().cumsum(0) - counts.flatten()).view(counts.shape)  # (ranks, experts): in the tokens
    starts, sizes = before.t().flatten(), counts.t().flatten()  # expert after expert, rank after rank in each
    ends = sizes.cumsum(0)
    place = torch.arange(tokens.shape[0], device=tokens.device)
    part = torch.searchsorted(ends, place, right=True).clamp_(max=len(ends) - 1)
    order = (starts[part] + place - (ends - sizes)[part]).clamp_(0, max(len(place) - 1, 0))
    scales = tokens.new_zeros(len(place), dtype=torch.float32) if per_token_scales is None else per_token_scales[order]
    return tokens.index_select(0, order), scales, order.int(), counts.sum(0, dtype=counts.dtype)
