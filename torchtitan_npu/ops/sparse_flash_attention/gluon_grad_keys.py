"""The contributions of rows to the gradients of their keys on Hopper GPUs, for sums in a fixed order, in Gluon.

A tile is a row with all of its heads, up to 128, and all or half of the columns: shared memory holds these columns of
the row's queries and output gradients. The softmax and its gradient come in blocks of 64 keys, in two slots: even
blocks in slot 0, odd blocks in slot 1. A third warp group copies them. Consumer ``w`` of this persistent kernel
multiplies the blocks in slot ``w`` and stores the products, while the other consumer multiplies.

Instead of one row, a tile may have a block of rows with the union of their keys.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    async_copy,
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from torchtitan_npu.ops.sparse_flash_attention.gluon_tiles import (
    HALF,
    ROPE,
    SIZE,
    STORED,
    balanced_tile,
    keys_of,
    places_of_heads,
)

HALF_ROPE = gl.constexpr(32)
BLOCK_KEYS = gl.constexpr(64)
REGISTERS = {"CONSUMER_REGISTERS": 208, "PRODUCER_REGISTERS": 88}
"""Registers per thread of the second consumer and of the producer. The first consumer has the remaining ones."""

# a thread stores 8 adjacent columns, as in STORED
STORED_ROPE = gl.constexpr(
    gl.DistributedLinearLayout(
        reg_bases=[[0, 1], [0, 2], [0, 4], [8, 0]],
        lane_bases=[[0, 8], [0, 16], [1, 0], [2, 0], [4, 0]],
        warp_bases=[[16, 0], [32, 0]],
        block_bases=[],
        shape=[64, 32],
    )
)

# indices of barriers; the first two have one barrier per slot
FULL = gl.constexpr(0)
FREE = gl.constexpr(2)
ROWS_FULL = gl.constexpr(4)
ROWS_FREE = gl.constexpr(5)
BARRIERS = gl.constexpr(6)


@gluon.jit
def multiply_keys(
    weights,
    d_scores,
    query,
    query_rope,
    d_out,
    indices,
    visible_keys,
    places,
    active,
    contributions,
    rope_contributions,
    first_row,
    rows,
    query_row,
    query_head,
    rope_row,
    rope_head,
    out_row,
    out_head,
    GROUP: gl.constexpr,
    KEY_HEADS: gl.constexpr,
    TOP_K: gl.constexpr,
    QUERIES: gl.constexpr,
    BLOCK_HEADS: gl.constexpr,
    HALVES: gl.constexpr,
    CONSUMER_REGISTERS: gl.constexpr,
    PRODUCER_REGISTERS: gl.constexpr,
):
    """Allocate shared memory, initialize the barriers and run the three warp groups."""
    dtype: gl.constexpr = query.dtype.element_ty
    layout: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
    narrow: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=64, element_bitwidth=16, rank=2)
    q = gl.allocate_shared_memory(dtype, [HALVES, BLOCK_HEADS, HALF], layout)
    do = gl.allocate_shared_memory(dtype, [HALVES, BLOCK_HEADS, HALF], layout)
    q_rope = gl.allocate_shared_memory(dtype, [HALVES, BLOCK_HEADS, HALF_ROPE], narrow)
    p = gl.allocate_shared_memory(dtype, [2, BLOCK_HEADS, BLOCK_KEYS], layout)
    ds = gl.allocate_shared_memory(dtype, [2, BLOCK_HEADS, BLOCK_KEYS], layout)
    bars = gl.allocate_shared_memory(gl.int64, [BARRIERS, 1], mbarrier.MBarrierLayout())
    for slot in gl.static_range(2):
        mbarrier.init(bars.index(FULL + slot), count=128)  # threads of the producer
        mbarrier.init(bars.index(FREE + slot), count=1)
    mbarrier.init(bars.index(ROWS_FULL), count=128)
    mbarrier.init(bars.index(ROWS_FREE), count=2)
    fence_async_shared()

    shared = (q, do, q_rope, p, ds, bars)
    selection = (indices, visible_keys, places, first_row, rows)
    inputs = (weights, d_scores, query, query_rope, d_out, active)
    strides = (query_row, query_head, rope_row, rope_head, out_row, out_head)
    results = (contributions, rope_contributions)
    gl.warp_specialize(
        [
            (_consume, (shared, selection, results, KEY_HEADS, TOP_K, HALVES, 0)),
            (_consume, (shared, selection, results, KEY_HEADS, TOP_K, HALVES, 1)),
            (_produce, (shared, selection, inputs, strides, GROUP, KEY_HEADS, TOP_K, QUERIES, BLOCK_HEADS, HALVES)),
        ],
        [4, 4],
        [CONSUMER_REGISTERS, PRODUCER_REGISTERS],
    )


@gluon.jit
def _tile(tile, selection, KEY_HEADS: gl.constexpr, HALVES: gl.constexpr):
    """Return a tile's row in the chunk, its key head, its first half of the columns and its number of key blocks."""
    places, first_row, rows = selection[2:]
    tiles_of_row: gl.constexpr = 2 // HALVES * KEY_HEADS
    tile = balanced_tile(tile, tiles_of_row * rows)
    row = rows - 1 - tile // tiles_of_row
    key_head = tile % KEY_HEADS
    count = gl.load(places + (first_row + row) * KEY_HEADS + key_head)
    return row, key_head, tile % tiles_of_row // KEY_HEADS, (count + BLOCK_KEYS - 1) // BLOCK_KEYS


@gluon.jit
def _produce(
    shared,
    selection,
    inputs,
    strides,
    GROUP: gl.constexpr,
    KEY_HEADS: gl.constexpr,
    TOP_K: gl.constexpr,
    QUERIES: gl.constexpr,
    BLOCK_HEADS: gl.constexpr,
    HALVES: gl.constexpr,
):
    """Copy the queries and output gradients of each tile, and block by block the weights and their gradients."""
    q, do, q_rope, p, ds, bars = shared
    first_row, rows = selection[3:]
    weights, d_scores, query, query_rope, d_out, active = inputs
    query_row, query_head, rope_row, rope_head, out_row, out_head = strides
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])  # a thread copies 16 bytes of 4 rows
    columns = gl.arange(0, HALF, layout=gl.SliceLayout(0, layout))[None, :]
    in_block = gl.arange(0, BLOCK_KEYS, layout=gl.SliceLayout(0, layout))[None, :]
    rope_layout: gl.constexpr = gl.BlockedLayout([1, 8], [8, 4], [4, 1], [1, 0])
    rope_columns = gl.arange(0, HALF_ROPE, layout=gl.SliceLayout(0, rope_layout))[None, :]
    in_group = gl.arange(0, BLOCK_HEADS, layout=gl.SliceLayout(1, layout))
    in_group_of_rope = gl.arange(0, BLOCK_HEADS, layout=gl.SliceLayout(1, rope_layout))

    used = 0  # blocks that went through slot 0
    used_1 = 0
    turn = 0  # tiles with keys
    for tile in range(gl.program_id(0), 2 // HALVES * rows * KEY_HEADS, gl.num_programs(0)):
        row, key_head, half, blocks = _tile(tile, selection, KEY_HEADS, HALVES)
        if blocks > 0:
            of_row = row.to(gl.int64)
            head = (key_head * GROUP).to(gl.int64)
            heads = head + in_group  # 64 bits: times a stride it may be large
            rope_heads = head + in_group_of_rope
            real, real_rope = in_group < GROUP, in_group_of_rope < GROUP
            if active is not None:
                # Queries without keys, such as padding, may be NaN, which times a weight of 0 would be added to the
                # keys of the others.
                per_query: gl.constexpr = GROUP // QUERIES
                of_block = gl.load(active + first_row + row)
                real = real & ((of_block >> in_group // per_query & 1) != 0)
                real_rope = real_rope & ((of_block >> in_group_of_rope // per_query & 1) != 0)
            real, real_rope = real[:, None], real_rope[:, None]

            mbarrier.wait(bars.index(ROWS_FREE), (turn & 1) ^ 1)
            at_query = places_of_heads(of_row, heads, query_row, query_head, GROUP, QUERIES)[:, None]
            at_d_out = places_of_heads(of_row, heads, out_row, out_head, GROUP, QUERIES)[:, None]
            at_rope = places_of_heads(of_row, rope_heads, rope_row, rope_head, GROUP, QUERIES)[:, None]
            queries = query + half * HALF + (at_query + columns)
            d_outs = d_out + half * HALF + (at_d_out + columns)
            ropes = query_rope + half * HALF_ROPE + (at_rope + rope_columns)
            for part in gl.static_range(HALVES):
                async_copy.async_copy_global_to_shared(q.index(part), queries + part * HALF, real)
                async_copy.async_copy_global_to_shared(do.index(part), d_outs + part * HALF, real)
                async_copy.async_copy_global_to_shared(q_rope.index(part), ropes + part * HALF_ROPE, real_rope)
            async_copy.mbarrier_arrive(bars.index(ROWS_FULL), increment_count=False)

            # 32 bits: the workspace is bounded
            of_heads = ((row * KEY_HEADS + key_head) * GROUP + in_group)[:, None] * TOP_K + in_block
            for block in range(0, blocks):
                slot = block % 2
                waits = gl.where(slot == 0, used, used_1) + block // 2
                mbarrier.wait(bars.index(FREE + slot), (waits & 1) ^ 1)
                at = of_heads + block * BLOCK_KEYS
                async_copy.async_copy_global_to_shared(ds.index(slot), d_scores + at, real)
                async_copy.async_copy_global_to_shared(p.index(slot), weights + at, real)
                async_copy.mbarrier_arrive(bars.index(FULL + slot), increment_count=False)
            used += (blocks + 1) // 2
            used_1 += blocks // 2
            turn += 1


@gluon.jit
def _consume(
    shared,
    selection,
    results,
    KEY_HEADS: gl.constexpr,
    TOP_K: gl.constexpr,
    HALVES: gl.constexpr,
    W: gl.constexpr,
):
    """Multiply the blocks of slot ``W`` and store the contributions."""
    q, do, q_rope, p, ds, bars = shared
    indices, visible_keys = selection[:2]
    first_row, rows = selection[3:]
    contributions, rope_contributions = results
    dtype: gl.constexpr = contributions.dtype.element_ty
    wide: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 256, 16])
    narrow: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 32, 16])
    of_rope: gl.constexpr = gl.SliceLayout(1, STORED_ROPE)
    columns = gl.arange(0, HALF, layout=gl.SliceLayout(0, STORED))[None, :]
    rope_columns = gl.arange(0, HALF_ROPE, layout=gl.SliceLayout(0, STORED_ROPE))[None, :]
    in_block = gl.arange(0, BLOCK_KEYS, layout=gl.SliceLayout(1, STORED))

    used = 0  # blocks that went through this consumer's slot
    turn = 0  # tiles with keys
    for tile in range(gl.program_id(0), 2 // HALVES * rows * KEY_HEADS, gl.num_programs(0)):
        row, key_head, half, blocks = _tile(tile, selection, KEY_HEADS, HALVES)
        of_row = (first_row + row).to(gl.int64)
        selected = indices + (of_row * KEY_HEADS + key_head) * TOP_K
        visible = gl.load(visible_keys + of_row)
        if blocks > 0:
            mbarrier.wait(bars.index(ROWS_FULL), turn & 1)
            mbarrier.arrive(bars.index(ROWS_FREE), pred=blocks <= W)
            turn += 1
        for block in range(W, blocks, 2):
            at = block * BLOCK_KEYS + in_block
            there = keys_of(selected, at, 0, visible, 0, 1, TOP_K)[1]
            to = (row * KEY_HEADS + key_head) * TOP_K + at

            mbarrier.wait(bars.index(FULL + W), (used + block // 2) & 1)
            fence_async_shared()
            # A zero that the compiler cannot know. Otherwise it keeps descriptors of shared memory in registers.
            zero = (used + block) >> 30
            left = ds.index(W + zero).permute((1, 0))
            for part in gl.static_range(HALVES):
                total = gl.zeros([BLOCK_KEYS, HALF], gl.float32, wide)
                total = warpgroup_mma(left, q.index(part + zero), total, use_acc=False, is_async=True)
                total = warpgroup_mma(p.index(W + zero).permute((1, 0)), do.index(part + zero), total, is_async=True)
                rope = gl.zeros([BLOCK_KEYS, HALF_ROPE], gl.float32, narrow)
                rope = warpgroup_mma(left, q_rope.index(part + zero), rope, use_acc=False, is_async=True)
                total, rope = warpgroup_mma_wait(0, deps=[total, rope])
                if part == HALVES - 1:
                    mbarrier.arrive(bars.index(FREE + W))
                    mbarrier.arrive(bars.index(ROWS_FREE), pred=block + 2 >= blocks)

                to_columns = contributions + (half + part) * HALF + ((to * SIZE)[:, None] + columns)
                gl.store(to_columns, gl.convert_layout(total.to(dtype), STORED), mask=there[:, None])
                in_rope = gl.convert_layout(to, of_rope, assert_trivial=True)
                of_key = gl.convert_layout(there, of_rope, assert_trivial=True)
                to_ropes = rope_contributions + (half + part) * HALF_ROPE + ((in_rope * ROPE)[:, None] + rope_columns)
                gl.store(to_ropes, gl.convert_layout(rope.to(dtype), STORED_ROPE), mask=of_key[:, None])
        used += (blocks + 1 - W) // 2
