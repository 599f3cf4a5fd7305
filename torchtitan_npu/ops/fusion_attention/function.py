"""Attention as models call it, on ``npu_fusion_attention``."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from torchtitan_npu.ops.fusion_attention.op import COMPRESSED, MAX_DOCUMENTS

CAUSAL, UNMASKED = 3, 0
"""Values of ``sparse_mode``. The last query of a causal call is at its last key."""


def causal_mask(device: torch.device) -> Tensor:
    """Return the mask that the operator needs for causal attention, whatever the number of queries and keys."""
    return torch.ones(COMPRESSED, COMPRESSED, dtype=torch.bool, device=device).triu_(1)


def attention(query: Tensor, key: Tensor, value: Tensor, scale: float | None, mask: Tensor | None) -> Tensor:
    """Return the attention of ``query`` (bsz, queries, heads, head_dim), in that layout.

    ``key`` and ``value`` are (bsz, keys, key heads, head_dim). ``mask`` is :func:`causal_mask`; without it every query
    attends to all keys.
    """
    return _call(query, key, value, scale, mask, "BSND")


def packed_attention(
    query: Tensor, key: Tensor, value: Tensor, ends: Sequence[int], scale: float | None, mask: Tensor | None
) -> Tensor:
    """Return the attention of ``query`` (tokens, heads, head_dim) within documents that end at ``ends``.

    Like :func:`attention`. More documents than the operator takes are several calls.
    """
    outputs = []
    for start, part in _parts(ends):
        rows = slice(start, part[-1])
        lengths = [end - start for end in part]
        outputs.append(_call(query[rows], key[rows], value[rows], scale, mask, "TND", lengths))
    return outputs[0] if len(outputs) == 1 else torch.cat(outputs)


def _parts(ends: Sequence[int]) -> Iterator[tuple[int, Sequence[int]]]:
    """Yield the first token and the ends of at most ``MAX_DOCUMENTS`` documents at a time."""
    for first in range(0, len(ends), MAX_DOCUMENTS):
        yield (ends[first - 1] if first else 0), ends[first : first + MAX_DOCUMENTS]


def _call(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    scale: float | None,
    mask: Tensor | None,
    layout: str,
    ends: list[int] | None = None,
) -> Tensor:
    return torch.ops.npu.npu_fusion_attention(
        query,
        key,
        value,
        head_num=query.shape[-2],
        input_layout=layout,
        scale=query.shape[-1] ** -0.5 if scale is None else scale,
        atten_mask=mask,
        sparse_mode=UNMASKED if mask is None else CAUSAL,
        actual_seq_qlen=ends,
        actual_seq_kvlen=ends,
    )[0]
