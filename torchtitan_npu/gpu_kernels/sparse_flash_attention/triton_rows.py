"""The keys that each query row may attend to, as two integers per row, computed on the device."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from torchtitan_npu.gpu_kernels.launch import blocks_in, power_of_2

Lengths = Tensor | Sequence[int] | None
BLOCK = 256
"""Rows per program."""


class Rows(NamedTuple):
    """Two values for each query row, (T1,) int32, where T1 is B · S1 (BSND) or the number of packed tokens (TND)."""

    first: Tensor
    """The first key of the row's document, as an index into all keys."""
    visible: Tensor
    """The number of the document's keys that the row may attend to, counted from the first; 0 for padding."""


def rows_of(
    layout: str, sparse_mode: int, query: Tensor, key: Tensor, query_lengths: Lengths, key_lengths: Lengths
) -> Rows:
    """Return the keys of each row. ``query`` and ``key`` are in ``layout``, the lengths as the operators take them.

    The values of the lengths are not checked, which would synchronise with the device. They are clamped: no row attends
    to a key past the last one.
    """
    packed = layout == "TND"
    batch, queries = (1, query.shape[0]) if packed else query.shape[:2]
    cu_seqlens_q, cu_seqlens_k = _on_device(query_lengths, query), _on_device(key_lengths, key)
    first = torch.empty(batch * queries, dtype=torch.int32, device=query.device)
    visible = torch.empty_like(first)
    documents = cu_seqlens_q.numel() if packed and cu_seqlens_q is not None else batch
    _rows[(blocks_in(batch * queries, BLOCK),)](
        *(cu_seqlens_q, cu_seqlens_k, first, visible, batch * queries, queries, key.shape[0 if packed else 1]),
        *(documents, power_of_2(documents)),
        PACKED=packed,
        CAUSAL=sparse_mode == 3,
        BLOCK=BLOCK,
    )
    return Rows(first, visible)


def _on_device(lengths: Lengths, tensor: Tensor) -> Tensor | None:
    """Return the lengths on the device of ``tensor``. A list is copied from pinned memory, without synchronising."""
    if lengths is None:
        return None
    if isinstance(lengths, Tensor):
        return lengths.to(tensor.device).contiguous()
    pinned = torch.tensor(lengths, dtype=torch.int64, pin_memory=tensor.is_cuda)
    return pinned.to(tensor.device, non_blocking=True)


@triton.jit
def keys_at(indices, entries, end, first, visible, key_head, KEY_HEADS: tl.constexpr):
    """Return the rows, in the keys' tensor, of the keys selected at ``entries`` before ``end``.

    Also returns whether each entry holds a key that the row may attend to.
    """
    index = tl.load(indices + entries, mask=entries < end, other=-1)
    return (first + index) * KEY_HEADS + key_head, (index >= 0) & (index < visible)


@triton.jit
def count_of(indices, visible, TOP_K: tl.constexpr, BLOCK_TOP_K: tl.constexpr):
    """Return the number of entries of a row up to its last key."""
    entries = tl.arange(0, BLOCK_TOP_K)
    _, there = keys_at(indices, entries, TOP_K, 0, visible, 0, 1)
    return tl.max(tl.where(there, entries + 1, 0))


@triton.jit(do_not_specialize=["documents", "step"])  # they change from batch to batch
def _rows(
    query_lengths,
    key_lengths,
    first,
    visible,
    rows,
    queries,  # tokens of a sequence (BSND) or of the batch (TND)
    keys,
    documents,
    step,  # a power of 2 not below documents
    PACKED: tl.constexpr,
    CAUSAL: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = row < rows
    if PACKED:
        # count the documents that end before the row, by bisection; tokens after the last document belong to it
        document = tl.zeros((BLOCK,), tl.int32)
        while step > 0:
            more = document + step
            there = inside & (more <= documents)
            ended = _length(query_lengths + more - 1, there, queries) <= row
            document = tl.where(there & ended, more, document)
            step //= 2
        document = tl.minimum(document, documents - 1)
    else:
        document = row // queries
    query_start, query_count = _document(query_lengths, document, inside, queries, PACKED)
    key_start, seen = _document(key_lengths, document, inside, keys, PACKED)
    following = query_start + query_count - 1 - row  # queries of the document after this one; negative for padding
    if CAUSAL:  # the last query attends up to the last key, each query before it to one key less
        seen = tl.maximum(seen - following, 0)
    tl.store(first + row, key_start, mask=inside)
    tl.store(visible + row, tl.where(following >= 0, seen, 0), mask=inside)


@triton.jit
def _document(lengths, document, mask, tokens, PACKED: tl.constexpr):
    """Return the first token of each ``document`` and its number of tokens."""
    if PACKED:
        end = _length(lengths + document, mask, tokens)
        start = _length(lengths + document - 1, mask & (document > 0), tokens)
        count = tl.maximum(end - start, 0)
    else:
        start = document * tokens
        count = tl.zeros_like(start) + tokens
        if lengths is not None:
            count = _length(lengths + document, mask, tokens)
    return start, count


@triton.jit
def _length(pointer, mask, tokens):
    return tl.minimum(tl.maximum(tl.load(pointer, mask=mask, other=0), 0), tokens).to(tl.int32)
