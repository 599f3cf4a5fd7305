"""The scores of the lightning indexer on Hopper GPUs, in Gluon: one persistent kernel with three warp groups.

Each of two consumers holds the queries of 256 heads in shared memory, for example of 4 rows with 64 heads. A third warp
group copies the keys of these rows, 64 at a time, into a ring of slots. A consumer multiplies each block of keys with
its queries, applies the ReLU and sums over the heads of a row, while products of the other consumer run.

A *row block* is the rows of both consumers, and a *unit* a block of keys for a row block. All programs compute the same
number of adjacent units.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    async_copy,
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from torchtitan_npu.gpu_kernels.launch import blocks_in, multiprocessors, power_of_2, tile_of
from torchtitan_npu.gpu_kernels.lightning_indexer.gluon_top_k import select_top_k
from torchtitan_npu.gpu_kernels.lightning_indexer.triton import best_keys
from torchtitan_npu.gpu_kernels.sparse_flash_attention.gluon_tiles import PIECE, aligned
from torchtitan_npu.gpu_kernels.sparse_flash_attention.triton_rows import Rows

SIZE = gl.constexpr(128)
PIECES = gl.constexpr(2)  # of a query or key
COLUMNS = gl.constexpr(256)  # rows and heads of a consumer
BLOCK_KEYS = gl.constexpr(64)
SLOTS = gl.constexpr(4)
RELU_NAN = gl.constexpr(tl.PropagateNan.ALL)
PLANNED = 512
"""Row blocks that a step of :func:`_plan` counts."""
REGISTERS = {"CONSUMER_REGISTERS": 216, "PRODUCER_REGISTERS": 80}
"""Registers per thread of the second consumer and of the producer. The first consumer has the remaining ones."""

# indices of barriers; the first two have one barrier per slot, the next three one per consumer
FULL = gl.constexpr(0)
FREE = gl.constexpr(4)
QUERY_FULL = gl.constexpr(8)
QUERY_FREE = gl.constexpr(10)
TURN = gl.constexpr(12)
BARRIERS = gl.constexpr(14)


def npu_lightning_indexer(query: Tensor, key: Tensor, **arguments: Any) -> tuple[Tensor, Tensor]:
    """Select keys as the Triton kernel does. Takes half precision, 128 features and at most 64 heads per key head."""
    return best_keys(score, select_top_k, aligned(query.contiguous()), aligned(key.contiguous()), **arguments)


def score(query: Tensor, key: Tensor, weights: Tensor, rows: Rows, scores: Tensor, known: int) -> None:
    """Write the scores of the keys of each row as the function of the same name in Triton does."""
    count, key_heads = rows.first.numel(), key.shape[-2]
    group = query.numel() // (count * key_heads * SIZE.value)
    head_block = tile_of(group)
    rows_of_a_consumer = COLUMNS.value // head_block
    row_blocks = blocks_in(count, 2 * rows_of_a_consumer)
    plan = torch.empty(2, row_blocks, dtype=torch.int32, device=query.device)
    _plan[(1,)](
        *(*rows, plan, count, row_blocks, known),
        KEY_HEADS=key_heads,
        BLOCK_ROWS=2 * rows_of_a_consumer,
        BLOCK_KEYS=BLOCK_KEYS.value,
        PLANNED=min(PLANNED, power_of_2(row_blocks)),
        num_warps=8,
    )
    _score[(multiprocessors(query.device),)](
        *(query, key, weights, *rows, plan, scores, count, row_blocks, key.numel() // (key_heads * SIZE.value)),
        scores.shape[-1],
        HEADS=group,
        KEY_HEADS=key_heads,
        HEAD_BLOCK=head_block,
        **REGISTERS,
        num_warps=4,
    )


@triton.jit
def _plan(
    first_key,
    visible_keys,
    plan,
    rows,
    row_blocks,
    known,
    KEY_HEADS: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_KEYS: tl.constexpr,
    PLANNED: tl.constexpr,
):
    """Write the first key of each row block, and the units up to its end."""
    total = 0
    for start in range(0, row_blocks, PLANNED):
        block = start + tl.arange(0, PLANNED)
        row = block[:, None] * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)[None, :]
        begins = tl.load(first_key + row, mask=row < rows, other=0)
        counts = tl.load(visible_keys + row, mask=row < rows, other=0)
        # the keys of all these rows: those of one document, or of adjacent documents, are contiguous
        begin = tl.min(tl.where(counts > known, begins, 2**31 - 1), 1)
        end = tl.max(tl.where(counts > known, begins + counts, 0), 1)
        units = tl.where(end > 0, (end - begin + BLOCK_KEYS - 1) // BLOCK_KEYS, 0) * KEY_HEADS
        tl.store(plan + block, begin, mask=block < row_blocks)
        tl.store(plan + row_blocks + block, total + tl.cumsum(units, 0), mask=block < row_blocks)
        total += tl.sum(units, 0)


@gluon.jit
def _score(
    query,
    key,
    weights,
    first_key,
    visible_keys,
    plan,
    scores,
    rows,
    row_blocks,
    keys,
    width,
    HEADS: gl.constexpr,
    KEY_HEADS: gl.constexpr,
    HEAD_BLOCK: gl.constexpr,
    CONSUMER_REGISTERS: gl.constexpr,
    PRODUCER_REGISTERS: gl.constexpr,
):
    """Allocate shared memory, initialize the barriers and run the three warp groups."""
    dtype: gl.constexpr = key.dtype.element_ty
    layout: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
    q = gl.allocate_shared_memory(dtype, [2 * PIECES, COLUMNS, PIECE], layout)
    k = gl.allocate_shared_memory(dtype, [SLOTS * PIECES, BLOCK_KEYS, PIECE], layout)
    bars = gl.allocate_shared_memory(gl.int64, [BARRIERS, 1], mbarrier.MBarrierLayout())
    for slot in gl.static_range(SLOTS):
        mbarrier.init(bars.index(FULL + slot), count=128)  # threads of the producer
        mbarrier.init(bars.index(FREE + slot), count=2)
    for consumer in gl.static_range(2):
        mbarrier.init(bars.index(QUERY_FULL + consumer), count=128)
        mbarrier.init(bars.index(QUERY_FREE + consumer), count=1)
        mbarrier.init(bars.index(TURN + consumer), count=1)
    fence_async_shared()

    ends = plan + row_blocks
    total = gl.load(ends + (row_blocks - 1))
    units = (total + gl.num_programs(0) - 1) // gl.num_programs(0)
    start = gl.minimum(gl.program_id(0) * units, total)
    stop = gl.minimum(start + units, total)
    row_block = _find(ends, row_blocks, start)

    shared = (q, k, bars)
    work = (plan, ends, row_block, start, stop)
    of_rows = (weights, first_key, visible_keys, scores, rows, width)
    gl.warp_specialize(
        [
            (_consume, (shared, work, of_rows, HEADS, KEY_HEADS, HEAD_BLOCK, 0)),
            (_consume, (shared, work, of_rows, HEADS, KEY_HEADS, HEAD_BLOCK, 1)),
            (_produce, (shared, work, query, key, rows, keys, HEADS, KEY_HEADS, HEAD_BLOCK)),
        ],
        [4, 4],
        [CONSUMER_REGISTERS, PRODUCER_REGISTERS],
    )


@gluon.jit
def _find(ends, row_blocks, unit):
    """Return the row block of a unit: the number of row blocks that end before it."""
    # Every warp holds all elements, so that the sum needs no shared memory, which Triton 3.6 may overwrite too early:
    # see reads_before_warp_groups in tools/kernel_memory.py.
    layout: gl.constexpr = gl.DistributedLinearLayout(
        reg_bases=[[1], [2], [128], [256]],
        lane_bases=[[4], [8], [16], [32], [64]],
        warp_bases=[[0], [0]],
        block_bases=[],
        shape=[512],
    )
    before = gl.zeros([512], gl.int32, layout)
    for start in range(0, row_blocks, 512):
        block = start + gl.arange(0, 512, layout=layout)
        end = gl.load(ends + block, mask=block < row_blocks, other=2**31 - 1)
        before += gl.where(end <= unit, 1, 0)
    return gl.sum(before, 0)


@gluon.jit
def _part(plan, ends, row_block, unit, stop, KEY_HEADS: gl.constexpr):
    """Return the key head, the first key and the number of key blocks of the units from ``unit`` on.

    They end with the key head, or at ``stop``.
    """
    before = gl.load(ends + (row_block - 1), mask=row_block > 0, other=0)
    of_head = (gl.load(ends + row_block) - before) // KEY_HEADS
    blocks = of_head
    key_head = 0
    block = unit - before
    if of_head > 0:
        key_head = block // of_head
        block = block % of_head
        blocks = gl.minimum(of_head - block, stop - unit)
    return key_head, gl.load(plan + row_block) + block * BLOCK_KEYS, blocks


@gluon.jit
def _produce(
    shared, work, query, key, rows, keys, HEADS: gl.constexpr, KEY_HEADS: gl.constexpr, HEAD_BLOCK: gl.constexpr
):
    """Copy the queries of both consumers, and the blocks of keys."""
    q, k, bars = shared
    plan, ends, row_block, unit, stop = work
    ROWS: gl.constexpr = COLUMNS // HEAD_BLOCK
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])  # a thread copies 16 bytes of a row
    features = gl.arange(0, PIECE, layout=gl.SliceLayout(0, layout))[None, :]
    column = gl.arange(0, COLUMNS, layout=gl.SliceLayout(1, layout))
    in_block = gl.arange(0, BLOCK_KEYS, layout=gl.SliceLayout(1, layout))

    parts = 0  # each with other queries
    used = 0  # blocks that went through the slots
    while unit < stop:
        key_head, start, blocks = _part(plan, ends, row_block, unit, stop, KEY_HEADS)
        if blocks > 0:
            for consumer in gl.static_range(2):
                row = (row_block * 2 + consumer) * ROWS + column // HEAD_BLOCK
                head = column % HEAD_BLOCK
                real = ((row < rows) & (head < HEADS))[:, None]
                at = (row.to(gl.int64) * KEY_HEADS + key_head) * HEADS + head
                queries = query + (at[:, None] * SIZE + features)
                mbarrier.wait(bars.index(QUERY_FREE + consumer), (parts & 1) ^ 1)
                for piece in gl.static_range(PIECES):
                    async_copy.async_copy_global_to_shared(
                        q.index(consumer * PIECES + piece), queries + piece * PIECE, real
                    )
                async_copy.mbarrier_arrive(bars.index(QUERY_FULL + consumer), increment_count=False)
            parts += 1
            for block in range(0, blocks):
                slot = used % SLOTS
                at_key = start + block * BLOCK_KEYS + in_block
                there = (at_key < keys)[:, None]
                from_keys = key + ((at_key.to(gl.int64) * KEY_HEADS + key_head)[:, None] * SIZE + features)
                mbarrier.wait(bars.index(FREE + slot), ((used // SLOTS) & 1) ^ 1)
                for piece in gl.static_range(PIECES):
                    async_copy.async_copy_global_to_shared(
                        k.index(slot * PIECES + piece), from_keys + piece * PIECE, there
                    )
                async_copy.mbarrier_arrive(bars.index(FULL + slot), increment_count=False)
                used += 1
            unit += blocks
        row_block += gl.where(unit >= gl.load(ends + row_block), 1, 0)


@gluon.jit
def _consume(
    shared, work, of_rows, HEADS: gl.constexpr, KEY_HEADS: gl.constexpr, HEAD_BLOCK: gl.constexpr, W: gl.constexpr
):
    """Compute the scores of the rows of consumer ``W``."""
    q, k, bars = shared
    plan, ends, row_block, unit, stop = work
    weights, first_key, visible_keys, scores, rows, width = of_rows
    ROWS: gl.constexpr = COLUMNS // HEAD_BLOCK
    wide: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 256, 16])
    narrow: gl.constexpr = _sums_of_rows(gl.zeros([BLOCK_KEYS, COLUMNS], gl.float32, wide), HEAD_BLOCK).type.layout
    column = gl.arange(0, COLUMNS, layout=gl.SliceLayout(0, wide))
    in_rows = gl.arange(0, ROWS, layout=gl.SliceLayout(0, narrow))
    in_block = gl.arange(0, BLOCK_KEYS, layout=gl.SliceLayout(1, narrow))

    parts = 0  # each with other queries
    used = 0  # blocks that went through the slots
    while unit < stop:
        key_head, start, blocks = _part(plan, ends, row_block, unit, stop, KEY_HEADS)
        if blocks > 0:
            first_row = (row_block * 2 + W) * ROWS
            row = first_row + column // HEAD_BLOCK
            head = column % HEAD_BLOCK
            at = (row.to(gl.int64) * KEY_HEADS + key_head) * HEADS + head
            w = gl.load(weights + at, mask=(row < rows) & (head < HEADS), other=0.0).to(gl.float32)
            stored = first_row + in_rows
            begins = gl.load(first_key + stored, mask=stored < rows, other=0)
            counts = gl.load(visible_keys + stored, mask=stored < rows, other=0)
            target = (stored.to(gl.int64) * KEY_HEADS + key_head) * width

            mbarrier.wait(bars.index(QUERY_FULL + W), parts & 1)
            parts += 1
            for block in range(0, blocks):
                slot = used % SLOTS
                mbarrier.wait(bars.index(FULL + slot), (used // SLOTS) & 1)
                mbarrier.wait(bars.index(TURN + W), (used & 1) ^ (1 - W))
                fence_async_shared()
                # A zero that the compiler cannot know. Otherwise it keeps the descriptors of the pieces in registers.
                zero = used >> 30
                logits = gl.zeros([BLOCK_KEYS, COLUMNS], gl.float32, wide)
                for piece in gl.static_range(PIECES):
                    queries = q.index(W * PIECES + piece + zero).permute((1, 0))
                    logits = warpgroup_mma(
                        k.index(slot * PIECES + piece), queries, logits, use_acc=piece > 0, is_async=True
                    )
                # The other consumer starts its products when half of these are done. Without turns, both would wait for
                # products and then compute at the same time.
                logits = warpgroup_mma_wait(1, deps=[logits])
                mbarrier.arrive(bars.index(TURN + 1 - W))
                logits = warpgroup_mma_wait(0, deps=[logits])
                mbarrier.arrive(bars.index(FREE + slot))
                mbarrier.arrive(bars.index(QUERY_FREE + W), pred=block + 1 >= blocks)
                used += 1

                relu = gl.maximum(logits, 0.0, propagate_nan=RELU_NAN)
                total = _sums_of_rows(relu * w[None, :], HEAD_BLOCK)
                entry = (start + block * BLOCK_KEYS + in_block)[:, None] - begins[None, :]
                seen = (entry >= 0) & (entry < counts[None, :])
                gl.store(scores + (target[None, :] + entry), total, mask=seen)
            unit += blocks
        row_block += gl.where(unit >= gl.load(ends + row_block), 1, 0)


@gluon.jit
def _sums_of_rows(products, HEAD_BLOCK: gl.constexpr):
    """Sum over the heads of each row: (keys, rows · heads) to (keys, rows)."""
    return gl.sum(products.reshape([BLOCK_KEYS, COLUMNS // HEAD_BLOCK, HEAD_BLOCK]), 2)
