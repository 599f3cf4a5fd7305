"""Attention over the keys that the indexer scores highest, in small operations.

This is the formula, and the baseline that fused operators are compared with. It keeps seqlen² scores a head.
"""

from __future__ import annotations

import torch
from torch import Tensor, einsum, nn

from torchtitan_npu.models.deepseek_v32.indexer import at_least_float32


class SparseAttention(nn.Module):
    """Softmax attention of each query to ``topk`` of the keys up to its own position."""

    def __init__(self, topk: int) -> None:
        super().__init__()
        self.topk = topk

    def extra_repr(self) -> str:
        return f"topk={self.topk}"

    def forward(
        self,
        q: Tensor,
        q_rope: Tensor,
        k: Tensor,
        k_rope: Tensor,
        v: Tensor,
        index_q: Tensor,
        index_k: Tensor,
        index_weights: Tensor,
        positions: Tensor | None,
        scale: float,
    ) -> Tensor:
        """(bsz, seqlen, n_heads, width of v).

        ``q`` (bsz, seqlen, n_heads, width), ``q_rope`` (bsz, seqlen, n_heads, rope), ``k_rope`` (bsz, seqlen, 1, rope),
        ``k`` and ``v`` (bsz, seqlen, n_heads or 1, their width): with one head, as MLA has it when it is absorbed, all
        queries share it. ``index_q`` (bsz, seqlen, index heads, index dim), ``index_k`` (bsz, seqlen, index dim),
        ``index_weights`` (bsz, seqlen, index heads). ``positions`` (1 or bsz, seqlen) are the tokens' places in their
        sequence, where they are not 0, 1, 2, ...
        """
        if positions is None:
            positions = torch.arange(q.shape[1], device=q.device).unsqueeze(0)
        visible = positions.unsqueeze(2) >= positions.unsqueeze(1)  # (1 or bsz, queries, keys)

        scores = index_scores(index_q, index_k, index_weights)  # (bsz, queries, keys)
        selected = select(scores, visible, self.topk)  # (bsz, queries, keys)

        q = torch.cat([q, q_rope], dim=-1)  # (bsz, queries, n_heads, width + rope)
        k = torch.cat([k, k_rope.expand(-1, -1, k.shape[2], -1)], dim=-1)  # (bsz, keys, n_heads or 1, width + rope)
        logits = at_least_float32(einsum("bqhd,bkhd->bhqk", q, k)) * scale
        logits = logits.masked_fill(~selected.unsqueeze(1), -torch.inf)
        probabilities = logits.softmax(dim=-1).to(v.dtype)  # (bsz, n_heads, queries, keys)
        return einsum("bhqk,bkhd->bqhd", probabilities, v)


def index_scores(q: Tensor, k: Tensor, weights: Tensor) -> Tensor:
    """Σ_h weights_h · ReLU(q_h · k) of every query and key, (bsz, queries, keys)."""
    agreement = einsum("bqhd,bkd->bqhk", at_least_float32(q), at_least_float32(k)).relu()
    return einsum("bqh,bqhk->bqk", weights, agreement)


def select(scores: Tensor, visible: Tensor, topk: int) -> Tensor:
    """Which keys are among the ``topk`` with the highest score that the query can see, (bsz, queries, keys).

    Of equal scores the earlier key's counts as higher, as ``npu_lightning_indexer`` has it. ``visible`` (1 or bsz,
    queries, keys).
    """
    order = scores.masked_fill(~visible, -torch.inf).argsort(dim=-1, descending=True, stable=True)
    best = torch.zeros_like(scores, dtype=torch.bool).scatter(-1, order[..., :topk], True)
    return best & visible
