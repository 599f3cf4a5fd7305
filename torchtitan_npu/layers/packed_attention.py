"""Attention in packed batches, by modules without parameters. The converter ``npu_attention`` replaces them."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn


def starts_document(positions: Tensor) -> Tensor:
    """Return where a document starts, (bsz, seqlen): where all of its ``positions`` (axes, bsz, seqlen) are 0."""
    return (positions == 0).all(dim=0)


class DocumentMask(nn.Module):
    """Makes the mask for :class:`MaskedAttention`, once for all layers."""

    def forward(self, positions: Tensor) -> Tensor:
        """Return the mask (bsz, 1, seqlen, seqlen) of the keys that a query sees: earlier ones of its document.

        ``positions`` (axes, bsz, seqlen) start at 0 in each document.
        """
        document = starts_document(positions).cumsum(dim=-1)  # (bsz, seqlen)
        same = document.unsqueeze(-1) == document.unsqueeze(-2)
        return same.tril().unsqueeze(1)


class MaskedAttention(nn.Module):
    """Causal attention, within documents if there is a mask."""

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, attention_masks: Tensor | None, *, scale: float, enable_gqa: bool
    ) -> Tensor:
        """Attend from ``q`` (bsz, heads, seqlen, head_dim), with the mask of :class:`DocumentMask` or without."""
        return F.scaled_dot_product_attention(
            q,
            k,
            v,
            attn_mask=attention_masks,
            is_causal=attention_masks is None,
            scale=scale,
            enable_gqa=enable_gqa,
        )


class FrameAttention(nn.Module):
    """Attention of every patch to all patches of its frame."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor, runs: list[tuple[int, int]]) -> Tensor:
        """Attend from ``q`` (patches, heads, head_dim). ``runs`` are (frames, patches per frame) of equal frames."""
        outputs, start = [], 0
        for frames, length in runs:
            end = start + frames * length
            # (frames * length, heads, head_dim) -> (frames, heads, length, head_dim)
            q_run, k_run, v_run = (t[start:end].unflatten(0, (frames, length)).transpose(1, 2) for t in (q, k, v))
            outputs.append(F.scaled_dot_product_attention(q_run, k_run, v_run).transpose(1, 2).flatten(0, 1))
            start = end
        return torch.cat(outputs)
