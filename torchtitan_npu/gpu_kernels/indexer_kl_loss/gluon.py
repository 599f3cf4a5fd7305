"""The distributions of the indexer's loss on Hopper GPUs, in Gluon: one persistent kernel with three warp groups.

A tile is a query row, whose queries of all heads stay in shared memory. Its keys come in blocks of 128, cut into pieces
of 64 columns that go through a ring of four slots: the key, its rope, then the indexer's key. A third warp group
gathers the pieces. Each consumer multiplies its 64 keys of a block with all heads and sums over the heads, so that the
softmax of one overlaps with products of the other.
"""

from __future__ import annotations

from typing import Any

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

from torchtitan_npu.gpu_kernels.indexer_kl_loss.triton import loss
from torchtitan_npu.gpu_kernels.launch import LOG2_E, multiprocessors
from torchtitan_npu.gpu_kernels.sparse_flash_attention.gluon_tiles import (
    PIECE,
    PIECES,
    ROPE,
    SIZE,
    aligned,
    count_entries,
    keys_of,
)
from torchtitan_npu.gpu_kernels.sparse_flash_attention.triton_rows import Rows
from torchtitan_npu.gpu_kernels.sparse_flash_attention.triton_tiles import by_token, check_size
from torchtitan_npu.ops.core.gpu import choose
from torchtitan_npu.ops.indexer_kl_loss.reference import IndexerLossInputs

HEADS = gl.constexpr(128)
INDEX_HEADS = gl.constexpr(64)
INDEX_SIZE = gl.constexpr(128)
HALF_KEYS = gl.constexpr(64)
BLOCK_KEYS = gl.constexpr(128)
ALL_PIECES = gl.constexpr(11)
SLOTS = gl.constexpr(4)
REGISTERS = {"CONSUMER_REGISTERS": 184, "PRODUCER_REGISTERS": 136}
"""Registers per thread of the second consumer and of the producer. The first consumer has the remaining ones."""

# indices of barriers; the first two have one barrier per slot
FULL = gl.constexpr(0)
FREE = gl.constexpr(4)
QUERY_FULL = gl.constexpr(8)
QUERY_FREE = gl.constexpr(9)
BARRIERS = gl.constexpr(10)


def npu_sparse_lightning_indexer_grad_kl_loss(**arguments: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return the gradients and the loss as the Triton kernels do.

    Takes half precision, at most 128 heads of 512 + 64 features and at most 64 heads of the indexer of 128 features.
    """
    return loss(IndexerLossInputs(**arguments), distributions, gradients)


def gradients(
    query: Tensor, key: Tensor, weights: Tensor, sparse_indices: Tensor, d_scores: Tensor, rows: Rows
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of the indexer's scores, from the kernel that the registry prefers for them."""
    kernel = choose("npu_lightning_indexer_grad", query=query, key=key, sparse_indices=sparse_indices)
    assert kernel is not None
    return kernel.load("gradients")(query, key, weights, sparse_indices, d_scores, rows)


def distributions(x: IndexerLossInputs, rows: Rows, indices: Tensor, target: Tensor, scores: Tensor) -> None:
    """Write the distributions as the function of the same name in Triton does."""
    assert x.query_rope is not None and x.key_rope is not None
    check_size(x.key, x.key_rope)
    queries, query_ropes, index_queries = (aligned(by_token(t)) for t in (x.query, x.query_rope, x.query_index))
    keys = (aligned(t.contiguous()) for t in (x.key, x.key_rope, x.key_index))
    tokens = rows.first.numel()
    _distributions[(min(tokens, multiprocessors(x.query.device)),)](
        *(queries, query_ropes, index_queries, *keys, x.weights.contiguous()),
        *(x.softmax_max.contiguous(), x.softmax_sum.contiguous(), indices, *rows, count_entries(indices, rows)),
        *(target, scores, x.scale_value * LOG2_E.value, tokens),
        *(*queries.stride()[:2], *query_ropes.stride()[:2], *index_queries.stride()[:2]),
        GROUP=x.query.shape[-2],
        INDEX_GROUP=x.query_index.shape[-2],
        TOP_K=indices.shape[-1],
        **REGISTERS,
        num_warps=4,
    )


@gluon.jit
def _distributions(
    query,
    query_rope,
    query_index,
    key,
    key_rope,
    key_index,
    index_weights,
    softmax_max,
    softmax_sum,
    indices,
    first_key,
    visible_keys,
    entries,
    target,
    scores,
    scale_2,  # for powers of 2
    tokens,
    query_row,
    query_head,
    rope_row,
    rope_head,
    index_row,
    index_head,
    GROUP: gl.constexpr,
    INDEX_GROUP: gl.constexpr,
    TOP_K: gl.constexpr,
    CONSUMER_REGISTERS: gl.constexpr,
    PRODUCER_REGISTERS: gl.constexpr,
):
    """Allocate shared memory, initialize the barriers and run the three warp groups."""
    dtype: gl.constexpr = key.dtype.element_ty
    layout: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
    q = gl.allocate_shared_memory(dtype, [PIECES + 1, HEADS, PIECE], layout)  # the last one is the rope
    q_index = gl.allocate_shared_memory(dtype, [2, INDEX_HEADS, PIECE], layout)
    # the keys of consumer w in slot s are at 2 s + w
    k = gl.allocate_shared_memory(dtype, [2 * SLOTS, HALF_KEYS, PIECE], layout)
    bars = gl.allocate_shared_memory(gl.int64, [BARRIERS, 1], mbarrier.MBarrierLayout())
    for slot in gl.static_range(SLOTS):
        mbarrier.init(bars.index(FULL + slot), count=128)  # threads of the producer
        mbarrier.init(bars.index(FREE + slot), count=2)
    mbarrier.init(bars.index(QUERY_FULL), count=128)
    mbarrier.init(bars.index(QUERY_FREE), count=2)
    fence_async_shared()

    shared = (q, q_index, k, bars)
    selection = (indices, first_key, visible_keys, entries, tokens)
    inputs = (query, query_rope, query_index, key, key_rope, key_index)
    strides = (query_row, query_head, rope_row, rope_head, index_row, index_head)
    of_heads = (softmax_max, softmax_sum, index_weights)
    results = (target, scores)
    gl.warp_specialize(
        [
            (_consume, (shared, selection, of_heads, results, scale_2, GROUP, INDEX_GROUP, TOP_K, 0)),
            (_consume, (shared, selection, of_heads, results, scale_2, GROUP, INDEX_GROUP, TOP_K, 1)),
            (_produce, (shared, selection, inputs, strides, GROUP, INDEX_GROUP, TOP_K)),
        ],
        [4, 4],
        [CONSUMER_REGISTERS, PRODUCER_REGISTERS],
    )


@gluon.jit
def _tile(tile, entries, tokens):
    """Return a tile's row, and its number of key blocks. The last rows come first, because they have the most keys."""
    row = tokens - 1 - tile
    return row, (gl.load(entries + row) + BLOCK_KEYS - 1) // BLOCK_KEYS


@gluon.jit
def _produce(shared, selection, inputs, strides, GROUP: gl.constexpr, INDEX_GROUP: gl.constexpr, TOP_K: gl.constexpr):
    """Copy the queries of each tile, and its selected keys in pieces of 64 columns."""
    q, q_index, k, bars = shared
    indices, first_key, visible_keys, entries, tokens = selection
    query, query_rope, query_index, key, key_rope, key_index = inputs
    query_row, query_head, rope_row, rope_head, index_row, index_head = strides
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])  # a thread copies 16 bytes of a row
    columns = gl.arange(0, PIECE, layout=gl.SliceLayout(0, layout))[None, :]
    in_heads = gl.arange(0, HEADS, layout=gl.SliceLayout(1, layout))
    in_half = gl.arange(0, HALF_KEYS, layout=gl.SliceLayout(1, layout))  # also the heads of the indexer

    used = 0  # pieces that went through the slots
    for tile in range(gl.program_id(0), tokens, gl.num_programs(0)):
        row, blocks = _tile(tile, entries, tokens)
        turn = tile // gl.num_programs(0)
        first, visible = gl.load(first_key + row), gl.load(visible_keys + row)
        of_row = row.to(gl.int64)
        selected = indices + of_row * TOP_K

        mbarrier.wait(bars.index(QUERY_FREE), (turn & 1) ^ 1)
        heads = in_heads.to(gl.int64)[:, None]  # 64 bits: times a stride it may be large
        real = (in_heads < GROUP)[:, None]
        queries = query + of_row * query_row + (heads * query_head + columns)
        for piece in gl.static_range(PIECES):
            async_copy.async_copy_global_to_shared(q.index(piece), queries + piece * PIECE, real)
        ropes = query_rope + of_row * rope_row + (heads * rope_head + columns)
        async_copy.async_copy_global_to_shared(q.index(PIECES), ropes, real)
        index_heads = in_half.to(gl.int64)[:, None]
        index_queries = query_index + of_row * index_row + (index_heads * index_head + columns)
        real_index = (in_half < INDEX_GROUP)[:, None]
        for piece in gl.static_range(2):
            async_copy.async_copy_global_to_shared(q_index.index(piece), index_queries + piece * PIECE, real_index)
        async_copy.mbarrier_arrive(bars.index(QUERY_FULL), increment_count=False)

        for block in range(0, blocks):
            at = block * BLOCK_KEYS + in_half
            key_0, there_0 = keys_of(selected, at, first, visible, 0, 1, TOP_K)
            key_1, there_1 = keys_of(selected, at + HALF_KEYS, first, visible, 0, 1, TOP_K)
            key_0, there_0, key_1, there_1 = key_0[:, None], there_0[:, None], key_1[:, None], there_1[:, None]
            for piece in gl.static_range(ALL_PIECES):
                slot = (used + piece) % SLOTS
                mbarrier.wait(bars.index(FREE + slot), (((used + piece) // SLOTS) & 1) ^ 1)
                if piece < PIECES:
                    from_0 = key + (key_0 * SIZE + (piece * PIECE + columns))
                    from_1 = key + (key_1 * SIZE + (piece * PIECE + columns))
                elif piece == PIECES:
                    from_0 = key_rope + (key_0 * ROPE + columns)
                    from_1 = key_rope + (key_1 * ROPE + columns)
                else:
                    from_0 = key_index + (key_0 * INDEX_SIZE + ((piece - PIECES - 1) * PIECE + columns))
                    from_1 = key_index + (key_1 * INDEX_SIZE + ((piece - PIECES - 1) * PIECE + columns))
                async_copy.async_copy_global_to_shared(k.index(2 * slot), from_0, there_0)
                async_copy.async_copy_global_to_shared(k.index(2 * slot + 1), from_1, there_1)
                async_copy.mbarrier_arrive(bars.index(FULL + slot), increment_count=False)
            used += ALL_PIECES


@gluon.jit
def _consume(
    shared,
    selection,
    of_heads,
    results,
    scale_2,
    GROUP: gl.constexpr,
    INDEX_GROUP: gl.constexpr,
    TOP_K: gl.constexpr,
    W: gl.constexpr,
):
    """Compute both distributions for half of the keys of each block."""
    q, q_index, k, bars = shared
    indices, _, visible_keys, entries, tokens = selection
    softmax_max, softmax_sum, index_weights = of_heads
    target, scores = results
    wide: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 128, 16])
    narrow: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 16])
    heads = gl.arange(0, HEADS, layout=gl.SliceLayout(0, wide))
    index_heads = gl.arange(0, INDEX_HEADS, layout=gl.SliceLayout(0, narrow))
    in_half = gl.arange(0, HALF_KEYS, layout=gl.SliceLayout(1, wide))

    used = 0  # pieces of the tiles and blocks before
    for tile in range(gl.program_id(0), tokens, gl.num_programs(0)):
        row, blocks = _tile(tile, entries, tokens)
        turn = tile // gl.num_programs(0)
        of_row = row.to(gl.int64)
        selected = indices + of_row * TOP_K
        visible = gl.load(visible_keys + row)
        highest = gl.load(softmax_max + of_row * GROUP + heads, mask=heads < GROUP, other=float("inf"))
        total = gl.load(softmax_sum + of_row * GROUP + heads, mask=heads < GROUP, other=1.0)
        offset = highest * LOG2_E + gl.log2(total)
        of_index = gl.load(
            index_weights + of_row * INDEX_GROUP + index_heads, mask=index_heads < INDEX_GROUP, other=0.0
        )
        of_index = of_index.to(gl.float32)

        mbarrier.wait(bars.index(QUERY_FULL), turn & 1)
        mbarrier.arrive(bars.index(QUERY_FREE), pred=blocks == 0)
        for block in range(0, blocks):
            # A zero that the compiler cannot know. Otherwise it keeps the descriptors of the pieces in registers.
            zero = used >> 30
            logits = gl.zeros([HALF_KEYS, HEADS], gl.float32, wide)
            index_logits = gl.zeros([HALF_KEYS, INDEX_HEADS], gl.float32, narrow)
            for piece in gl.static_range(ALL_PIECES):
                slot = (used + piece) % SLOTS
                mbarrier.wait(bars.index(FULL + slot), ((used + piece) // SLOTS) & 1)
                fence_async_shared()
                keys = k.index(2 * slot + W)
                if piece <= PIECES:
                    queries = q.index(piece + zero).permute((1, 0))
                    logits = warpgroup_mma(keys, queries, logits, use_acc=piece > 0, is_async=True)
                else:
                    queries = q_index.index(piece - PIECES - 1 + zero).permute((1, 0))
                    index_logits = warpgroup_mma(keys, queries, index_logits, use_acc=piece > PIECES + 1, is_async=True)
                if piece > 0:
                    logits, index_logits = warpgroup_mma_wait(1, deps=[logits, index_logits])
                    mbarrier.arrive(bars.index(FREE + (used + piece - 1) % SLOTS))
            logits, index_logits = warpgroup_mma_wait(0, deps=[logits, index_logits])
            mbarrier.arrive(bars.index(FREE + (used + ALL_PIECES - 1) % SLOTS))
            mbarrier.arrive(bars.index(QUERY_FREE), pred=block + 1 >= blocks)
            used += ALL_PIECES

            at = block * BLOCK_KEYS + W * HALF_KEYS + in_half
            there = keys_of(selected, at, 0, visible, 0, 1, TOP_K)[1]
            mass = gl.sum(gl.exp2(logits * scale_2 - offset[None, :]), 1)
            gl.store(target + of_row * TOP_K + at, mass, mask=there)
            relu = gl.where(index_logits < 0, 0.0, index_logits)  # NaN stays
            score = gl.convert_layout(gl.sum(relu * of_index[None, :], 1), gl.SliceLayout(1, wide), assert_trivial=True)
            gl.store(scores + of_row * TOP_K + at, score, mask=there)
