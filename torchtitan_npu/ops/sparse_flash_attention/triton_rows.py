"""Which keys a query row may see: the documents of a batch as two integers a row, found on the device; and which of
those that it selected are among them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from torchtitan_npu.ops.core.triton_launch import blocks_in, power_of_2

Lengths = Tensor | Sequence[int] | None
BLOCK = 256
"""How many rows a program finds the documents of."""


class Rows(NamedTuple):
    """All query rows, one after another: (T1,) int32, where T1 is B · S1 (BSND) or the packed tokens (TND)."""

    first: Tensor
    """Where the keys of the row's document begin, among all keys one after another."""
    visible: Tensor
    """How many of them the row may see, counted from the first; 0 for a row of padding."""


def rows_of(
    layout: str, sparse_mode: int, query: Tensor, key: Tensor, query_lengths: Lengths, key_lengths: Lengths
) -> Rows:
    """``query`` and ``key`` are in ``layout``, the lengths as the ops take them. Nothing waits for the device, so what
    the lengths say is not checked; but no row sees a key past the last one."""
    packed = layout == "TND"
    batch, queries = (1, query.shape[0]) if packed else query.shape[:2]
    of_queries, of_keys = _on_device(query_lengths, query), _on_device(key_lengths, key)
    first = torch.empty(batch * queries, dtype=torch.int32, device=query.device)
    visible = torch.empty_like(first)
    documents = of_queries.numel() if packed and of_queries is not None else batch
    _rows[(blocks_in(batch * queries, BLOCK),)](
        *(of_queries, of_keys, first, visible, batch * queries, queries, key.shape[0 if packed else 1]),
        *(documents, power_of_2(documents)),
        PACKED=packed,
        CAUSAL=sparse_mode == 3,
        BLOCK=BLOCK,
    )
    return Rows(first, visible)


def _on_device(lengths: Lengths, tensor: Tensor) -> Tensor | None:
    """On the device of ``tensor``. A list goes through pinned memory: from other memory the copy waits."""
    if lengths is None:
        return None
    if isinstance(lengths, Tensor):
        return lengths.to(tensor.device).contiguous()
    held = torch.tensor(lengths, dtype=torch.int64, pin_memory=tensor.is_cuda)
    return held.to(tensor.device, non_blocking=True)


@triton.jit
def keys_at(indices, places, end, first, visible, key_head, KEY_HEADS: tl.constexpr):
    """The keys that a row selected, at ``places`` before ``end``: their rows in the keys' tensor; and whether there is
    one, and the row may see it."""
    index = tl.load(indices + places, mask=places < end, other=-1)
    return (first + index) * KEY_HEADS + key_head, (index >= 0) & (index < visible)


@triton.jit
def count_of(indices, visible, TOP_K: tl.constexpr, BLOCK_TOP_K: tl.constexpr):
    """After how many places of a row there is no key that it may see any more."""
    places = tl.arange(0, BLOCK_TOP_K)
    _, there = keys_at(indices, places, TOP_K, 0, visible, 0, 1)
    return tl.max(tl.where(there, places + 1, 0))


@triton.jit(do_not_specialize=["documents", "step"])  # they are others in every batch
def _rows(
    query_lengths,
    key_lengths,
    first,
    visible,
    rows,
    queries,  # tokens of a sequence (BSND), or all there are (TND)
    keys,
    documents,
    step,  # a power of 2, not less
    PACKED: tl.constexpr,
    CAUSAL: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = row < rows
    if PACKED:
        # how many documents end before the row, by bisection; what follows the last one belongs to it
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
    following = query_start + query_count - 1 - row  # how many queries of the document; less than 0: padding
    if CAUSAL:  # the last query sees the last key, the one before it one key less
        seen = tl.maximum(seen - following, 0)
    tl.store(first + row, key_start, mask=inside)
    tl.store(visible + row, tl.where(following >= 0, seen, 0), mask=inside)


@triton.jit
def _document(lengths, document, mask, tokens, PACKED: tl.constexpr):
    """Where the tokens of each ``document`` begin, and how many they are."""
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
