"""Attention over selected keys on Hopper GPUs, in Gluon: one persistent kernel with three warp groups.

A tile is 64 heads of a query row, or of a block of neighbouring rows with fewer heads. Its keys come in blocks of 64,
in two slots of shared memory: even blocks in slot 0, odd blocks in slot 1. A third warp group gathers the keys by
asynchronous copies. Consumer ``w``, 0 or 1, computes the scores and the softmax of the blocks in slot ``w``, and
accumulates half ``w`` of the 512 columns of the output over all blocks. Both consumers therefore need the exponentials
of every block, and pass them on in shared memory, where the block's rope was. The steps of a consumer for its
block ``k``:

1. Start the product of the queries with half ``w`` of the keys, which is refilled first.
2. Wait for the exponentials of block ``k - 1``, load them and start their product with the values.
3. Start the product of the queries with the other half and with the rope.
4. Compute the exponentials, publish them and add their product with the values.

The softmax of one consumer overlaps with products 1 and 2 of the other. Half ``w`` of slot ``w`` is free after step 4,
and the other half of the slot when the other consumer has done its step 2 for the next block.

Each consumer's steps 2 to 4 wait for those of the other, which limits the speed. So threads exchange scores only if an
origin moves (see :mod:`gluon_softmax`), and the product takes the exponentials from registers, which needs no fence.
"""

from __future__ import annotations

import logging
from functools import cache

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

from torchtitan_npu.gpu_kernels.launch import LOG2_E, blocks_in, multiprocessors
from torchtitan_npu.gpu_kernels.sparse_flash_attention.gluon_softmax import (
    PER_THREAD,
    exponentials_of,
    factor_between,
    fill_per_thread,
    multiply_rows,
    rescale_total,
    round_like,
    sum_by_thread,
)
from torchtitan_npu.gpu_kernels.sparse_flash_attention.gluon_tiles import (
    BLOCK_HEADS,
    BLOCK_KEYS,
    HALF,
    ROPE,
    SIZE,
    STORED,
    aligned,
    chosen_by,
    get_tile,
    keys_of,
    new_barrier,
    new_barriers,
    new_tile_queue,
    offset_of_statistics,
    offsets_of_heads,
    put_tile,
    take_tile,
    tile_of_heads,
)
from torchtitan_npu.gpu_kernels.sparse_flash_attention.triton_query_blocks import select
from torchtitan_npu.gpu_kernels.sparse_flash_attention.triton_rows import rows_of
from torchtitan_npu.gpu_kernels.sparse_flash_attention.triton_tiles import by_token, check_size
from torchtitan_npu.log import log_on_first_rank
from torchtitan_npu.ops.sparse_flash_attention.checks import sequence_length, statistics_shape

REGISTERS = {"CONSUMER_REGISTERS": 224, "PRODUCER_REGISTERS": 56}
"""Registers per thread of the second consumer and of the producer. The first consumer has the remaining ones."""


def npu_sparse_flash_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor | None,
    sparse_indices: Tensor,
    scale_value: float,
    actual_seq_lengths_query: Tensor | None,
    actual_seq_lengths_kv: Tensor | None,
    query_rope: Tensor,
    key_rope: Tensor,
    layout_query: str,
    sparse_mode: int,
    return_softmax_lse: bool,
    **_: object,
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute attention as the reference does, without synchronising with the device.

    Therefore the values of the lengths are not checked, and a -1 before a key is skipped. Takes queries and keys of 512
    features in half precision with ropes of 64 features. The keys are also the values: ``value`` is not read.
    """
    log_gluon()
    check_size(key, key_rope)
    rows = rows_of(layout_query, sparse_mode, query, key, actual_seq_lengths_query, actual_seq_lengths_kv)
    tokens, heads = rows.first.numel(), query.shape[-2]
    key_heads = sparse_indices.shape[-2]
    key, key_rope, sparse_indices = (
        aligned(key.contiguous()),
        aligned(key_rope.contiguous()),
        sparse_indices.contiguous(),
    )
    queries, query_ropes = aligned(by_token(query)), aligned(by_token(query_rope))
    if scale_value < 0:  # the kernel multiplies the highest score by the scale, which must be positive
        queries, query_ropes = -queries, -query_ropes
    scale = max(abs(scale_value) * LOG2_E.value, torch.finfo(torch.float32).tiny)
    out = torch.empty_like(query, memory_format=torch.contiguous_format)
    softmax_max = torch.empty(statistics_shape(query, key), dtype=torch.float32, device=query.device)
    softmax_sum = torch.empty_like(softmax_max)

    sequence = tokens if layout_query == "TND" else query.shape[1]
    lengths = sequence_length(query, actual_seq_lengths_query), sequence_length(key, actual_seq_lengths_kv)
    selection = select(sparse_indices, rows, key, heads, sequence, (*lengths, sparse_mode == 3))
    block = selection.queries
    group, tokens, sequence = heads // key_heads * block, tokens // block, sequence // block
    tiles = tokens * key_heads * blocks_in(group, BLOCK_HEADS.value)
    _attend[(min(tiles, multiprocessors(query.device)),)](
        *(queries, query_ropes, key, key_rope, selection.keys, *selection.rows, selection.counts, selection.chosen),
        *(out, softmax_max, softmax_sum, torch.zeros(1, dtype=torch.int32, device=query.device)),
        *(scale, tokens, sequence),
        *(*queries.stride()[:2], *query_ropes.stride()[:2]),
        GROUP=group,
        KEY_HEADS=key_heads,
        TOP_K=selection.keys.shape[-1],
        QUERIES=block,
        **REGISTERS,
        num_warps=4,
    )
    if not return_softmax_lse:
        return out, softmax_max.new_empty(0), softmax_sum.new_empty(0)
    return out, softmax_max, softmax_sum


@cache
def log_gluon() -> None:
    log_on_first_rank("npu_sparse_flash_attention runs its kernel for Hopper GPUs (Gluon)", logging.INFO)


@gluon.jit
def _attend(
    query,
    query_rope,
    key,
    key_rope,
    indices,
    first_key,
    visible_keys,
    entries,
    chosen,
    out,
    softmax_max,
    softmax_sum,
    counter,
    scale,  # positive, for powers of 2
    tokens,
    sequence,
    query_row,
    query_head,
    rope_row,
    rope_head,
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
    vector: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, order=[0])
    threads: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, order=[1, 0])
    q = gl.allocate_shared_memory(dtype, [2, BLOCK_HEADS, HALF], layout)
    q_rope = gl.allocate_shared_memory(dtype, [1, BLOCK_HEADS, ROPE], layout)
    k = gl.allocate_shared_memory(dtype, [4, BLOCK_KEYS, HALF], layout)  # half h of slot s is at 2 s + h
    k_rope = gl.allocate_shared_memory(dtype, [2, BLOCK_KEYS, ROPE], layout)  # then (heads, keys) of exponentials
    origins = gl.allocate_shared_memory(gl.float32, [2, BLOCK_HEADS, 4], threads)  # for each of a head's threads
    # of two tiles and both consumers: the maximum, the sum, and the sum of the rounded exponentials
    sums = gl.allocate_shared_memory(gl.float32, [12, BLOCK_HEADS], vector)
    ones = gl.allocate_shared_memory(dtype, [8, BLOCK_KEYS], layout)
    ones.store(gl.full([8, BLOCK_KEYS], 1.0, dtype, gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])))
    # a barrier per slot; 128 threads of the producer arrive when their copies have landed
    local_full, rest_full = new_barriers(2, 128), new_barriers(2, 128)
    local_free, rest_free, published = new_barriers(2, 1), new_barriers(2, 1), new_barriers(2, 1)
    query_full, query_free = new_barrier(128), new_barrier(2)
    statistics = new_barrier(2)  # both consumers arrive, and both wait
    queue = new_tile_queue()
    fence_async_shared()

    shared = (q, q_rope, k, k_rope, origins, sums, ones)
    bars = (local_full, rest_full, local_free, rest_free, published, statistics, query_full, query_free)
    results = (out, softmax_max, softmax_sum)
    selection = (indices, visible_keys, entries, tokens)
    inputs = (query, query_rope, key, key_rope, first_key, query_row, query_head, rope_row, rope_head)
    gl.warp_specialize(
        [
            (
                _consume,
                (shared, bars, queue, selection, chosen, results, scale, sequence, GROUP, KEY_HEADS, TOP_K, QUERIES, 0),
            ),
            (
                _consume,
                (shared, bars, queue, selection, chosen, results, scale, sequence, GROUP, KEY_HEADS, TOP_K, QUERIES, 1),
            ),
            (_produce, (shared, bars, queue, counter, selection, inputs, GROUP, KEY_HEADS, TOP_K, QUERIES)),
        ],
        [4, 4],
        [CONSUMER_REGISTERS, PRODUCER_REGISTERS],
    )


@gluon.jit
def _tile(tile, entries, tokens, GROUP: gl.constexpr, KEY_HEADS: gl.constexpr):
    """Return a tile as :func:`tile_of_heads` does, but with one block of entries without keys if the row has no key."""
    row, key_head, first_head, without_gap, blocks = tile_of_heads(tile, entries, 0, tokens, tokens, GROUP, KEY_HEADS)
    return row, key_head, first_head, without_gap, gl.maximum(blocks, 1)


@gluon.jit
def _produce(
    shared,
    bars,
    queue,
    counter,
    selection,
    inputs,
    GROUP: gl.constexpr,
    KEY_HEADS: gl.constexpr,
    TOP_K: gl.constexpr,
    QUERIES: gl.constexpr,
):
    """Copy the queries of each tile, and its selected keys block by block, zero where an entry holds no key."""
    q, q_rope = shared[:2]
    query_full, query_free = bars[6:]
    indices, visible_keys, entries, tokens = selection
    query, query_rope, key, key_rope, first_key, query_row, query_head, rope_row, rope_head = inputs
    head_blocks: gl.constexpr = (GROUP + BLOCK_HEADS - 1) // BLOCK_HEADS
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])  # a thread copies 16 bytes of 4 rows
    columns = gl.arange(0, HALF, layout=gl.SliceLayout(0, layout))[None, :]
    rope_columns = gl.arange(0, ROPE, layout=gl.SliceLayout(0, layout))[None, :]
    in_block = gl.arange(0, BLOCK_KEYS, layout=gl.SliceLayout(1, layout))

    used = 0  # blocks that went through slot 0
    used_1 = 0
    turn = 0
    tile = gl.program_id(0)
    while tile < tokens * KEY_HEADS * head_blocks:
        following = take_tile(counter)
        row, key_head, first_head, _, blocks = _tile(tile, entries, tokens, GROUP, KEY_HEADS)
        first, visible = gl.load(first_key + row), gl.load(visible_keys + row)
        of_row = row.to(gl.int64)
        selected = indices + (of_row * KEY_HEADS + key_head) * TOP_K
        index = gl.load(selected + in_block, mask=in_block < TOP_K, other=-1)

        mbarrier.wait(query_free, (turn & 1) ^ 1)
        head = (key_head * GROUP + first_head).to(gl.int64)
        heads = head + in_block  # 64 bits: times a stride it may be large
        queries = query + (offsets_of_heads(of_row, heads, query_row, query_head, GROUP, QUERIES)[:, None] + columns)
        at_rope = offsets_of_heads(of_row, heads, rope_row, rope_head, GROUP, QUERIES)[:, None]
        ropes = query_rope + (at_rope + rope_columns)
        real = (first_head + in_block < GROUP)[:, None]
        async_copy.async_copy_global_to_shared(q.index(0), queries, real)
        async_copy.async_copy_global_to_shared(q.index(1), queries + HALF, real)
        async_copy.async_copy_global_to_shared(q_rope.index(0), ropes, real)
        async_copy.mbarrier_arrive(query_full, increment_count=False)

        of_tile = (shared, bars, selected, first, visible, key_head, key, key_rope, columns, rope_columns, in_block)
        for block in range(0, blocks, 2):
            index = _copy_block(of_tile, index, block, used + block // 2, KEY_HEADS, TOP_K, 0)
            if block + 1 < blocks:
                index = _copy_block(of_tile, index, block + 1, used_1 + block // 2, KEY_HEADS, TOP_K, 1)
        used += (blocks + 1) // 2
        used_1 += blocks // 2
        put_tile(queue, following, turn)
        tile = following
        turn += 1


@gluon.jit
def _copy_block(of_tile, index, block, used, KEY_HEADS: gl.constexpr, TOP_K: gl.constexpr, SLOT: gl.constexpr):
    """Copy the keys of ``block`` to slot ``SLOT``, after ``used`` blocks, and return the indices of the next block."""
    shared, bars, selected, first, visible, key_head, key, key_rope, columns, rope_columns, in_block = of_tile
    k, k_rope = shared[2:4]
    local_full, rest_full, local_free, rest_free = bars[:4]
    at = (block + 1) * BLOCK_KEYS + in_block
    following = gl.load(selected + at, mask=at < TOP_K, other=-1)  # long before it is needed
    there = ((index >= 0) & (index < visible))[:, None]
    # 64 bits, although 32 suffice: column offsets are then constants of the copies, and four addresses serve for all
    row = ((first + index) * KEY_HEADS + key_head).to(gl.int64)[:, None]
    keys, ropes = key + row * SIZE + columns, key_rope + row * ROPE + rope_columns
    free = (used & 1) ^ 1
    mbarrier.wait(local_free.index(SLOT), free)
    async_copy.async_copy_global_to_shared(k.index(3 * SLOT), keys + SLOT * HALF, there)
    async_copy.mbarrier_arrive(local_full.index(SLOT), increment_count=False)
    mbarrier.wait(rest_free.index(SLOT), free)
    async_copy.async_copy_global_to_shared(k.index(1 + SLOT), keys + (1 - SLOT) * HALF, there)
    async_copy.async_copy_global_to_shared(k_rope.index(SLOT), ropes, there)
    async_copy.mbarrier_arrive(rest_full.index(SLOT), increment_count=False)
    return following


@gluon.jit
def _consume(
    shared,
    bars,
    queue,
    selection,
    chosen,
    results,
    scale,
    sequence,
    GROUP: gl.constexpr,
    KEY_HEADS: gl.constexpr,
    TOP_K: gl.constexpr,
    QUERIES: gl.constexpr,
    W: gl.constexpr,
):
    """Attend to the blocks of slot ``W``, and compute half ``W`` of the output."""
    sums = shared[5]
    rest_free = bars[3]
    statistics, query_full, query_free = bars[5:]
    indices, visible_keys, entries, tokens = selection
    out, softmax_max, softmax_sum = results
    head_blocks: gl.constexpr = (GROUP + BLOCK_HEADS - 1) // BLOCK_HEADS
    wide: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 256, 16])
    narrow: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 16])
    per_head: gl.constexpr = gl.SliceLayout(1, narrow)

    used = 0  # blocks that went through this consumer's slot
    used_other = 0
    turn = 0
    tile = gl.program_id(0)
    while tile < tokens * KEY_HEADS * head_blocks:
        row, key_head, first_head, without_gap, blocks = _tile(tile, entries, tokens, GROUP, KEY_HEADS)
        of_row = row.to(gl.int64)
        selected = indices + (of_row * KEY_HEADS + key_head) * TOP_K
        visible, bits = gl.load(visible_keys + row), chosen + of_row * TOP_K
        of_tile = (selected, bits, visible, without_gap, blocks, scale, used, used_other)
        total = gl.zeros([BLOCK_HEADS, HALF], gl.float32, wide)
        origin = fill_per_thread(float("-inf"))
        highest = fill_per_thread(float("-inf"))  # of the consumer's blocks
        added = fill_per_thread(0.0)  # exponentials of these blocks
        rounded = gl.zeros([BLOCK_HEADS, 8], gl.float32, gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 8, 16]))

        mbarrier.wait(query_full, turn & 1)
        if W == 0:
            total, origin, highest, added, rounded = _attend_block(
                shared, bars, of_tile, 0, total, origin, highest, added, rounded, GROUP, TOP_K, QUERIES, W, True
            )
        else:
            # ptxas would otherwise wait in the loop for the first product with the keys before it rescales the total
            total = warpgroup_mma_wait(0, deps=[total])
            mbarrier.arrive(query_free, pred=blocks == 1)
        for block in range(2 - W, blocks, 2):
            total, origin, highest, added, rounded = _attend_block(
                shared, bars, of_tile, block, total, origin, highest, added, rounded, GROUP, TOP_K, QUERIES, W, False
            )
        if (blocks + W) % 2 == 0:  # the other consumer computed the last exponentials
            total, origin, factor = _add_other_block(shared, bars, total, origin, used_other + (blocks - 1) // 2, W)
            added, rounded = added * factor, multiply_rows(rounded, factor)
            total = warpgroup_mma_wait(0, deps=[total])
            mbarrier.arrive(rest_free.index(1 - W))

        mine = (turn & 1) * 6 + 3 * W  # in turns, because the other consumer may still read those of the last tile
        other = (turn & 1) * 6 + 3 - 3 * W
        highest = gl.convert_layout(gl.max(highest, 1), per_head)
        added = gl.convert_layout(gl.sum(added, 1), per_head)
        rounded = gl.convert_layout(gl.sum(rounded, 1) / 8, per_head)  # of 8 equal columns
        sums.index(mine).store(highest)
        sums.index(mine + 1).store(added)
        sums.index(mine + 2).store(rounded)
        mbarrier.arrive(statistics)
        mbarrier.wait(statistics, turn & 1)
        highest = gl.maximum(highest, sums.index(other).load(per_head))
        added += sums.index(other + 1).load(per_head)
        rounded += sums.index(other + 2).load(per_head)

        heads = (of_row * KEY_HEADS + key_head) * GROUP
        divisor = gl.convert_layout(gl.where(rounded == 0, 1.0, rounded), gl.SliceLayout(1, wide))
        average = gl.convert_layout((total * (1 / divisor)[:, None]).to(out.dtype.element_ty), STORED)
        at = first_head + gl.arange(0, BLOCK_HEADS, layout=gl.SliceLayout(1, STORED))
        columns = W * HALF + gl.arange(0, HALF, layout=gl.SliceLayout(0, STORED))
        gl.store(out + heads * SIZE + ((at * SIZE)[:, None] + columns[None, :]), average, mask=(at < GROUP)[:, None])
        if W == 0:
            at = first_head + gl.arange(0, BLOCK_HEADS, layout=per_head)
            first_statistic = offset_of_statistics(of_row, key_head, sequence, GROUP, KEY_HEADS)
            origin_of_head = gl.convert_layout(gl.max(origin, 1), per_head)  # of four equal ones
            added *= gl.where(highest == float("-inf"), 1.0, gl.exp2(origin_of_head - highest))
            gl.store(softmax_max + first_statistic + at, highest / LOG2_E, mask=at < GROUP)
            gl.store(softmax_sum + first_statistic + at, added, mask=at < GROUP)
        used += (blocks + 1 - W) // 2
        used_other += (blocks + W) // 2
        tile = get_tile(queue, turn)
        turn += 1


@gluon.jit
def _attend_block(
    shared,
    bars,
    of_tile,
    block,
    total,
    origin,
    highest,
    added,
    rounded,
    GROUP: gl.constexpr,
    TOP_K: gl.constexpr,
    QUERIES: gl.constexpr,
    W: gl.constexpr,
    FIRST: gl.constexpr,
):
    """Add the exponentials of the other consumer's block before ``block``, if any, and those of ``block``."""
    q, q_rope, k, k_rope, origins = shared[:5]
    ones = shared[6]
    local_full, rest_full, local_free, rest_free, published = bars[:5]
    query_free = bars[7]
    selected, chosen, visible, without_gap, blocks, scale, used, used_other = of_tile
    narrow: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 16])
    wide: gl.constexpr = total.type.layout
    # A zero that the compiler cannot know. Otherwise it keeps 80 descriptors of shared memory in registers, and spills.
    zero = (used + block // 2) >> 30
    half_keys = k.index(3 * W + zero)
    phase = (used + block // 2) & 1

    mbarrier.wait(local_full.index(W), phase)
    fence_async_shared()
    scores = gl.zeros([BLOCK_HEADS, BLOCK_KEYS], gl.float32, narrow)
    scores = warpgroup_mma(q.index(W + zero), half_keys.permute((1, 0)), scores, use_acc=False, is_async=True)
    at = block * BLOCK_KEYS + gl.arange(0, BLOCK_KEYS, layout=gl.SliceLayout(0, narrow))
    if QUERIES > 1:
        bits = gl.load(chosen + at)  # long before they are needed
    if not FIRST:
        total, origin, factor = _add_other_block(shared, bars, total, origin, used_other + (block - 1) // 2, W)
        added, rounded = added * factor, multiply_rows(rounded, factor)
    mbarrier.wait(rest_full.index(W), phase)
    fence_async_shared()
    scores = warpgroup_mma(q.index(1 - W + zero), k.index(1 + W + zero).permute((1, 0)), scores, is_async=True)
    scores = warpgroup_mma(q_rope.index(zero), k_rope.index(W + zero).permute((1, 0)), scores, is_async=True)
    if not FIRST:
        total = warpgroup_mma_wait(2, deps=[total])  # the two products above may be in flight
        mbarrier.arrive(rest_free.index(1 - W))
    scores = warpgroup_mma_wait(0, deps=[scores])
    if block + 2 >= blocks:
        mbarrier.arrive(query_free)

    if QUERIES > 1:
        heads = gl.arange(0, BLOCK_HEADS, layout=gl.SliceLayout(1, narrow))  # all heads of a block are in one tile
        scores = gl.where(chosen_by(bits, heads, GROUP, QUERIES), scores, float("-inf"))
    elif (block + 1) * BLOCK_KEYS > without_gap:
        there = keys_of(selected, at, 0, visible, 0, 1, TOP_K)[1]
        scores = gl.where(there[None, :], scores, float("-inf"))
    exponentials, new_origin, block_highest = exponentials_of(scores, scale, origin)
    highest = gl.maximum(highest, block_highest)
    weights = round_like(exponentials, q)
    k_rope.index(W).store(weights)
    origins.index(W).store(new_origin)
    mbarrier.arrive(published.index(W))

    total = rescale_total(total, origin, new_origin)
    factor = factor_between(origin, new_origin)
    added = added * factor + sum_by_thread(exponentials)
    weights_in_registers = gl.convert_layout(weights, gl.DotOperandLayout(0, wide, 2), assert_trivial=True)
    total = warpgroup_mma(weights_in_registers, half_keys, total, is_async=True)
    # a product with ones adds up the rounded exponentials, in less time than the threads would take
    weights_of_ones = gl.convert_layout(weights, gl.DotOperandLayout(0, rounded.type.layout, 2), assert_trivial=True)
    rounded = warpgroup_mma(weights_of_ones, ones.permute((1, 0)), multiply_rows(rounded, factor), is_async=True)
    total, rounded = warpgroup_mma_wait(0, deps=[total, rounded])
    mbarrier.arrive(local_free.index(W))
    return total, new_origin, highest, added, rounded


@gluon.jit
def _add_other_block(shared, bars, total, origin, count, W: gl.constexpr):
    """Start to add the product of the other consumer's exponentials with half ``W`` of the values of their block."""
    k, k_rope, origins = shared[2:5]
    published = bars[4]
    mbarrier.wait(published.index(1 - W), count & 1)
    new_origin = origins.index(1 - W).load(PER_THREAD)
    weights = k_rope.index(1 - W).load(gl.DotOperandLayout(0, total.type.layout, 2))
    total = rescale_total(total, origin, new_origin)
    total = warpgroup_mma(weights, k.index(2 - W), total, is_async=True)
    return total, new_origin, factor_between(origin, new_origin)
