"""All gradients of attention over selected keys on Hopper GPUs, in Gluon: one persistent kernel with three warp groups.

A tile is 64 heads of a query row, or of a block of neighbouring rows with fewer heads. Its queries and output gradients
stay in shared memory. Its keys come in blocks of 64, in two halves of 256 columns, the second with the rope. A third
warp group gathers them. For each block:

1. Consumer 0 multiplies queries and output gradients with the keys. It computes the softmax and its gradient, and
   passes both to consumer 1 through shared memory.
2. Both multiply the gradient of the scores with the keys: consumer 0 with the first half, consumer 1 with the second.
   They accumulate the gradient of the queries in registers over all blocks, and release their half of the keys.
3. Both multiply the softmax and its gradient with the output gradients and the queries, 64 columns at a time, and add
   the products to the gradients of the keys. The keys of the next block arrive meanwhile.

With deterministic algorithms, the products are stored instead, and another kernel adds them in a fixed order.

Two rates limit the kernel about equally: that of the additions in the L2 cache, and that of shared memory, which
delivers both operands of most products. Additions have the full rate if a warp adds at least 128 adjacent bytes.

A fence also waits for the additions of its thread. So the third warp group, which adds nothing, fences the keys that it
copied. Triton synchronizes a warp group before and after it arrives at a barrier, and between two accesses to one
allocation. So there are few arrivals, and each barrier has an allocation.
"""

from __future__ import annotations

import torch
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
from triton.language import debug_barrier

from torchtitan_npu.gpu_kernels.launch import LOG2_E
from torchtitan_npu.gpu_kernels.sparse_flash_attention.gluon_tiles import (
    BLOCK_HEADS,
    BLOCK_KEYS,
    HALF,
    PIECE,
    PIECES,
    ROPE,
    SIZE,
    chosen_by,
    get_tile,
    keys_of,
    new_barrier,
    new_tile_queue,
    offset_of_statistics,
    offsets_of_heads,
    put_tile,
    take_tile,
    tile_of_heads,
)

FIRST_PIECES = gl.constexpr(4)
"""Consumer 0 adds these pieces of the keys' gradients. Consumer 1 adds the remaining ones and the ropes."""
REGISTERS = {"CONSUMER_REGISTERS": 224, "PRODUCER_REGISTERS": 56}
"""Registers per thread of consumer 0 and of the producer. Consumer 1 has the remaining ones."""

# To add, a thread has 4 adjacent columns and 8 threads have 32, so that a warp adds 128 adjacent bytes of a row. In the
# accumulator, thread i of 4 has columns 2i, 2i + 1, 2i + 8 and 2i + 9 of every 16. These four are adjacent in the sums
# (`restore_columns` restores the order), so this layout differs from the accumulator's in one bit of the lane only.
ADDED = gl.constexpr(
    gl.DistributedLinearLayout(
        reg_bases=[[0, 1], [0, 2], [0, 32], [1, 0], [8, 0]],
        lane_bases=[[0, 4], [0, 8], [0, 16], [2, 0], [4, 0]],
        warp_bases=[[16, 0], [32, 0]],
        block_bases=[],
        shape=[64, 64],
    )
)

# To store, a thread keeps its sums. Of half precision, 4 threads have 32 adjacent bytes.
STORED_PIECE = gl.constexpr(
    gl.DistributedLinearLayout(
        reg_bases=[[0, 1], [0, 2], [0, 16], [0, 32], [8, 0]],
        lane_bases=[[0, 4], [0, 8], [1, 0], [2, 0], [4, 0]],
        warp_bases=[[16, 0], [32, 0]],
        block_bases=[],
        shape=[64, 64],
    )
)


def restore_columns(total: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the sums for the keys, (..., columns), with their columns in order."""
    columns = total.unflatten(-1, (total.shape[-1] // 16, 4, 2, 2)).transpose(-3, -2)
    return columns.to(dtype, memory_format=torch.contiguous_format).flatten(-4)


@gluon.jit
def add_gradients(
    query,
    query_rope,
    d_out,
    key,
    key_rope,
    indices,
    first_key,
    visible_keys,
    entries,
    chosen,
    active,
    d_out_out,
    softmax_max,
    softmax_sum,
    d_query,
    d_query_rope,
    d_key,
    d_key_rope,
    counter,
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
    IN_ORDER: gl.constexpr,
    CONSUMER_REGISTERS: gl.constexpr,
    PRODUCER_REGISTERS: gl.constexpr,
):
    """Allocate shared memory, initialize the barriers and run the three warp groups.

    With ``IN_ORDER``, ``d_key`` and ``d_key_rope`` are the products per entry, (tiles of heads, rows, N2, K, size).
    """
    dtype: gl.constexpr = key.dtype.element_ty
    layout: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
    q = gl.allocate_shared_memory(dtype, [2, BLOCK_HEADS, HALF], layout)
    do = gl.allocate_shared_memory(dtype, [2, BLOCK_HEADS, HALF], layout)
    k = gl.allocate_shared_memory(dtype, [2, BLOCK_KEYS, HALF], layout)
    ropes = gl.allocate_shared_memory(dtype, [2, BLOCK_HEADS, ROPE], layout)  # of the queries, of the keys
    passed = gl.allocate_shared_memory(dtype, [2, BLOCK_HEADS, BLOCK_KEYS], layout)  # gradient of the scores, softmax
    queries_full, queries_free = new_barrier(1), new_barrier(2)
    full_0, free_0 = new_barrier(1), new_barrier(1)  # first half of the keys
    full_1, free_1 = new_barrier(1), new_barrier(1)  # second half and ropes
    passed_full, passed_free = new_barrier(1), new_barrier(2)
    queue = new_tile_queue()
    fence_async_shared()

    shared = (q, do, k, ropes, passed)
    bars = (queries_full, queries_free, full_0, full_1, free_0, free_1, passed_full, passed_free)
    selection = (indices, first_key, visible_keys, entries, first_row, rows, tokens)
    inputs = (query, query_rope, d_out, key, key_rope, active)
    strides = (query_row, query_head, rope_row, rope_head, out_row, out_head)
    of_heads = (chosen, d_out_out, softmax_max, softmax_sum, sequence, scale, scale_2)
    results = (d_query, d_query_rope, d_key, d_key_rope)
    gl.warp_specialize(
        [
            (_consumer_1, (shared, bars, queue, selection, results, GROUP, KEY_HEADS, TOP_K, IN_ORDER)),
            (
                _consumer_0,
                (shared, bars, queue, selection, of_heads, results, GROUP, KEY_HEADS, TOP_K, QUERIES, IN_ORDER),
            ),
            (_produce, (shared, bars, queue, counter, selection, inputs, strides, GROUP, KEY_HEADS, TOP_K, QUERIES)),
        ],
        [4, 4],
        [CONSUMER_REGISTERS, PRODUCER_REGISTERS],
    )


@gluon.jit
def _produce(
    shared,
    bars,
    queue,
    counter,
    selection,
    inputs,
    strides,
    GROUP: gl.constexpr,
    KEY_HEADS: gl.constexpr,
    TOP_K: gl.constexpr,
    QUERIES: gl.constexpr,
):
    """Copy the queries and output gradients of each tile, and its selected keys."""
    q, do, k, ropes = shared[:4]
    queries_full, queries_free, full_0, full_1, free_0, free_1 = bars[:6]
    indices, first_key, visible_keys, entries, first_row, rows, tokens = selection
    query, query_rope, d_out, key, key_rope, active = inputs
    query_row, query_head, rope_row, rope_head, out_row, out_head = strides
    head_blocks: gl.constexpr = (GROUP + BLOCK_HEADS - 1) // BLOCK_HEADS
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])  # a thread copies 16 bytes of 4 rows
    columns = gl.arange(0, HALF, layout=gl.SliceLayout(0, layout))[None, :]
    rope_columns = gl.arange(0, ROPE, layout=gl.SliceLayout(0, layout))[None, :]
    in_block = gl.arange(0, BLOCK_KEYS, layout=gl.SliceLayout(1, layout))  # keys of a block, or heads of a tile

    used = 0  # blocks of the tiles before
    filled = 0  # tiles with keys
    turn = 0  # tiles
    tile = gl.program_id(0)
    while tile < rows * KEY_HEADS * head_blocks:
        following = take_tile(counter)
        row, key_head, first_head, _, blocks = tile_of_heads(tile, entries, first_row, rows, tokens, GROUP, KEY_HEADS)
        if blocks > 0:
            of_row = row.to(gl.int64)
            heads = (key_head * GROUP + first_head).to(gl.int64) + in_block  # times a stride it may need 64 bits
            real = first_head + in_block < GROUP
            if active is not None:
                # Queries without keys, such as padding, may be NaN, which times a weight of 0 would be added to the
                # keys of other queries.
                of_block = (first_head + in_block) // (GROUP // QUERIES)
                real = real & ((gl.load(active + first_row + row) >> of_block & 1) != 0)
            real = real[:, None]
            queries = query + (
                offsets_of_heads(of_row, heads, query_row, query_head, GROUP, QUERIES)[:, None] + columns
            )
            at_rope = offsets_of_heads(of_row, heads, rope_row, rope_head, GROUP, QUERIES)[:, None]
            d_outs = d_out + (offsets_of_heads(of_row, heads, out_row, out_head, GROUP, QUERIES)[:, None] + columns)
            mbarrier.wait(queries_free, (filled & 1) ^ 1)
            for half in gl.static_range(2):
                async_copy.async_copy_global_to_shared(q.index(half), queries + half * HALF, real)
                async_copy.async_copy_global_to_shared(do.index(half), d_outs + half * HALF, real)
            async_copy.async_copy_global_to_shared(ropes.index(0), query_rope + (at_rope + rope_columns), real)
            async_copy.commit_group()
            async_copy.wait_group(0)
            fence_async_shared()
            mbarrier.arrive(queries_full)
            filled += 1

        first, visible = gl.load(first_key + first_row + row), gl.load(visible_keys + first_row + row)
        selected = indices + ((first_row + row).to(gl.int64) * KEY_HEADS + key_head) * TOP_K
        for block in range(0, blocks):
            at = block * BLOCK_KEYS + in_block
            at_key, there = keys_of(selected, at, first, visible, key_head, KEY_HEADS, TOP_K)
            at_key, there = at_key[:, None], there[:, None]
            keys = key + (at_key * SIZE + columns)
            free = ((used + block) & 1) ^ 1
            mbarrier.wait(free_0, free)
            async_copy.async_copy_global_to_shared(k.index(0), keys, there)
            async_copy.commit_group()
            mbarrier.wait(free_1, free)
            async_copy.async_copy_global_to_shared(k.index(1), keys + HALF, there)
            async_copy.async_copy_global_to_shared(ropes.index(1), key_rope + (at_key * ROPE + rope_columns), there)
            async_copy.commit_group()
            # All threads wait for each other's copies here, so the fence of the thread that arrives is one for all.
            async_copy.wait_group(1)
            fence_async_shared()
            mbarrier.arrive(full_0)
            async_copy.wait_group(0)
            fence_async_shared()
            mbarrier.arrive(full_1)
        used += blocks
        put_tile(queue, following, turn)
        tile = following
        turn += 1


@gluon.jit
def _consumer_0(
    shared,
    bars,
    queue,
    selection,
    of_heads,
    results,
    GROUP: gl.constexpr,
    KEY_HEADS: gl.constexpr,
    TOP_K: gl.constexpr,
    QUERIES: gl.constexpr,
    IN_ORDER: gl.constexpr,
):
    """Compute the softmax and its gradient, the gradient of the first half of the queries, and add the first pieces."""
    q, do, k, ropes, passed = shared
    queries_full, _, full_0, full_1, free_0, _, passed_full, passed_free = bars
    entries, first_row, rows, tokens = selection[3:]
    chosen, d_out_out, softmax_max, softmax_sum, sequence, scale, scale_2 = of_heads
    d_query, d_key = results[0], results[2]
    dtype: gl.constexpr = d_query.dtype.element_ty
    head_blocks: gl.constexpr = (GROUP + BLOCK_HEADS - 1) // BLOCK_HEADS
    narrow: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 16])
    wide: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 256, 16])
    in_heads = gl.arange(0, BLOCK_HEADS, layout=gl.SliceLayout(1, narrow))

    used = 0  # blocks of the tiles before
    filled = 0  # tiles with keys
    turn = 0  # tiles
    tile = gl.program_id(0)
    while tile < rows * KEY_HEADS * head_blocks:
        row, key_head, first_head, without_gap, blocks = tile_of_heads(
            tile, entries, first_row, rows, tokens, GROUP, KEY_HEADS
        )
        of_row = (first_row + row).to(gl.int64)
        key_slots = _keys_of_tile(selection, row, key_head, first_head, KEY_HEADS, TOP_K)
        selected, visible = key_slots[:2]
        heads = first_head + in_heads
        real = heads < GROUP
        statistics = offset_of_statistics(of_row, key_head, sequence, GROUP, KEY_HEADS) + heads
        highest = gl.load(softmax_max + statistics, mask=real, other=0.0) * LOG2_E
        divisor = 1 / gl.load(softmax_sum + statistics, mask=real, other=1.0)
        delta = gl.load(d_out_out + (row * KEY_HEADS + key_head) * GROUP + heads, mask=real, other=0.0)
        dq = gl.zeros([BLOCK_HEADS, HALF], gl.float32, wide)

        if blocks > 0:
            mbarrier.wait(queries_full, filled & 1)
            filled += 1
        for block in range(0, blocks):
            phase = (used + block) & 1
            # Zeros that the compiler cannot know. Otherwise it keeps descriptors of shared memory in registers, also
            # those that the products of the queries and of the output's gradients have in common.
            zero, also_zero = (used + block) >> 30, (used + block) >> 29
            mbarrier.wait(full_0, phase)
            scores = gl.zeros([BLOCK_HEADS, BLOCK_KEYS], gl.float32, narrow)
            scores = warpgroup_mma(q.index(zero), k.index(zero).permute((1, 0)), scores, use_acc=False, is_async=True)
            mbarrier.wait(full_1, phase)
            scores = warpgroup_mma(q.index(1 + zero), k.index(1 + zero).permute((1, 0)), scores, is_async=True)
            scores = warpgroup_mma(ropes.index(zero), ropes.index(1 + zero).permute((1, 0)), scores, is_async=True)
            dp = gl.zeros([BLOCK_HEADS, BLOCK_KEYS], gl.float32, narrow)
            for half in gl.static_range(2):
                keys = k.index(half + also_zero).permute((1, 0))
                dp = warpgroup_mma(do.index(half + also_zero), keys, dp, use_acc=half > 0, is_async=True)

            scores = warpgroup_mma_wait(2, deps=[scores])
            p = gl.exp2(scores * scale_2 - highest[:, None]) * divisor[:, None]
            entry = block * BLOCK_KEYS
            at = entry + gl.arange(0, BLOCK_KEYS, layout=gl.SliceLayout(0, narrow))
            if QUERIES > 1:
                there = chosen_by(gl.load(chosen + of_row * TOP_K + at), heads, GROUP, QUERIES)
                p = gl.where(there, p, 0.0)
            elif entry + BLOCK_KEYS > without_gap:
                there = keys_of(selected, at, 0, visible, 0, 1, TOP_K)[1]
                p = gl.where(there[None, :], p, 0.0)
            dp = warpgroup_mma_wait(0, deps=[dp])
            ds = p * (dp - delta[:, None]) * scale
            if QUERIES > 1:
                ds = gl.where(there, ds, 0.0)  # a query without keys, such as padding, may be NaN

            weights, d_scores = p.to(dtype), ds.to(dtype)
            left = gl.convert_layout(d_scores, gl.DotOperandLayout(0, wide, 2), assert_trivial=True)
            dq = warpgroup_mma(left, k.index(zero), dq, is_async=True)
            mbarrier.wait(passed_free, phase ^ 1)
            passed.index(0).store(d_scores)
            passed.index(1).store(weights)
            fence_async_shared()
            mbarrier.arrive(passed_full)
            to, is_key = _targets(key_slots, entry, KEY_HEADS, TOP_K, IN_ORDER)
            dq = warpgroup_mma_wait(0, deps=[dq])
            mbarrier.arrive(free_0)
            _add_pieces(shared, bars, zero, block, blocks, d_key, to, is_key, 0, FIRST_PIECES, IN_ORDER)
        used += blocks
        tile = get_tile(queue, turn)
        turn += 1
        of_query = (of_row * KEY_HEADS + key_head) * GROUP
        _store(d_query, of_query, first_head, dq, 0, HALF, SIZE, GROUP)


@gluon.jit
def _consumer_1(
    shared,
    bars,
    queue,
    selection,
    results,
    GROUP: gl.constexpr,
    KEY_HEADS: gl.constexpr,
    TOP_K: gl.constexpr,
    IN_ORDER: gl.constexpr,
):
    """Compute the gradients of the second half and of the ropes of the queries, and add the other pieces and ropes."""
    k, ropes, passed = shared[2:]
    free_1, passed_full = bars[5], bars[6]
    entries, first_row, rows, tokens = selection[3:]
    d_query, d_query_rope, d_key, d_key_rope = results
    head_blocks: gl.constexpr = (GROUP + BLOCK_HEADS - 1) // BLOCK_HEADS
    narrow: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 16])
    wide: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 256, 16])

    used = 0  # blocks of the tiles before
    turn = 0  # tiles
    tile = gl.program_id(0)
    while tile < rows * KEY_HEADS * head_blocks:
        row, key_head, first_head, _, blocks = tile_of_heads(tile, entries, first_row, rows, tokens, GROUP, KEY_HEADS)
        of_row = (first_row + row).to(gl.int64)
        key_slots = _keys_of_tile(selection, row, key_head, first_head, KEY_HEADS, TOP_K)
        dq = gl.zeros([BLOCK_HEADS, HALF], gl.float32, wide)
        dq_rope = gl.zeros([BLOCK_HEADS, ROPE], gl.float32, narrow)
        for block in range(0, blocks):
            zero = (used + block) >> 30  # as in _consumer_0
            to, is_key = _targets(key_slots, block * BLOCK_KEYS, KEY_HEADS, TOP_K, IN_ORDER)
            mbarrier.wait(passed_full, (used + block) & 1)
            left = passed.index(zero)
            dq = warpgroup_mma(left, k.index(1 + zero), dq, is_async=True)
            dq_rope = warpgroup_mma(left, ropes.index(1 + zero), dq_rope, is_async=True)
            rope = gl.zeros([BLOCK_KEYS, ROPE], gl.float32, narrow)
            rope = warpgroup_mma(left.permute((1, 0)), ropes.index(zero), rope, use_acc=False, is_async=True)
            dq, dq_rope = warpgroup_mma_wait(1, deps=[dq, dq_rope])
            mbarrier.arrive(free_1)
            rope = warpgroup_mma_wait(0, deps=[rope])
            _add_or_store(d_key_rope, rope, to, is_key, 0, ROPE, IN_ORDER)
            _add_pieces(shared, bars, zero, block, blocks, d_key, to, is_key, FIRST_PIECES, PIECES, IN_ORDER)
        used += blocks
        tile = get_tile(queue, turn)
        turn += 1
        of_query = (of_row * KEY_HEADS + key_head) * GROUP
        _store(d_query, of_query, first_head, dq, HALF, HALF, SIZE, GROUP)
        _store(d_query_rope, of_query, first_head, dq_rope, 0, ROPE, ROPE, GROUP)


@gluon.jit
def _keys_of_tile(selection, row, key_head, first_head, KEY_HEADS: gl.constexpr, TOP_K: gl.constexpr):
    """Return a tile's indices, the number of its visible keys, its first key, its key head and its first entry.

    The entry is that in the workspace, with ``IN_ORDER``.
    """
    indices, first_key, visible_keys, _, first_row, rows, _ = selection
    of_row = (first_row + row).to(gl.int64)
    selected = indices + (of_row * KEY_HEADS + key_head) * TOP_K
    first, visible = gl.load(first_key + of_row), gl.load(visible_keys + of_row)
    first_entry = ((first_head // BLOCK_HEADS * rows + row) * KEY_HEADS + key_head) * TOP_K
    return selected, visible, first, key_head, first_entry


@gluon.jit
def _targets(key_slots, entry, KEY_HEADS: gl.constexpr, TOP_K: gl.constexpr, IN_ORDER: gl.constexpr):
    """Return the targets of :func:`_add_or_store` for the block that starts at ``entry``, and a mask.

    Targets are keys, and the mask says which entries hold one. With ``IN_ORDER`` the target is the block's first entry
    in the workspace, and all products are stored.
    """
    selected, visible, first, key_head, first_entry = key_slots
    if IN_ORDER:
        return first_entry + entry, True  # 32 bits: the workspace is bounded
    else:
        at = entry + gl.arange(0, BLOCK_KEYS, layout=gl.SliceLayout(1, ADDED))
        return keys_of(selected, at, first, visible, key_head, KEY_HEADS, TOP_K)


@gluon.jit
def _add_pieces(
    shared, bars, zero, block, blocks, d_key, to, is_key, START: gl.constexpr, END: gl.constexpr, IN_ORDER: gl.constexpr
):
    """Multiply and add pieces of the gradients of a block's keys.

    Release the softmax before the last addition, and the queries if the block is the last one.
    """
    queries_free, passed_free = bars[1], bars[7]
    for piece in gl.static_range(START, END):
        total = _multiply_piece(shared, zero, piece)
        total = warpgroup_mma_wait(0, deps=[total])
        if piece == END - 1:
            mbarrier.arrive(passed_free)
            if block + 1 == blocks:
                mbarrier.arrive(queries_free)
        _add_or_store(d_key, total, to, is_key, piece * PIECE, SIZE, IN_ORDER)


@gluon.jit
def _multiply_piece(shared, zero, piece: gl.constexpr):
    """Start the products for 64 columns of the gradients of the keys."""
    q, do, passed = shared[0], shared[1], shared[4]
    narrow: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 16])
    total = gl.zeros([BLOCK_KEYS, PIECE], gl.float32, narrow)
    queries = q.index(piece // 4 + zero).slice(piece % 4 * PIECE, PIECE, dim=1)
    d_outs = do.index(piece // 4 + zero).slice(piece % 4 * PIECE, PIECE, dim=1)
    total = warpgroup_mma(passed.index(zero).permute((1, 0)), queries, total, use_acc=False, is_async=True)
    return warpgroup_mma(passed.index(1 + zero).permute((1, 0)), d_outs, total, is_async=True)


@gluon.jit
def _add_or_store(target, total, to, is_key, column: gl.constexpr, WIDTH: gl.constexpr, IN_ORDER: gl.constexpr):
    """Add 64 columns to the gradients of the keys ``to``, whose columns :func:`restore_columns` puts in order.

    With ``IN_ORDER``, store them at the entries from ``to`` on, whether these hold a key or not.
    """
    adjacent = total.reshape([BLOCK_KEYS, 4, 2, 4, 2]).permute((0, 1, 3, 2, 4)).reshape([BLOCK_KEYS, PIECE])
    if IN_ORDER:
        entries = gl.arange(0, BLOCK_KEYS, layout=gl.SliceLayout(1, STORED_PIECE))[:, None]
        columns = column + gl.arange(0, PIECE, layout=gl.SliceLayout(0, STORED_PIECE))[None, :]
        product = gl.convert_layout(adjacent.to(target.dtype.element_ty), STORED_PIECE, assert_trivial=True)
        gl.store(target + to * WIDTH + (entries * WIDTH + columns), product)
        debug_barrier()  # otherwise ptxas stores during the next product, for which it has too few registers
    else:
        columns = column + gl.arange(0, PIECE, layout=gl.SliceLayout(0, ADDED))[None, :]
        pointers = target + ((to * WIDTH)[:, None] + columns)
        gl.atomic_add(pointers, gl.convert_layout(adjacent, ADDED), mask=is_key[:, None], sem="relaxed")


@gluon.jit
def _store(
    target,
    of_query,
    first_head,
    total,
    column: gl.constexpr,
    COLUMNS: gl.constexpr,
    WIDTH: gl.constexpr,
    GROUP: gl.constexpr,
):
    """Store columns of the gradient of the queries, in the layout of the accumulator to save shared memory."""
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, COLUMNS, 16])
    at = first_head + gl.arange(0, BLOCK_HEADS, layout=gl.SliceLayout(1, layout))
    columns = column + gl.arange(0, COLUMNS, layout=gl.SliceLayout(0, layout))
    to = target + of_query * WIDTH + ((at * WIDTH)[:, None] + columns[None, :])
    gl.store(to, total.to(target.dtype.element_ty), mask=(at < GROUP)[:, None])
