"""The gradients of the lightning indexer's selected scores on Hopper GPUs, in Gluon: two warp groups per program.

A program processes two neighbouring rows, whose queries stay in shared memory. Keys come in blocks of 64, in two slots:
even steps in slot 0, odd steps in slot 1. One warp group copies them, their indices and the gradients of their scores.
The other one multiplies, and adds the products to the keys' gradients by atomic additions. Two programs share a
multiprocessor, so that one multiplies while the other adds: 512 bytes for each selected key, the most expensive part.

Where two neighbouring rows selected the same 64 keys, a *common* block, their key gradients are summed in registers
and added by one atomic addition.
Another kernel counts these blocks before, for up to :data:`WORKSPACE` entries at a time. If it makes more blocks
common, it copies the selections of both rows, with the keys that both selected first, in the same order. Rows that
select all keys they see have them at the same entries already.

The gradient of a logit is that of the score times the weight of the head, or 0. Products take it without the weight:
its factor is in the queries for the keys' gradients, and is multiplied last for those of the queries. So a query times
its gradient without the weight is the gradient of the weight.
"""

from __future__ import annotations

from typing import Any

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

from torchtitan_npu.gpu_kernels.launch import blocks_in, part_of, uninitialized
from torchtitan_npu.gpu_kernels.lightning_indexer import triton_grad
from torchtitan_npu.gpu_kernels.lightning_indexer.gluon_pairs import KEYS, MOST_ENTRIES, load_rows, plan_pairs
from torchtitan_npu.gpu_kernels.sparse_flash_attention.gluon_tiles import aligned
from torchtitan_npu.gpu_kernels.sparse_flash_attention.triton_rows import Rows
from torchtitan_npu.gpu_kernels.sparse_flash_attention.triton_tiles import check_size

HEADS = gl.constexpr(64)
SIZE = gl.constexpr(128)
REGISTERS = {"PRODUCER_REGISTERS": 24, "maxnreg": 128}
"""Registers per thread of the producer, and of both warp groups on average.

With 128, two programs share a multiprocessor, if each has at most 115712 bytes of shared memory.
"""
WORKSPACE = 2**25
"""Entries that are copied at once: 192 MiB.

Each launch ends with idle multiprocessors. With half of this size, they cost more than the copies save for random
selections of 32768 tokens.
"""
# indices of barriers, each with one per slot
FULL = gl.constexpr(0)
FREE = gl.constexpr(2)


def npu_lightning_indexer_grad(**arguments: Any) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients as the Triton kernel does. Takes what :func:`gradients` takes."""
    return triton_grad.of_operator(gradients, **arguments)


def gradients(
    query: Tensor, key: Tensor, weights: Tensor, sparse_indices: Tensor, d_scores: Tensor, rows: Rows
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients as the Triton function does, for half precision, at most 64 heads of 128, and one key head.

    Before a product, ``d_scores`` and the queries times their weights are rounded to the dtype of ``query``. All sums
    are in float32, in any order. The number of entries is even.
    """
    check_size(key, None)
    # rounded here, because the kernel would spill registers with float32
    tensors = (query, key, weights, sparse_indices, d_scores.to(query.dtype))
    q, k, w, indices, dy = (t.contiguous() for t in tensors)
    d_query, d_weights = torch.empty_like(q), torch.empty_like(w)
    d_key = torch.zeros_like(k, dtype=torch.float32)
    k = aligned(k)
    dy = dy if dy.data_ptr() % 16 == 0 else dy.clone()  # otherwise Triton would copy single elements of 2 bytes
    tokens, top_k = rows.first.numel(), indices.shape[-1]
    # rows that see at most top_k keys have them at the same entries already
    may_copy = top_k < key.shape[-3] and top_k <= MOST_ENTRIES
    # a multiple of 16 rows: pairs stay together, and pointers aligned
    step = max(16, WORKSPACE // top_k // 16 * 16) if may_copy else max(1, tokens)
    held = min(step, tokens)
    shape = (held, top_k)
    copies = (indices.new_empty(shape), uninitialized(shape, dy.dtype, dy.device)) if may_copy else None
    plan = indices.new_empty(blocks_in(held, 2), 4)
    for start in range(0, tokens, step):
        part = (tokens, start, min(step, tokens - start))
        its = Rows(part_of(rows.first, *part), part_of(rows.visible, *part))
        selected = part_of(indices, *part), part_of(dy, *part)
        plan_pairs(*selected, its, plan, copies)
        _gradients[(blocks_in(part[2], 2),)](
            *(part_of(q, *part), k, part_of(w, *part), *selected, *(copies or selected), plan, *its),
            *(part_of(d_query, *part), d_key, part_of(d_weights, *part), part[2]),
            GROUP=query.shape[-2],
            TOP_K=top_k,
            **REGISTERS,
            num_warps=4,
        )
    return d_query, d_key.to(key.dtype), d_weights


@gluon.jit
def _gradients(
    query,
    key,
    weights,
    indices,
    d_scores,
    copied_indices,
    copied_d_scores,
    plan,
    first_key,
    visible_keys,
    d_query,
    d_key,
    d_weights,
    tokens,
    GROUP: gl.constexpr,
    TOP_K: gl.constexpr,
    PRODUCER_REGISTERS: gl.constexpr,
):
    """Process the selected keys of row 0 of this program, and of row 1, which is the row before it.

    A step is a block of keys: the common blocks, the other blocks of row 0, those of row 1. The last rows of all come
    first, because they have the most keys.
    """
    dtype: gl.constexpr = key.dtype.element_ty
    layout: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
    q = gl.allocate_shared_memory(dtype, [2, HEADS, SIZE], layout)
    wq = gl.allocate_shared_memory(dtype, [2, HEADS, SIZE], layout)
    k = gl.allocate_shared_memory(dtype, [2, KEYS, SIZE], layout)
    d_logits = gl.allocate_shared_memory(dtype, [2, KEYS, HEADS], layout)
    vector: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, order=[0])
    index = gl.allocate_shared_memory(gl.int32, [2, KEYS], vector)
    dy = gl.allocate_shared_memory(dtype, [2, KEYS], vector)
    bars = gl.allocate_shared_memory(gl.int64, [4, 1], mbarrier.MBarrierLayout())
    for slot in gl.static_range(2):
        mbarrier.init(bars.index(FULL + slot), count=128)  # threads of the producer
        mbarrier.init(bars.index(FREE + slot), count=1)
    fence_async_shared()

    row_0 = tokens - 1 - 2 * gl.program_id(0)
    # Another kernel counts the blocks: with Triton 3.6, a kernel with a reduction before warp_specialize may hang,
    # see reads_before_warp_groups in tools/kernel_memory.py.
    of_pair = plan + 4 * gl.program_id(0)
    blocks = (gl.load(of_pair), gl.load(of_pair + 1), gl.load(of_pair + 2))
    first_0, visible_0, first_1, visible_1 = load_rows(first_key, visible_keys, row_0)
    if gl.load(of_pair + 3) > 0:
        indices = copied_indices
        d_scores = copied_d_scores
    entries = row_0.to(gl.int64) * TOP_K
    selected_0 = (indices + entries, d_scores + entries, first_0, visible_0)
    selected_1 = (indices + (entries - TOP_K), d_scores + (entries - TOP_K), first_1, visible_1)

    shared = (q, wq, k, d_logits, index, dy, bars)
    inputs = (query, weights, row_0)
    results = (d_query, d_key, d_weights)
    gl.warp_specialize(
        [
            (_consume, (shared, selected_0, selected_1, blocks, inputs, results, GROUP, TOP_K)),
            (_produce, (shared, selected_0, selected_1, blocks, key, TOP_K)),
        ],
        [4],
        [PRODUCER_REGISTERS],
    )


@gluon.jit
def _keys_of_block(selected, block, in_block, TOP_K: gl.constexpr):
    """Return the keys of a block in their document, and which entries hold a key."""
    indices, _, _, visible = selected
    index = _load(indices, block, in_block, -1, TOP_K)
    return index, (index >= 0) & (index < visible)


@gluon.jit
def _load(of_row, block, in_block, other, TOP_K: gl.constexpr):
    """Load values of a block's entries, or ``other`` after the last one."""
    if TOP_K % KEYS == 0:
        return gl.load(of_row + block * KEYS + in_block)
    else:
        return gl.load(of_row + block * KEYS + in_block, mask=block * KEYS + in_block < TOP_K, other=other)


@gluon.jit
def _produce(shared, selected_0, selected_1, blocks, key, TOP_K: gl.constexpr):
    """Copy the keys of all steps, with their indices and gradients of scores, to the slots of even and odd steps."""
    common, blocks_0, blocks_1 = blocks
    _copy_blocks(shared, selected_0, key, 0, 0, blocks_0, TOP_K)
    _copy_blocks(shared, selected_1, key, blocks_0, common, blocks_1, TOP_K)


@gluon.jit
def _copy_blocks(shared, selected, key, first_step, start, end, TOP_K: gl.constexpr):
    """Copy the blocks from ``start`` to before ``end`` of a row, beginning with step ``first_step``."""
    k, index, dy, bars = shared[2], shared[4], shared[5], shared[6]
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [2, 16], [4, 1], [1, 0])  # a thread copies 16 bytes of a row
    in_block = gl.arange(0, KEYS, layout=gl.SliceLayout(1, layout))
    columns = gl.arange(0, SIZE, layout=gl.SliceLayout(0, layout))[None, :]
    entries = gl.arange(0, KEYS, layout=gl.BlockedLayout([2], [32], [4], [0]))  # a thread copies at least 4 bytes
    for block in range(start, end):
        step = first_step + (block - start)
        at_key, there = _keys_of_block(selected, block, in_block, TOP_K)
        mbarrier.wait(bars.index(FREE + step % 2), ((step // 2) & 1) ^ 1)
        keys = key + selected[2] * SIZE + (at_key[:, None] * SIZE + columns)
        async_copy.async_copy_global_to_shared(k.index(step % 2), keys, there[:, None])
        at = block * KEYS + entries
        async_copy.async_copy_global_to_shared(index.index(step % 2), selected[0] + at, at < TOP_K)
        async_copy.async_copy_global_to_shared(dy.index(step % 2), selected[1] + at, at < TOP_K)
        async_copy.mbarrier_arrive(bars.index(FULL + step % 2), increment_count=False)


@gluon.jit
def _consume(shared, selected_0, selected_1, blocks, inputs, results, GROUP: gl.constexpr, TOP_K: gl.constexpr):
    """Multiply, and add to the gradients of the keys."""
    q, wq, k, d_logits, _, _, bars = shared
    common, blocks_0, blocks_1 = blocks
    query, weights, last = inputs
    d_query, d_key, d_weights = results
    narrow: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 16])
    wide: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 128, 16])
    row_0 = last.to(gl.int64)
    row_1 = row_0 - 1
    _load_queries(query, weights, row_0, blocks_0, q.index(0), wq.index(0), GROUP)
    _load_queries(query, weights, row_1, blocks_1, q.index(1), wq.index(1), GROUP)
    fence_async_shared()
    dq_0 = gl.zeros([HEADS, SIZE], gl.float32, wide)
    dq_1 = gl.zeros([HEADS, SIZE], gl.float32, wide)
    for step in range(0, common):
        dy_1 = _d_scores_of_row_1(selected_1, step, TOP_K)
        # A zero that the compiler cannot know. Otherwise it keeps descriptors of shared memory in registers.
        zero = step >> 30
        mbarrier.wait(bars.index(FULL + step % 2), (step // 2) & 1)
        fence_async_shared()
        keys = k.index(step % 2)
        dy_0 = _d_scores_in_slot(shared, step, selected_0, step, TOP_K)
        logits_0 = gl.zeros([KEYS, HEADS], gl.float32, narrow)
        logits_1 = gl.zeros([KEYS, HEADS], gl.float32, narrow)
        logits_0 = warpgroup_mma(keys, q.index(zero).permute((1, 0)), logits_0, use_acc=False, is_async=True)
        logits_1 = warpgroup_mma(keys, q.index(1 + zero).permute((1, 0)), logits_1, use_acc=False, is_async=True)
        logits_0, logits_1 = warpgroup_mma_wait(1, deps=[logits_0, logits_1])
        d_logits.index(zero).store(gl.where(logits_0 > 0, dy_0[:, None], 0.0).to(q.dtype))
        logits_1 = warpgroup_mma_wait(0, deps=[logits_1])
        d_logits.index(1 + zero).store(gl.where(logits_1 > 0, dy_1[:, None], 0.0).to(q.dtype))
        fence_async_shared()
        left_0, right_0 = wq.index(zero).permute((1, 0)), d_logits.index(zero).permute((1, 0))
        left_1, right_1 = wq.index(1 + zero).permute((1, 0)), d_logits.index(1 + zero).permute((1, 0))
        dk = gl.zeros([SIZE, KEYS], gl.float32, narrow)
        dk = warpgroup_mma(left_0, right_0, dk, use_acc=False, is_async=True)
        dk = warpgroup_mma(left_1, right_1, dk, is_async=True)
        dq_0 = warpgroup_mma(right_0, keys, dq_0, is_async=True)
        dq_1 = warpgroup_mma(right_1, keys, dq_1, is_async=True)
        dk, dq_0, dq_1 = warpgroup_mma_wait(2, deps=[dk, dq_0, dq_1])
        _add(dk, shared, step, selected_0, step, d_key, TOP_K)
        dq_0, dq_1 = warpgroup_mma_wait(0, deps=[dq_0, dq_1])
        mbarrier.arrive(bars.index(FREE + step % 2))
    dq_0 = _one_row(dq_0, common, common, blocks_0, selected_0, d_key, shared, TOP_K, 0)
    # plus a zero, so that no pointers stay in registers from the beginning
    _store(dq_0, q.index(0), weights, row_0 + (blocks_0 >> 30), d_query, d_weights, GROUP)
    dq_1 = _one_row(dq_1, blocks_0, common, blocks_1, selected_1, d_key, shared, TOP_K, 1)
    _store(dq_1, q.index(1), weights, row_1, d_query, d_weights, GROUP)


@gluon.jit
def _load_queries(query, weights, row, blocks, q, wq, GROUP: gl.constexpr):
    """Load the queries of a row to ``q``, and their products with the weights to ``wq``. Without keys, both are 0.

    The columns of ``wq`` are rows of the accumulator of the keys' gradients. Their order is that of :func:`_add`.
    """
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [2, 16], [4, 1], [1, 0])
    heads = gl.arange(0, HEADS, layout=gl.SliceLayout(1, layout))
    columns = gl.arange(0, SIZE, layout=gl.SliceLayout(0, layout))[None, :]
    real = (heads < GROUP) & (blocks > 0)
    queries = gl.load(query + row * (GROUP * SIZE) + (heads[:, None] * SIZE + columns), mask=real[:, None], other=0.0)
    weight = gl.load(weights + row * GROUP + heads, mask=real, other=0.0).to(gl.float32)
    q.store(queries)
    weighted = (queries.to(gl.float32) * weight[:, None]).to(q.dtype)
    wq.store(weighted.reshape([HEADS, 4, 8, 2, 2]).permute((0, 3, 1, 4, 2)).reshape([HEADS, SIZE]))


@gluon.jit
def _d_scores_of_row_1(selected, block, TOP_K: gl.constexpr):
    """Load the gradients of row 1's scores in a common block, 0 at entries without a key.

    The slot of a common block has only those of row 0.
    """
    narrow: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 16])
    in_block = gl.arange(0, KEYS, layout=gl.SliceLayout(1, narrow))
    there = _keys_of_block(selected, block, in_block, TOP_K)[1]
    return gl.where(there, _load(selected[1], block, in_block, 0.0, TOP_K).to(gl.float32), 0.0)


@gluon.jit
def _d_scores_in_slot(shared, step, selected, block, TOP_K: gl.constexpr):
    """Return the gradients of a block's scores in the slot of ``step``, 0 at entries without a key."""
    narrow: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 16])
    there = _keys_in_slot(shared, step, selected, block, gl.SliceLayout(1, narrow), TOP_K)[1]
    return gl.where(there, shared[5].index(step % 2).load(gl.SliceLayout(1, narrow)).to(gl.float32), 0.0)


@gluon.jit
def _keys_in_slot(shared, step, selected, block, layout: gl.constexpr, TOP_K: gl.constexpr):
    """Return the keys in the slot of ``step``, and which entries of the block hold a key."""
    index = shared[4].index(step % 2).load(layout)
    there = (index >= 0) & (index < selected[3])
    if TOP_K % KEYS:
        there = there & (block * KEYS + gl.arange(0, KEYS, layout=layout) < TOP_K)
    return index, there


@gluon.jit
def _one_row(dq, first_step, start, end, selected, d_key, shared, TOP_K: gl.constexpr, R: gl.constexpr):
    """Process the blocks from ``start`` to before ``end`` for row ``R`` only. Return the gradient of its queries."""
    q, wq, k, d_logits, _, _, bars = shared
    narrow: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 16])
    block = start + 0  # computed from the step, it would take more registers
    for step in range(first_step, first_step + (end - start)):
        zero = step >> 30
        mbarrier.wait(bars.index(FULL + step % 2), (step // 2) & 1)
        fence_async_shared()
        keys = k.index(step % 2)
        dy = _d_scores_in_slot(shared, step, selected, block, TOP_K)
        logits = gl.zeros([KEYS, HEADS], gl.float32, narrow)
        logits = warpgroup_mma(keys, q.index(R + zero).permute((1, 0)), logits, use_acc=False, is_async=True)
        logits = warpgroup_mma_wait(0, deps=[logits])
        d_logits.index(R + zero).store(gl.where(logits > 0, dy[:, None], 0.0).to(q.dtype))
        fence_async_shared()
        right = d_logits.index(R + zero).permute((1, 0))
        dk = gl.zeros([SIZE, KEYS], gl.float32, narrow)
        dk = warpgroup_mma(wq.index(R + zero).permute((1, 0)), right, dk, use_acc=False, is_async=True)
        dq = warpgroup_mma(right, keys, dq, is_async=True)
        dk, dq = warpgroup_mma_wait(1, deps=[dk, dq])
        _add(dk, shared, step, selected, block, d_key, TOP_K)
        dq = warpgroup_mma_wait(0, deps=[dq])
        mbarrier.arrive(bars.index(FREE + step % 2))
        block += 1
    return dq


@gluon.jit
def _add(dk, shared, step, selected, block, d_key, TOP_K: gl.constexpr):
    """Add to the gradients of a block's keys. ``dk`` is transposed, its rows in the order of the columns of ``wq``.

    A thread has rows n, n + 8, n + 64 and n + 72 of an accumulator. They are adjacent columns of a key, and 8 threads
    of a warp have 32: additions of 128 adjacent bytes are the fastest, and no thread needs results of another one.
    """
    added: gl.constexpr = gl.DistributedLinearLayout(
        reg_bases=[[0, 1], [0, 2], [1, 0], [8, 0], [16, 0], [32, 0]],
        lane_bases=[[2, 0], [4, 0], [0, 4], [0, 8], [0, 16]],
        warp_bases=[[0, 32], [0, 64]],
        block_bases=[],
        shape=[64, 128],
    )
    dk = dk.reshape([2, 4, 2, 8, KEYS]).permute((4, 1, 3, 0, 2)).reshape([KEYS, SIZE])
    dk = gl.convert_layout(dk, added, assert_trivial=True)
    to, there = _keys_in_slot(shared, step, selected, block, gl.SliceLayout(1, added), TOP_K)
    columns = gl.arange(0, SIZE, layout=gl.SliceLayout(0, added))[None, :]
    gl.atomic_add(d_key + selected[2] * SIZE + (to[:, None] * SIZE + columns), dk, mask=there[:, None], sem="relaxed")


@gluon.jit
def _store(dq, q, weights, row, d_query, d_weights, GROUP: gl.constexpr):
    """Store the gradients of a row's queries and weights. ``dq`` is without the factor of the weights."""
    layout: gl.constexpr = dq.type.layout
    heads = gl.arange(0, HEADS, layout=gl.SliceLayout(1, layout))
    columns = gl.arange(0, SIZE, layout=gl.SliceLayout(0, layout))[None, :]
    real = (heads < GROUP) & (row >= 0)
    weight = gl.load(weights + row * GROUP + heads, mask=real, other=0.0).to(gl.float32)
    to = d_query + row * (GROUP * SIZE) + (heads[:, None] * SIZE + columns)
    dq_of_row = gl.where(dq == 0, 0.0, dq * weight[:, None])  # 0 without keys, also if the weight is NaN
    gl.store(to, dq_of_row.to(d_query.dtype.element_ty), mask=real[:, None])
    dw = gl.sum(dq * q.load(layout).to(gl.float32), 1)
    gl.store(d_weights + row * GROUP + heads, dw.to(d_weights.dtype.element_ty), mask=real)
