"""The softmax of selected keys and its gradient on Hopper GPUs, in Gluon: one persistent kernel with three warp groups.

A tile is 64 heads of a query row, whose queries and output gradients stay in shared memory. The keys come in blocks of
128, cut into pieces of 64 columns that go through a ring of five slots. A third warp group gathers the pieces. The two
consumers take turns: one multiplies the pieces of a block with queries and output gradients, while the other computes
the softmax of the block before and its gradient, and stores them.
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

from torchtitan_npu.ops.core.triton_launch import LOG2_E
from torchtitan_npu.ops.sparse_flash_attention.gluon_tiles import (
    BLOCK_HEADS,
    PIECE,
    PIECES,
    ROPE,
    SIZE,
    balanced_tile,
    chosen_by,
    keys_of,
    place_of_statistics,
    places_of_heads,
    tile_of_heads,
)

BLOCK_KEYS = gl.constexpr(128)
SLOTS = gl.constexpr(5)
REGISTERS = {"CONSUMER_REGISTERS": 208, "PRODUCER_REGISTERS": 88}
"""Registers per thread of the second consumer and of the producer. The first consumer has the remaining ones."""

# indices of barriers; the first two have one barrier per slot, the last one per consumer
FULL = gl.constexpr(0)
FREE = gl.constexpr(5)
QUERY_FULL = gl.constexpr(10)
QUERY_FREE = gl.constexpr(11)
NEXT_BLOCK = gl.constexpr(12)
BARRIERS = gl.constexpr(14)


@gluon.jit
def differentiate(
    query,
    query_rope,
    d_out,
    key,
    key_rope,
    indices,
    first_key,
    visible_keys,
    places,
    chosen,
    d_out_out,
    softmax_max,
    softmax_sum,
    weights,
    d_scores,
    scale,
    scale_2,  # for powers of 2
    first_row,
    rows,
    tokens,
    sequence,
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
    CONSUMER_REGISTERS: gl.constexpr,
    PRODUCER_REGISTERS: gl.constexpr,
):
    """Allocate shared memory, initialize the barriers and run the three warp groups."""
    dtype: gl.constexpr = key.dtype.element_ty
    layout: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
    q = gl.allocate_shared_memory(dtype, [PIECES + 1, BLOCK_HEADS, PIECE], layout)  # the last one is the rope
    do = gl.allocate_shared_memory(dtype, [PIECES, BLOCK_HEADS, PIECE], layout)
    k = gl.allocate_shared_memory(dtype, [SLOTS, BLOCK_KEYS, PIECE], layout)
    bars = gl.allocate_shared_memory(gl.int64, [BARRIERS, 1], mbarrier.MBarrierLayout())
    for slot in gl.static_range(SLOTS):
        mbarrier.init(bars.index(FULL + slot), count=128)  # threads of the producer
        mbarrier.init(bars.index(FREE + slot), count=1)
    mbarrier.init(bars.index(QUERY_FULL), count=128)
    mbarrier.init(bars.index(QUERY_FREE), count=2)
    mbarrier.init(bars.index(NEXT_BLOCK), count=1)
    mbarrier.init(bars.index(NEXT_BLOCK + 1), count=1)
    fence_async_shared()

    shared = (q, do, k, bars)
    selection = (indices, first_key, visible_keys, places, first_row, rows, tokens)
    inputs = (query, query_rope, d_out, key, key_rope)
    strides = (query_row, query_head, rope_row, rope_head, out_row, out_head)
    of_heads = (d_out_out, softmax_max, softmax_sum, sequence)
    results = (weights, d_scores)
    gl.warp_specialize(
        [
            (
                _consume,
                (shared, selection, chosen, of_heads, results, scale, scale_2, GROUP, KEY_HEADS, TOP_K, QUERIES, 0),
            ),
            (
                _consume,
                (shared, selection, chosen, of_heads, results, scale, scale_2, GROUP, KEY_HEADS, TOP_K, QUERIES, 1),
            ),
            (_produce, (shared, selection, inputs, strides, GROUP, KEY_HEADS, TOP_K, QUERIES)),
        ],
        [4, 4],
        [CONSUMER_REGISTERS, PRODUCER_REGISTERS],
    )


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
):
    """Copy the queries and output gradients of each tile, and its selected keys in pieces of 64 columns."""
    q, do, k, bars = shared
    indices, first_key, visible_keys, places, first_row, rows, tokens = selection
    query, query_rope, d_out, key, key_rope = inputs
    query_row, query_head, rope_row, rope_head, out_row, out_head = strides
    head_blocks: gl.constexpr = (GROUP + BLOCK_HEADS - 1) // BLOCK_HEADS
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])  # a thread copies 16 bytes of a row
    columns = gl.arange(0, PIECE, layout=gl.SliceLayout(0, layout))[None, :]
    in_heads = gl.arange(0, BLOCK_HEADS, layout=gl.SliceLayout(1, layout))
    in_block = gl.arange(0, BLOCK_KEYS, layout=gl.SliceLayout(1, layout))

    used = 0  # pieces that went through the slots
    for tile in range(gl.program_id(0), rows * KEY_HEADS * head_blocks, gl.num_programs(0)):
        balanced = balanced_tile(tile, rows * KEY_HEADS * head_blocks)
        row, key_head, first_head, _, blocks = tile_of_heads(
            balanced, places, first_row, rows, tokens, BLOCK_KEYS, GROUP, KEY_HEADS
        )
        turn = tile // gl.num_programs(0)
        first, visible = gl.load(first_key + first_row + row), gl.load(visible_keys + first_row + row)
        of_row = row.to(gl.int64)
        selected = indices + ((first_row + of_row) * KEY_HEADS + key_head) * TOP_K

        mbarrier.wait(bars.index(QUERY_FREE), (turn & 1) ^ 1)
        head = (key_head * GROUP + first_head).to(gl.int64)  # 64 bits: times a stride it may be large
        heads = head + in_heads
        real = (first_head + in_heads < GROUP)[:, None]
        queries = query + (places_of_heads(of_row, heads, query_row, query_head, GROUP, QUERIES)[:, None] + columns)
        d_outs = d_out + (places_of_heads(of_row, heads, out_row, out_head, GROUP, QUERIES)[:, None] + columns)
        at_rope = places_of_heads(of_row, heads, rope_row, rope_head, GROUP, QUERIES)[:, None]
        query_ropes = query_rope + (at_rope + columns)
        for piece in gl.static_range(PIECES):
            async_copy.async_copy_global_to_shared(q.index(piece), queries + piece * PIECE, real)
            async_copy.async_copy_global_to_shared(do.index(piece), d_outs + piece * PIECE, real)
        async_copy.async_copy_global_to_shared(q.index(PIECES), query_ropes, real)
        async_copy.mbarrier_arrive(bars.index(QUERY_FULL), increment_count=False)

        for block in range(0, blocks):
            at = block * BLOCK_KEYS + in_block
            at_key, there = keys_of(selected, at, first, visible, key_head, KEY_HEADS, TOP_K)
            at_key, there = at_key[:, None], there[:, None]
            keys, ropes = key + (at_key * SIZE + columns), key_rope + (at_key * ROPE + columns)
            for piece in gl.static_range(PIECES + 1):
                slot = (used + piece) % SLOTS
                mbarrier.wait(bars.index(FREE + slot), (((used + piece) // SLOTS) & 1) ^ 1)
                if piece == PIECES:
                    async_copy.async_copy_global_to_shared(k.index(slot), ropes, there)
                else:
                    async_copy.async_copy_global_to_shared(k.index(slot), keys + piece * PIECE, there)
                async_copy.mbarrier_arrive(bars.index(FULL + slot), increment_count=False)
            used += PIECES + 1


@gluon.jit
def _consume(
    shared,
    selection,
    chosen,
    of_heads,
    results,
    scale,
    scale_2,
    GROUP: gl.constexpr,
    KEY_HEADS: gl.constexpr,
    TOP_K: gl.constexpr,
    QUERIES: gl.constexpr,
    W: gl.constexpr,
):
    """Compute the softmax and its gradient for every other block of keys."""
    q, do, k, bars = shared
    indices, _, visible_keys, places, first_row, rows, tokens = selection
    d_out_out, softmax_max, softmax_sum, sequence = of_heads
    weights, d_scores = results
    head_blocks: gl.constexpr = (GROUP + BLOCK_HEADS - 1) // BLOCK_HEADS
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 128, 16])
    per_head: gl.constexpr = gl.SliceLayout(1, layout)
    # a thread stores 8 adjacent places, and a warp keeps the rows that it has in the accumulator
    stored: gl.constexpr = gl.DistributedLinearLayout(
        reg_bases=[[0, 1], [0, 2], [0, 4], [0, 32], [0, 64], [8, 0]],
        lane_bases=[[0, 8], [0, 16], [1, 0], [2, 0], [4, 0]],
        warp_bases=[[16, 0], [32, 0]],
        block_bases=[],
        shape=[64, 128],
    )
    in_heads = gl.arange(0, BLOCK_HEADS, layout=per_head)
    stored_heads = gl.arange(0, BLOCK_HEADS, layout=gl.SliceLayout(1, stored))
    stored_places = gl.arange(0, BLOCK_KEYS, layout=gl.SliceLayout(0, stored))[None, :]
    in_block = gl.arange(0, BLOCK_KEYS, layout=gl.SliceLayout(0, layout))

    used = 0  # blocks of the tiles before
    for tile in range(gl.program_id(0), rows * KEY_HEADS * head_blocks, gl.num_programs(0)):
        balanced = balanced_tile(tile, rows * KEY_HEADS * head_blocks)
        row, key_head, first_head, without_gap, blocks = tile_of_heads(
            balanced, places, first_row, rows, tokens, BLOCK_KEYS, GROUP, KEY_HEADS
        )
        turn = tile // gl.num_programs(0)
        of_row = (first_row + row).to(gl.int64)
        selected = indices + (of_row * KEY_HEADS + key_head) * TOP_K
        visible = gl.load(visible_keys + of_row)
        heads = first_head + in_heads
        real = heads < GROUP
        statistics = place_of_statistics(of_row, key_head, sequence, GROUP, KEY_HEADS) + heads
        highest = gl.load(softmax_max + statistics, mask=real, other=0.0) * LOG2_E
        divisor = 1 / gl.load(softmax_sum + statistics, mask=real, other=1.0)
        delta = gl.load(d_out_out + (row * KEY_HEADS + key_head) * GROUP + heads, mask=real, other=0.0)
        of_tile = (row.to(gl.int64) * KEY_HEADS + key_head) * GROUP * TOP_K
        slots = (first_head + stored_heads)[:, None] * TOP_K + stored_places

        mbarrier.wait(bars.index(QUERY_FULL), turn & 1)
        first_block = (used + W) % 2
        mbarrier.arrive(bars.index(QUERY_FREE), pred=first_block >= blocks)
        for block in range(first_block, blocks, 2):
            before = (used + block) * (PIECES + 1)  # pieces
            # A zero that the compiler cannot know. Otherwise it keeps the descriptors of the pieces in registers.
            zero = before >> 30
            # The other consumer has waited for all pieces of the block before. Otherwise this one could wait for a slot
            # that is two pieces behind, which a barrier cannot tell from one that is full.
            mbarrier.wait(bars.index(NEXT_BLOCK + W), (((used + block + 1) // 2) & 1) ^ 1)
            scores = gl.zeros([BLOCK_HEADS, BLOCK_KEYS], gl.float32, layout)
            dp = gl.zeros([BLOCK_HEADS, BLOCK_KEYS], gl.float32, layout)
            for piece in gl.static_range(PIECES):
                slot = (before + piece) % SLOTS
                mbarrier.wait(bars.index(FULL + slot), ((before + piece) // SLOTS) & 1)
                fence_async_shared()
                keys = k.index(slot).permute((1, 0))
                scores = warpgroup_mma(q.index(piece + zero), keys, scores, use_acc=piece > 0, is_async=True)
                dp = warpgroup_mma(do.index(piece + zero), keys, dp, use_acc=piece > 0, is_async=True)
                if piece > 0:
                    scores, dp = warpgroup_mma_wait(2, deps=[scores, dp])
                    mbarrier.arrive(bars.index(FREE + (before + piece - 1) % SLOTS))
            slot = (before + PIECES) % SLOTS
            mbarrier.wait(bars.index(FULL + slot), ((before + PIECES) // SLOTS) & 1)
            mbarrier.arrive(bars.index(NEXT_BLOCK + 1 - W))
            fence_async_shared()
            scores = warpgroup_mma(q.index(PIECES + zero), k.index(slot).permute((1, 0)), scores, is_async=True)
            scores, dp = warpgroup_mma_wait(0, deps=[scores, dp])
            mbarrier.arrive(bars.index(FREE + (before + PIECES - 1) % SLOTS))
            mbarrier.arrive(bars.index(FREE + slot))
            mbarrier.arrive(bars.index(QUERY_FREE), pred=block + 2 >= blocks)

            p = gl.exp2(scores * scale_2 - highest[:, None]) * divisor[:, None]
            at = block * BLOCK_KEYS + in_block
            if QUERIES > 1:
                there = chosen_by(gl.load(chosen + of_row * TOP_K + at), heads, GROUP, QUERIES)
                p = gl.where(there, p, 0.0)
                # a query without keys, such as padding, may be NaN
                ds = gl.where(there, p * (dp - delta[:, None]) * scale, 0.0)
            else:
                if (block + 1) * BLOCK_KEYS > without_gap:
                    there = keys_of(selected, at, 0, visible, 0, 1, TOP_K)[1]
                    p = gl.where(there[None, :], p, 0.0)
                ds = p * (dp - delta[:, None]) * scale
            kept = (first_head + stored_heads < GROUP)[:, None]
            if TOP_K % BLOCK_KEYS:
                kept = kept & (block * BLOCK_KEYS + stored_places < TOP_K)
            to = of_tile + block * BLOCK_KEYS + slots
            gl.store(weights + to, gl.convert_layout(p.to(weights.dtype.element_ty), stored), mask=kept)
            gl.store(d_scores + to, gl.convert_layout(ds.to(d_scores.dtype.element_ty), stored), mask=kept)
        used += blocks
