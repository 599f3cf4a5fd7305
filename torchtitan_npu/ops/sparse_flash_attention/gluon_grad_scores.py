"""The softmax of selected keys, its gradient and that of the queries on Hopper GPUs, in Gluon: three warp groups.

A tile of this persistent kernel is 64 heads of a query row, whose queries and output gradients stay in shared memory.
The keys come in blocks of 64, in quarters of 128 columns and the rope, each of which is released and copied alone. A
third warp group gathers them. For each block:

1. Consumer 0 multiplies queries and keys, and passes the softmax to consumer 1 through shared memory.
2. Consumer 1 multiplies output gradients and keys meanwhile. It computes the gradient of the scores.
3. Both multiply this gradient with the keys: consumer 0 with quarters 0, 1 and the rope, consumer 1 with 2 and 3. They
   accumulate the gradient of the queries in registers over all blocks, and release each part of the keys.
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
    ROPE,
    SIZE,
    chosen_by,
    keys_of,
    place_of_statistics,
    places_of_heads,
    tile_of_heads,
)

BLOCK_KEYS = gl.constexpr(64)
QUARTER = gl.constexpr(128)  # columns
REGISTERS = {"CONSUMER_REGISTERS": 208, "PRODUCER_REGISTERS": 64}
"""Registers per thread of the second consumer and of the producer. The first consumer has the remaining ones."""

# a thread stores 8 adjacent elements of (64, 64), and a warp keeps the rows that it has in the accumulator
STORED_BLOCK = gl.constexpr(
    gl.DistributedLinearLayout(
        reg_bases=[[0, 1], [0, 2], [0, 4], [0, 32], [8, 0]],
        lane_bases=[[0, 8], [0, 16], [1, 0], [2, 0], [4, 0]],
        warp_bases=[[16, 0], [32, 0]],
        block_bases=[],
        shape=[64, 64],
    )
)

# indices of barriers; the first two have one barrier per quarter and one for the rope
FULL = gl.constexpr(0)
FREE = gl.constexpr(5)
QUERY_FULL = gl.constexpr(10)
QUERY_FREE = gl.constexpr(11)
D_OUT_FULL = gl.constexpr(12)
D_OUT_FREE = gl.constexpr(13)
SOFTMAX = gl.constexpr(14)
D_SCORES = gl.constexpr(15)
D_SCORES_FREE = gl.constexpr(16)
BARRIERS = gl.constexpr(17)


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
    d_query,
    d_query_rope,
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
    q = gl.allocate_shared_memory(dtype, [4, BLOCK_HEADS, QUARTER], layout)
    do = gl.allocate_shared_memory(dtype, [4, BLOCK_HEADS, QUARTER], layout)
    k = gl.allocate_shared_memory(dtype, [4, BLOCK_KEYS, QUARTER], layout)
    ropes = gl.allocate_shared_memory(dtype, [2, BLOCK_HEADS, ROPE], layout)  # of the queries, of the keys
    passed = gl.allocate_shared_memory(dtype, [2, BLOCK_HEADS, BLOCK_KEYS], layout)
    bars = gl.allocate_shared_memory(gl.int64, [BARRIERS, 1], mbarrier.MBarrierLayout())
    for part in gl.static_range(5):
        mbarrier.init(bars.index(FULL + part), count=128)  # threads of the producer
        mbarrier.init(bars.index(FREE + part), count=1)
    mbarrier.init(bars.index(QUERY_FULL), count=128)
    mbarrier.init(bars.index(QUERY_FREE), count=1)
    mbarrier.init(bars.index(D_OUT_FULL), count=128)
    mbarrier.init(bars.index(D_OUT_FREE), count=1)
    mbarrier.init(bars.index(SOFTMAX), count=1)
    mbarrier.init(bars.index(D_SCORES), count=1)
    mbarrier.init(bars.index(D_SCORES_FREE), count=2)
    fence_async_shared()

    shared = (q, do, k, ropes, passed, bars)
    selection = (indices, first_key, visible_keys, places, first_row, rows, tokens)
    inputs = (query, query_rope, d_out, key, key_rope)
    strides = (query_row, query_head, rope_row, rope_head, out_row, out_head)
    of_heads = (chosen, d_out_out, softmax_max, softmax_sum, sequence, scale, scale_2)
    gl.warp_specialize(
        [
            (
                _consume_scores,
                (shared, selection, of_heads, weights, d_query, d_query_rope, GROUP, KEY_HEADS, TOP_K, QUERIES),
            ),
            (_consume_gradients, (shared, selection, of_heads, d_scores, d_query, GROUP, KEY_HEADS, TOP_K, QUERIES)),
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
    """Copy the queries and output gradients of each tile, and its selected keys."""
    q, do, k, ropes, bars = shared[0], shared[1], shared[2], shared[3], shared[5]
    indices, first_key, visible_keys, places, first_row, rows, tokens = selection
    query, query_rope, d_out, key, key_rope = inputs
    query_row, query_head, rope_row, rope_head, out_row, out_head = strides
    head_blocks: gl.constexpr = (GROUP + BLOCK_HEADS - 1) // BLOCK_HEADS
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])  # a thread copies 16 bytes of a row
    columns = gl.arange(0, QUARTER, layout=gl.SliceLayout(0, layout))[None, :]
    rope_columns = gl.arange(0, ROPE, layout=gl.SliceLayout(0, layout))[None, :]
    in_block = gl.arange(0, BLOCK_KEYS, layout=gl.SliceLayout(1, layout))

    used = 0  # blocks of the tiles before
    for tile in range(gl.program_id(0), rows * KEY_HEADS * head_blocks, gl.num_programs(0)):
        row, key_head, first_head, _, blocks = tile_of_heads(
            tile, places, first_row, rows, tokens, BLOCK_KEYS, GROUP, KEY_HEADS
        )
        free = ((tile // gl.num_programs(0)) & 1) ^ 1
        first, visible = gl.load(first_key + first_row + row), gl.load(visible_keys + first_row + row)
        of_row = row.to(gl.int64)
        selected = indices + ((first_row + of_row) * KEY_HEADS + key_head) * TOP_K

        head = (key_head * GROUP + first_head).to(gl.int64)  # 64 bits: times a stride it may be large
        heads = head + in_block
        real = (first_head + in_block < GROUP)[:, None]
        queries = query + (places_of_heads(of_row, heads, query_row, query_head, GROUP, QUERIES)[:, None] + columns)
        at_rope = places_of_heads(of_row, heads, rope_row, rope_head, GROUP, QUERIES)[:, None]
        d_outs = d_out + (places_of_heads(of_row, heads, out_row, out_head, GROUP, QUERIES)[:, None] + columns)
        mbarrier.wait(bars.index(QUERY_FREE), free)
        for part in gl.static_range(4):
            async_copy.async_copy_global_to_shared(q.index(part), queries + part * QUARTER, real)
        async_copy.async_copy_global_to_shared(ropes.index(0), query_rope + (at_rope + rope_columns), real)
        async_copy.mbarrier_arrive(bars.index(QUERY_FULL), increment_count=False)
        mbarrier.wait(bars.index(D_OUT_FREE), free)
        for part in gl.static_range(4):
            async_copy.async_copy_global_to_shared(do.index(part), d_outs + part * QUARTER, real)
        async_copy.mbarrier_arrive(bars.index(D_OUT_FULL), increment_count=False)

        for block in range(0, blocks):
            at_key, there = keys_of(selected, block * BLOCK_KEYS + in_block, first, visible, key_head, KEY_HEADS, TOP_K)
            at_key, there = at_key[:, None], there[:, None]
            keys = key + (at_key * SIZE + columns)
            free = ((used + block) & 1) ^ 1
            for turn in gl.static_range(4):
                place = turn // 2 + turn % 2 * 2  # 0, 2, 1, 3: in the order in which they are released
                mbarrier.wait(bars.index(FREE + place), free)
                async_copy.async_copy_global_to_shared(k.index(place), keys + place * QUARTER, there)
                async_copy.mbarrier_arrive(bars.index(FULL + place), increment_count=False)
            mbarrier.wait(bars.index(FREE + 4), free)
            async_copy.async_copy_global_to_shared(ropes.index(1), key_rope + (at_key * ROPE + rope_columns), there)
            async_copy.mbarrier_arrive(bars.index(FULL + 4), increment_count=False)
        used += blocks


@gluon.jit
def _consume_scores(
    shared,
    selection,
    of_heads,
    weights,
    d_query,
    d_query_rope,
    GROUP: gl.constexpr,
    KEY_HEADS: gl.constexpr,
    TOP_K: gl.constexpr,
    QUERIES: gl.constexpr,
):
    """Compute the softmax, and the gradient of quarters 0 and 1 and of the rope of the queries."""
    q, k, ropes, passed, bars = shared[0], shared[2], shared[3], shared[4], shared[5]
    indices, visible_keys = selection[0], selection[2]
    places, first_row, rows, tokens = selection[3:]
    chosen, scale_2 = of_heads[0], of_heads[6]
    softmax_max, softmax_sum, sequence = of_heads[2:5]
    head_blocks: gl.constexpr = (GROUP + BLOCK_HEADS - 1) // BLOCK_HEADS
    narrow: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 16])
    wide: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 128, 16])
    in_heads = gl.arange(0, BLOCK_HEADS, layout=gl.SliceLayout(1, narrow))
    stored_heads = gl.arange(0, BLOCK_HEADS, layout=gl.SliceLayout(1, STORED_BLOCK))
    stored_places = gl.arange(0, BLOCK_KEYS, layout=gl.SliceLayout(0, STORED_BLOCK))[None, :]

    used = 0  # blocks of the tiles before
    for tile in range(gl.program_id(0), rows * KEY_HEADS * head_blocks, gl.num_programs(0)):
        row, key_head, first_head, without_gap, blocks = tile_of_heads(
            tile, places, first_row, rows, tokens, BLOCK_KEYS, GROUP, KEY_HEADS
        )
        of_row = (first_row + row).to(gl.int64)
        selected = indices + (of_row * KEY_HEADS + key_head) * TOP_K
        visible = gl.load(visible_keys + of_row)
        heads = first_head + in_heads
        real = heads < GROUP
        statistics = place_of_statistics(of_row, key_head, sequence, GROUP, KEY_HEADS) + heads
        highest = gl.load(softmax_max + statistics, mask=real, other=0.0) * LOG2_E
        divisor = 1 / gl.load(softmax_sum + statistics, mask=real, other=1.0)
        of_tile = weights + (row.to(gl.int64) * KEY_HEADS + key_head) * GROUP * TOP_K
        kept = (first_head + stored_heads < GROUP)[:, None]
        dq_0 = gl.zeros([BLOCK_HEADS, QUARTER], gl.float32, wide)
        dq_1 = gl.zeros([BLOCK_HEADS, QUARTER], gl.float32, wide)
        dq_rope = gl.zeros([BLOCK_HEADS, ROPE], gl.float32, narrow)

        mbarrier.wait(bars.index(QUERY_FULL), (tile // gl.num_programs(0)) & 1)
        mbarrier.arrive(bars.index(QUERY_FREE), pred=blocks == 0)
        for block in range(0, blocks):
            phase = (used + block) & 1
            # A zero that the compiler cannot know. Otherwise it keeps descriptors of shared memory in registers.
            zero = (used + block) >> 30
            scores = _multiply_keys(shared, q, phase, zero)
            mbarrier.wait(bars.index(FULL + 4), phase)
            fence_async_shared()
            key_ropes = ropes.index(1 + zero)
            scores = warpgroup_mma(ropes.index(zero), key_ropes.permute((1, 0)), scores, is_async=True)
            scores = warpgroup_mma_wait(0, deps=[scores])
            mbarrier.arrive(bars.index(QUERY_FREE), pred=block + 1 >= blocks)

            p = gl.exp2(scores * scale_2 - highest[:, None]) * divisor[:, None]
            at = block * BLOCK_KEYS + gl.arange(0, BLOCK_KEYS, layout=gl.SliceLayout(0, narrow))
            if QUERIES > 1:
                there = chosen_by(gl.load(chosen + of_row * TOP_K + at), heads, GROUP, QUERIES)
                p = gl.where(there, p, 0.0)
            else:
                if (block + 1) * BLOCK_KEYS > without_gap:
                    there = keys_of(selected, at, 0, visible, 0, 1, TOP_K)[1]
                    p = gl.where(there[None, :], p, 0.0)
            mbarrier.wait(bars.index(D_SCORES_FREE), phase ^ 1)
            _softmax(passed).store(p)
            mbarrier.arrive(bars.index(SOFTMAX))
            to = of_tile + ((first_head + stored_heads)[:, None] * TOP_K + block * BLOCK_KEYS + stored_places)
            gl.store(to, gl.convert_layout(p.to(weights.dtype.element_ty), STORED_BLOCK), mask=kept)

            mbarrier.wait(bars.index(D_SCORES), phase)
            ds = passed.index(zero)
            dq_0 = warpgroup_mma(ds, k.index(zero), dq_0, is_async=True)
            dq_1 = warpgroup_mma(ds, k.index(1 + zero), dq_1, is_async=True)
            dq_rope = warpgroup_mma(ds, key_ropes, dq_rope, is_async=True)
            dq_0 = warpgroup_mma_wait(2, deps=[dq_0])
            mbarrier.arrive(bars.index(FREE))
            dq_1 = warpgroup_mma_wait(1, deps=[dq_1])
            mbarrier.arrive(bars.index(FREE + 1))
            dq_rope = warpgroup_mma_wait(0, deps=[dq_rope])
            mbarrier.arrive(bars.index(FREE + 4))
            mbarrier.arrive(bars.index(D_SCORES_FREE))
        used += blocks
        of_query = (of_row * KEY_HEADS + key_head) * GROUP
        _store_quarter(d_query, of_query, first_head, dq_0, 0, GROUP)
        _store_quarter(d_query, of_query, first_head, dq_1, 1, GROUP)
        to = d_query_rope + of_query * ROPE + ((first_head + stored_heads)[:, None] * ROPE + stored_places)
        gl.store(to, gl.convert_layout(dq_rope.to(d_query_rope.dtype.element_ty), STORED_BLOCK), mask=kept)


@gluon.jit
def _consume_gradients(
    shared,
    selection,
    of_heads,
    d_scores,
    d_query,
    GROUP: gl.constexpr,
    KEY_HEADS: gl.constexpr,
    TOP_K: gl.constexpr,
    QUERIES: gl.constexpr,
):
    """Compute the gradient of the scores, and that of quarters 2 and 3 of the queries."""
    do, k, passed, bars = shared[1], shared[2], shared[4], shared[5]
    places, first_row, rows, tokens = selection[3:]
    chosen, d_out_out, scale = of_heads[0], of_heads[1], of_heads[5]
    head_blocks: gl.constexpr = (GROUP + BLOCK_HEADS - 1) // BLOCK_HEADS
    narrow: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 16])
    wide: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 128, 16])
    in_heads = gl.arange(0, BLOCK_HEADS, layout=gl.SliceLayout(1, narrow))
    stored_heads = gl.arange(0, BLOCK_HEADS, layout=gl.SliceLayout(1, STORED_BLOCK))
    stored_places = gl.arange(0, BLOCK_KEYS, layout=gl.SliceLayout(0, STORED_BLOCK))[None, :]

    used = 0  # blocks of the tiles before
    for tile in range(gl.program_id(0), rows * KEY_HEADS * head_blocks, gl.num_programs(0)):
        row, key_head, first_head, _, blocks = tile_of_heads(
            tile, places, first_row, rows, tokens, BLOCK_KEYS, GROUP, KEY_HEADS
        )
        of_row = (first_row + row).to(gl.int64)
        heads = first_head + in_heads
        delta = gl.load(d_out_out + (row * KEY_HEADS + key_head) * GROUP + heads, mask=heads < GROUP, other=0.0)
        of_tile = d_scores + (row.to(gl.int64) * KEY_HEADS + key_head) * GROUP * TOP_K
        kept = (first_head + stored_heads < GROUP)[:, None]
        dq_2 = gl.zeros([BLOCK_HEADS, QUARTER], gl.float32, wide)
        dq_3 = gl.zeros([BLOCK_HEADS, QUARTER], gl.float32, wide)

        mbarrier.wait(bars.index(D_OUT_FULL), (tile // gl.num_programs(0)) & 1)
        mbarrier.arrive(bars.index(D_OUT_FREE), pred=blocks == 0)
        for block in range(0, blocks):
            phase = (used + block) & 1
            zero = (used + block) >> 30  # as in _consume_scores
            dp = _multiply_keys(shared, do, phase, zero)
            dp = warpgroup_mma_wait(0, deps=[dp])
            mbarrier.arrive(bars.index(D_OUT_FREE), pred=block + 1 >= blocks)

            mbarrier.wait(bars.index(SOFTMAX), phase)
            ds = _softmax(passed).load(narrow) * (dp - delta[:, None]) * scale
            if QUERIES > 1:
                at = block * BLOCK_KEYS + gl.arange(0, BLOCK_KEYS, layout=gl.SliceLayout(0, narrow))
                there = chosen_by(gl.load(chosen + of_row * TOP_K + at), heads, GROUP, QUERIES)
                ds = gl.where(there, ds, 0.0)  # a query without keys, such as padding, may be NaN
            passed.index(0).store(ds.to(d_scores.dtype.element_ty))
            fence_async_shared()
            mbarrier.arrive(bars.index(D_SCORES))
            mbarrier.wait(bars.index(D_SCORES), phase)
            left = passed.index(zero)
            dq_2 = warpgroup_mma(left, k.index(2 + zero), dq_2, is_async=True)
            dq_3 = warpgroup_mma(left, k.index(3 + zero), dq_3, is_async=True)
            stored = left.load(STORED_BLOCK)
            dq_2 = warpgroup_mma_wait(1, deps=[dq_2])
            mbarrier.arrive(bars.index(FREE + 2))
            dq_3 = warpgroup_mma_wait(0, deps=[dq_3])
            mbarrier.arrive(bars.index(FREE + 3))
            mbarrier.arrive(bars.index(D_SCORES_FREE))
            to = of_tile + ((first_head + stored_heads)[:, None] * TOP_K + block * BLOCK_KEYS + stored_places)
            gl.store(to, stored, mask=kept)
        used += blocks
        of_query = (of_row * KEY_HEADS + key_head) * GROUP
        _store_quarter(d_query, of_query, first_head, dq_2, 2, GROUP)
        _store_quarter(d_query, of_query, first_head, dq_3, 3, GROUP)


@gluon.jit
def _multiply_keys(shared, left, phase, zero):
    """Start the products of ``left``, (quarters, 64, 128), with the keys of a block without their ropes."""
    k, bars = shared[2], shared[5]
    narrow: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 16])
    total = gl.zeros([BLOCK_HEADS, BLOCK_KEYS], gl.float32, narrow)
    for turn in gl.static_range(4):
        place = turn // 2 + turn % 2 * 2  # as they are copied
        mbarrier.wait(bars.index(FULL + place), phase)
        fence_async_shared()
        keys = k.index(place + zero).permute((1, 0))
        total = warpgroup_mma(left.index(place + zero), keys, total, use_acc=turn > 0, is_async=True)
    return total


@gluon.jit
def _softmax(passed):
    """Return the memory of both gradients of scores as float32: the softmax, which they replace."""
    layout: gl.constexpr = gl.SwizzledSharedLayout(8, 1, 8, order=[1, 0])
    return passed._reinterpret(gl.float32, [BLOCK_HEADS, BLOCK_KEYS], layout)


@gluon.jit
def _store_quarter(d_query, of_query, first_head, total, quarter: gl.constexpr, GROUP: gl.constexpr):
    """Store a quarter of the gradient of the queries, in the layout of the accumulator to save shared memory."""
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 128, 16])
    at = first_head + gl.arange(0, BLOCK_HEADS, layout=gl.SliceLayout(1, layout))
    columns = quarter * QUARTER + gl.arange(0, QUARTER, layout=gl.SliceLayout(0, layout))
    to = d_query + of_query * SIZE + ((at * SIZE)[:, None] + columns[None, :])
    gl.store(to, total.to(d_query.dtype.element_ty), mask=(at < GROUP)[:, None])
