"""Blocks of neighbouring queries that share a tile, with the union of the keys that they selected.

A tile of the Gluon kernels holds 64 heads. On a tensor-parallel rank a query has fewer, so that a tile would
gather a key for each query that selected it. A block of queries gathers each key of the union once, and a bit says
which queries selected it.
"""

from __future__ import annotations

from functools import cache
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from torchtitan_npu.gpu_kernels.launch import blocks_in, multiprocessors, power_of_2
from torchtitan_npu.gpu_kernels.sparse_flash_attention.gluon_tiles import BLOCK_HEADS, BLOCK_KEYS, count_entries
from torchtitan_npu.gpu_kernels.sparse_flash_attention.triton_rows import Rows, keys_at

MOST_QUERIES = 8
"""The most queries of a block: a key has one bit for each."""
GAIN = 1.1
"""Blocks must be this much faster by estimate, because lists and masks take time, too."""
MARKS = 2**26
"""Bytes of the workspace in which the keys of a block are marked."""
BLOCK = 2048
"""Entries or keys that a program handles at once."""
PROGRAMS = 4
"""Programs per multiprocessor."""


class Selection(NamedTuple):
    """The keys of each query, or of each block of queries."""

    queries: int
    """Queries of a block."""
    keys: Tensor
    """Indices of keys: (..., N2, K) as the operator takes them, or (blocks, 1, entries) ascending and then -1."""
    rows: Rows
    """The keys that each row of ``keys`` may attend to. A list of a block has indices into all keys."""
    counts: Tensor
    """Per row: entries up to the last valid key, and leading valid entries, (2, rows)."""
    chosen: Tensor | None
    """If bit i is set, query i of the block selected the key: (blocks, entries) int8. Read for blocks only."""
    active: Tensor | None
    """If bit i is set, query i of the block selected any key: (blocks,) int32. None if all did, or without blocks."""


@cache
def queries_per_block(heads: int, tokens: int, queries: int, keys: int, top_k: int, causal: bool) -> int:
    """Return the number of neighbouring queries per block that takes the least time if queries select random keys.

    Selections of trained indexers overlap more than random ones, so blocks gain at least as much as estimated. Blocks
    divide ``tokens``; ``queries`` and ``keys`` are those of a document.
    """

    def keys_per_query(block: int) -> float:
        """Return the expected keys of a block per query. Time is proportional to it, because tiles are padded."""
        least = max(1, keys - queries + 1) if causal else keys
        visible = [least + (keys - least) * (i + 0.5) / 8 for i in range(8)]
        return sum(n * (1 - (1 - min(top_k, n) / n) ** block) for n in visible) / block

    sizes = [n for n in (2, 4, MOST_QUERIES) if tokens % n == 0 and n * heads <= BLOCK_HEADS.value]
    if not sizes or not keys:
        return 1
    best = min(sizes, key=keys_per_query)
    return best if GAIN * keys_per_query(best) < keys_per_query(1) else 1


def select(
    sparse_indices: Tensor, rows: Rows, key: Tensor, heads: int, tokens: int, document: tuple[int, int, bool]
) -> Selection:
    """Return the keys of each query, or of blocks of queries if these are faster and there is one key head.

    ``tokens`` are the queries of a sequence (BSND) or of the batch (TND). ``document`` is the number of queries and of
    keys of a document, and whether it is causal. A key that a query selected twice counts once in a block.
    """
    key_heads, top_k = sparse_indices.shape[-2:]
    queries, keys, causal = document
    block = queries_per_block(heads, tokens, queries, keys, top_k, causal) if key_heads == 1 else 1
    if block == 1:
        counts = count_entries(sparse_indices, rows)
        return Selection(1, sparse_indices, rows, counts, chosen=counts, active=None)
    return unite(sparse_indices, rows, block, key.shape[-3], key.numel() // key.shape[-1])


def unite(sparse_indices: Tensor, rows: Rows, queries: int, sequence: int, keys: int) -> Selection:
    """Return the selection of blocks of ``queries``, which may attend to ``sequence`` of all ``keys``."""
    top_k = sparse_indices.shape[-1]
    blocks = rows.first.numel() // queries
    # a power of 2, because the kernels are compiled for it
    entries = blocks_in(min(queries * top_k, power_of_2(sequence)), BLOCK_KEYS.value) * BLOCK_KEYS.value
    lists = torch.empty(blocks, 1, entries, dtype=torch.int32, device=sparse_indices.device)
    chosen = torch.empty(blocks, entries, dtype=torch.int8, device=lists.device)
    of_blocks = torch.empty(5, blocks, dtype=torch.int32, device=lists.device)
    words = blocks_in(sequence, 4)
    programs = max(1, min(blocks, PROGRAMS * multiprocessors(lists.device), MARKS // (4 * words)))
    marks = torch.empty(programs, words, dtype=torch.int32, device=lists.device)
    _unite[(programs,)](
        *(sparse_indices, *rows, marks, marks.view(torch.int8), lists, chosen, of_blocks, blocks, keys, words),
        QUERIES=queries,
        TOP_K=top_k,
        ENTRIES=entries,
        BLOCK=BLOCK,
        num_warps=8,
    )
    return Selection(queries, lists, Rows(of_blocks[0], of_blocks[1]), of_blocks[2:4], chosen, of_blocks[4])


@triton.jit
def _unite(
    indices,
    first_key,
    visible_keys,
    marks,
    bytes_of_marks,
    lists,
    chosen,
    of_blocks,
    blocks,
    keys,
    words,
    QUERIES: tl.constexpr,
    TOP_K: tl.constexpr,
    ENTRIES: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Write the keys that the queries of each block selected, ascending, and which queries selected each.

    A program marks the keys of one block after the other in a part of ``marks``, a byte per key.
    """
    in_block = tl.arange(0, QUERIES)
    at = tl.arange(0, BLOCK)
    marks += tl.program_id(0).to(tl.int64) * words
    bytes_of_marks += tl.program_id(0).to(tl.int64) * words * 4
    for block in range(tl.program_id(0), blocks, tl.num_programs(0)):
        firsts = tl.load(first_key + block * QUERIES + in_block)
        ends = firsts + tl.load(visible_keys + block * QUERIES + in_block)
        seen = ends > firsts
        start = tl.min(tl.where(seen, firsts, keys))
        span = tl.maximum(tl.max(tl.where(seen, ends, 0)) - start, 0)
        for word in range(0, span, 4 * BLOCK):
            tl.store(marks + word // 4 + at, 0, mask=word // 4 + at < words)
        tl.debug_barrier()

        active = 0
        for query in range(0, QUERIES):
            row = block * QUERIES + query
            selected = indices + tl.full((), TOP_K, tl.int64) * row
            first, visible = tl.load(first_key + row) - start, tl.load(visible_keys + row)
            for entry in range(0, TOP_K, BLOCK):
                key, there = keys_at(selected, entry + at, TOP_K, first, visible, 0, 1)
                tl.atomic_or(marks + key // 4, 1 << (key % 4 * 8 + query), mask=there, sem="relaxed")
                active |= tl.max(there.to(tl.int32)) << query
        tl.debug_barrier()

        count = 0
        of_list = tl.full((), ENTRIES, tl.int64) * block
        for key in range(0, span, BLOCK):
            by = tl.load(bytes_of_marks + key + at, mask=key + at < span, other=0)
            there = by != 0
            entry = of_list + count - 1 + tl.cumsum(there.to(tl.int32))
            tl.store(lists + entry, start + key + at, mask=there)
            tl.store(chosen + entry, by, mask=there)
            count += tl.sum(there.to(tl.int32))
        for entry in range(count, ENTRIES, BLOCK):
            tl.store(lists + of_list + entry + at, -1, mask=entry + at < ENTRIES)
            tl.store(chosen + of_list + entry + at, 0, mask=entry + at < ENTRIES)
        tl.store(of_blocks + block, 0)
        tl.store(of_blocks + blocks + block, keys)
        tl.store(of_blocks + 2 * blocks + block, count)
        tl.store(of_blocks + 3 * blocks + block, count)
        tl.store(of_blocks + 4 * blocks + block, active)
        tl.debug_barrier()  # the marks are read before the next block overwrites them
