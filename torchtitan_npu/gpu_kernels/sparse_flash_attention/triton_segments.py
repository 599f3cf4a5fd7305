"""Deterministic sums of the contributions of many rows to the same key, in a fixed order."""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from torchtitan_npu.gpu_kernels.launch import blocks_in, tile_of
from torchtitan_npu.gpu_kernels.sparse_flash_attention.triton_rows import Rows, keys_at

ENTRIES = 1024
"""Entries of the selections per program."""
AT_ONCE = 8
"""Contributions to a key in flight from memory at once; each has a partial sum."""


@dataclass(frozen=True)
class Segments:
    """The entries that selected each key, in one list sorted by key."""

    order: Tensor
    """The entries (rows · N2 · K) int64, sorted by key and, for one key, by row."""
    ends: Tensor
    """Where the entries of each key end in ``order``, (keys · N2) int32. Entries after the last end hold no key."""


def segments_of(sparse_indices: Tensor, rows: Rows, start: int, count: int, keys: int) -> Segments:
    """Return the segments of ``count`` rows from ``start`` on. ``keys`` is the number of keys times their heads."""
    key_heads, top_k = sparse_indices.shape[-2:]
    entries = count * key_heads * top_k
    # 16 bits are sorted in half the time
    dtype = torch.int16 if keys <= torch.iinfo(torch.int16).max else torch.int32
    slots = torch.empty(entries, dtype=dtype, device=sparse_indices.device)
    _slots[(blocks_in(entries, ENTRIES),)](
        *(sparse_indices.contiguous(), rows.first, rows.visible, slots, start, entries, keys),
        KEY_HEADS=key_heads,
        TOP_K=top_k,
        BLOCK=ENTRIES,
    )
    sorted_slots, order = slots.sort(stable=True)
    key_numbers = torch.arange(keys, dtype=dtype, device=slots.device)
    return Segments(order, torch.searchsorted(sorted_slots, key_numbers, right=True, out_int32=True))


def add_segments(contributions: Tensor, segments: Segments, target: Tensor) -> None:
    """Add ``contributions`` (rows, N2, K, width) to the selected keys in ``target`` (keys, N2, width), float32.

    Entries without a key are not read.
    """
    width = target.shape[-1]
    block = min(512, tile_of(width))
    _add_segments[(len(segments.ends), blocks_in(width, block))](
        contributions, segments.order, segments.ends, target, WIDTH=width, BLOCK=block, AT_ONCE=AT_ONCE
    )


@triton.jit
def _slots(
    indices,
    first_key,
    visible_keys,
    slots,
    start,
    entries,
    keys,
    KEY_HEADS: tl.constexpr,
    TOP_K: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Write the key at each entry of the rows from ``start`` on, or ``keys`` if the row may attend to none there."""
    entry = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = entry < entries
    row = start + entry // (KEY_HEADS * TOP_K)
    skipped = tl.full((), start, tl.int64) * KEY_HEADS * TOP_K
    first = tl.load(first_key + row, mask=inside, other=0)
    visible = tl.load(visible_keys + row, mask=inside, other=0)
    slot, there = keys_at(indices + skipped, entry, entries, first, visible, entry // TOP_K % KEY_HEADS, KEY_HEADS)
    tl.store(slots + entry, tl.where(there, slot, keys), mask=inside)


@triton.jit
def _add_segments(contributions, order, ends, target, WIDTH: tl.constexpr, BLOCK: tl.constexpr, AT_ONCE: tl.constexpr):
    key = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < WIDTH
    begin = tl.load(ends + key - 1, mask=key > 0, other=0)
    end = tl.load(ends + key)
    if begin == end:
        return
    total = tl.zeros((AT_ONCE, BLOCK), tl.float32)
    for first in range(begin, end, AT_ONCE):
        entries = first + tl.arange(0, AT_ONCE)
        there = entries < end
        entry = tl.load(order + entries, mask=there, other=0)
        mask = there[:, None] & inside[None, :]
        total += tl.load(contributions + entry[:, None] * WIDTH + columns[None, :], mask=mask, other=0.0)
    before = tl.load(target + key * WIDTH + columns, mask=inside, other=0.0)
    tl.store(target + key * WIDTH + columns, before + tl.sum(total, 0), mask=inside)
