"""Attention over selected keys in Triton: two kernels over a chunk of rows, each a product for all heads of a row.

1. ``_score`` writes the exponentials of the scores, (rows, heads, top-k), to a workspace of bounded size. They are
   relative to an origin near the highest score of their block of keys. Most blocks of a head share an origin.
2. ``_average`` multiplies them with the values.

Both read keys in place, a block at a time: nothing is gathered in memory. A single kernel that keeps a row's average in
registers has room for only half of the heads, and Triton then makes all warps compute the same scores.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from torchtitan_npu.gpu_kernels.launch import LOG2_E, blocks_in, power_of_2, uninitialized
from torchtitan_npu.gpu_kernels.sparse_flash_attention.triton_rows import count_of, keys_at, rows_of
from torchtitan_npu.gpu_kernels.sparse_flash_attention.triton_tiles import (
    WORKSPACE,
    blocks_of,
    by_token,
    check_size,
    offset_of_products,
    offset_of_scores,
    product_shape,
    score_blocks,
    score_grid,
    shape_of,
    tile,
)
from torchtitan_npu.ops.sparse_flash_attention.checks import statistics_shape

SCORES = {"BLOCK_KEYS": 128, "BLOCK_COLUMNS": 64, "num_warps": 4, "num_stages": 3}
VALUES = {"BLOCK_KEYS": 64, "BLOCK_COLUMNS": 128, "num_warps": 4, "num_stages": 5}
"""Launch options of the two kernels, the fastest on an H200, where two programs of either share a multiprocessor.
BLOCK_KEYS of VALUES divides that of SCORES."""


def npu_sparse_flash_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor | None,
    sparse_indices: Tensor,
    scale_value: float,
    actual_seq_lengths_query: Tensor | None,
    actual_seq_lengths_kv: Tensor | None,
    query_rope: Tensor | None,
    key_rope: Tensor | None,
    layout_query: str,
    sparse_mode: int,
    return_softmax_lse: bool,
    **_: object,
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute attention as the reference does, without synchronising with the device.

    Therefore the values of the lengths are not checked, and a -1 before a key is skipped.
    """
    check_size(key, key_rope)
    rows = rows_of(layout_query, sparse_mode, query, key, actual_seq_lengths_query, actual_seq_lengths_kv)
    tokens, heads = rows.first.numel(), query.shape[-2]
    key_heads, top_k = sparse_indices.shape[-2:]
    key, sparse_indices, queries = key.contiguous(), sparse_indices.contiguous(), by_token(query)
    query_rope, key_rope = (None if t is None else t.contiguous() for t in (query_rope, key_rope))
    values = key if value is None else value.contiguous()
    out = torch.empty_like(query, memory_format=torch.contiguous_format)
    softmax_max = torch.empty(statistics_shape(query, key), dtype=torch.float32, device=query.device)
    softmax_sum = torch.empty_like(softmax_max)

    blocks = blocks_in(top_k, SCORES["BLOCK_KEYS"])
    chunk = min(tokens, max(1, WORKSPACE // (heads * top_k * query.element_size())))
    weights = uninitialized((chunk, heads, top_k), query.dtype, query.device)
    block_max, block_sum, block_sum_rounded = (
        uninitialized((chunk, heads, blocks), torch.float32, query.device) for _ in range(3)
    )
    shape = shape_of(query, query_rope, key_heads, top_k)
    products = product_shape(shape)
    coarse = query.dtype != torch.float16
    sequence = tokens if layout_query == "TND" else query.shape[1]
    entries = (sparse_indices, *rows)
    for start in range(0, tokens, chunk):
        count = min(chunk, tokens - start)
        _score[score_grid(count, shape, SCORES)](
            *(queries, query_rope, key, key_rope, *entries, weights, block_max, block_sum, block_sum_rounded),
            *(scale_value * LOG2_E.value, start, *queries.stride()[:2]),
            **shape,
            **score_blocks(shape),
            COARSE=coarse,
            **SCORES,
        )
        config, grid = blocks_of(out, count * key_heads, VALUES)
        _average[grid](
            *(weights, block_max, block_sum, block_sum_rounded, values, *entries, out, softmax_max, softmax_sum),
            *(start, count, sequence),
            **products,
            **config,
            BLOCKS=blocks,
            BLOCK_BLOCKS=power_of_2(blocks),
            SCORED_KEYS=SCORES["BLOCK_KEYS"],
            COARSE=coarse,
        )
    if not return_softmax_lse:
        return out, softmax_max.new_empty(0), softmax_sum.new_empty(0)
    return out, softmax_max, softmax_sum


@triton.jit
def origin_of(highest, COARSE: tl.constexpr):
    """Return the origin that powers of 2 with exponents up to ``highest`` are relative to.

    It is ``highest`` or, with ``COARSE``, the nearest multiple of 120. ``COARSE`` is for dtypes with the exponent range
    of float32, which are as precise at 2 ** 60 as at 1. Beyond 1e8, float32 does not represent every multiple, and
    powers may overflow.
    """
    # a single fma, so that all kernels round alike
    return 120 * tl.floor(tl.fma(highest, 1 / 120, 0.5)) if COARSE else highest


@triton.jit
def _score(
    query,
    query_rope,
    key,
    key_rope,
    indices,
    first_key,
    visible_keys,
    weights,
    block_max,
    block_sum,
    block_sum_rounded,
    scale,  # for powers of 2
    first_row,
    query_row,
    query_head,
    GROUP: tl.constexpr,
    KEY_HEADS: tl.constexpr,
    TOP_K: tl.constexpr,
    SIZE: tl.constexpr,
    ROPE: tl.constexpr,
    BLOCK_HEADS: tl.constexpr,
    BLOCK_ROPE: tl.constexpr,
    BLOCK_TOP_K: tl.constexpr,
    COARSE: tl.constexpr,
    BLOCK_KEYS: tl.constexpr,
    BLOCK_COLUMNS: tl.constexpr,
):
    """Write the exponentials relative to the block's origin, (rows of the chunk, heads, top-k).

    Also writes the highest score of the block, and the sum of the exponentials before and after rounding. Entries
    without a key are 0, except for blocks after a row's last key, which nothing reads.
    """
    in_chunk, row, key_head, in_group, first_entry, keys, there = offset_of_scores(
        indices, first_key, visible_keys, first_row, GROUP, KEY_HEADS, TOP_K, BLOCK_HEADS, BLOCK_KEYS
    )
    entries = first_entry + tl.arange(0, BLOCK_KEYS)
    real = in_group < GROUP
    of_chunk = (in_chunk * KEY_HEADS + key_head) * GROUP + in_group
    of_block = of_chunk * ((TOP_K + BLOCK_KEYS - 1) // BLOCK_KEYS) + first_entry // BLOCK_KEYS
    slots = of_chunk[:, None] * TOP_K + entries[None, :]
    in_slots = real[:, None]
    if TOP_K % BLOCK_KEYS:
        in_slots = in_slots & (entries < TOP_K)[None, :]
    if tl.max(there.to(tl.int32)) == 0:
        tl.store(block_max + of_block, tl.full((BLOCK_HEADS,), float("-inf"), tl.float32), mask=real)
        tl.store(block_sum + of_block, tl.zeros((BLOCK_HEADS,), tl.float32), mask=real)
        tl.store(block_sum_rounded + of_block, tl.zeros((BLOCK_HEADS,), tl.float32), mask=real)
        indices += (row * KEY_HEADS + key_head) * TOP_K
        count = count_of(indices, tl.load(visible_keys + row), TOP_K, BLOCK_TOP_K)
        if first_entry < count:  # keys follow in later blocks
            zeros = tl.zeros((BLOCK_HEADS, BLOCK_KEYS), weights.dtype.element_ty)
            tl.store(weights + slots, zeros, mask=in_slots)
        return
    head = (key_head * GROUP + in_group).to(tl.int64)  # 64 bits: times a stride it may be large

    scores = tl.zeros((BLOCK_HEADS, BLOCK_KEYS), tl.float32)
    for start in range(0, SIZE, BLOCK_COLUMNS):
        q = tile(query, row * query_row + head * query_head, real, start, SIZE, BLOCK_COLUMNS)
        k = tile(key, keys * SIZE, there, start, SIZE, BLOCK_COLUMNS)
        scores = tl.dot(q, tl.trans(k), scores, input_precision="ieee")
    if ROPE:
        q = tile(query_rope, (row * KEY_HEADS * GROUP + head) * ROPE, real, 0, ROPE, BLOCK_ROPE)
        k = tile(key_rope, keys * ROPE, there, 0, ROPE, BLOCK_ROPE)
        scores = tl.dot(q, tl.trans(k), scores, input_precision="ieee")

    scores = tl.where(there[None, :], scores * scale, float("-inf"))
    highest = tl.max(scores, 1)
    # -inf - -inf is NaN, so a block whose scores are all -inf subtracts 0
    origin = tl.where(highest == float("-inf"), 0.0, origin_of(highest, COARSE))
    exponentials = tl.exp2(scores - origin[:, None])
    tl.store(block_max + of_block, highest, mask=real)
    tl.store(block_sum + of_block, tl.sum(exponentials, 1), mask=real)
    rounded = exponentials.to(weights.dtype.element_ty)
    tl.store(weights + slots, rounded, mask=in_slots)
    tl.store(block_sum_rounded + of_block, tl.sum(rounded.to(tl.float32), 1), mask=real)


@triton.jit
def _average(
    weights,
    block_max,
    block_sum,
    block_sum_rounded,
    value,
    indices,
    first_key,
    visible_keys,
    out,
    softmax_max,
    softmax_sum,
    first_row,
    rows,
    sequence,
    GROUP: tl.constexpr,
    KEY_HEADS: tl.constexpr,
    TOP_K: tl.constexpr,
    BLOCK_TOP_K: tl.constexpr,
    BLOCK_GROUP: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK_COLUMNS: tl.constexpr,
    BLOCKS: tl.constexpr,
    BLOCK_BLOCKS: tl.constexpr,
    SCORED_KEYS: tl.constexpr,
    COARSE: tl.constexpr,
    BLOCK_KEYS: tl.constexpr,
):
    """Write the softmax's statistics and the weighted average of a row's values, (heads, top-k) (top-k, width).

    The average divides by the sum of the rounded weights, so that equal values average to themselves. In float16, the
    weights of blocks with different origins are rounded once more.
    """
    in_chunk, row, key_head, first_column, indices, first, visible, count = offset_of_products(
        indices, first_key, visible_keys, first_row, rows, WIDTH, KEY_HEADS, TOP_K, BLOCK_COLUMNS, BLOCK_TOP_K
    )

    group = tl.arange(0, BLOCK_GROUP)
    real = group < GROUP
    of_chunk = (in_chunk * KEY_HEADS + key_head) * GROUP + group
    blocks = tl.arange(0, BLOCK_BLOCKS)
    of_blocks = of_chunk[:, None] * BLOCKS + blocks[None, :]
    known = real[:, None] & (blocks < BLOCKS)[None, :]
    highest_of = tl.load(block_max + of_blocks, mask=known, other=float("-inf"))
    highest = tl.max(highest_of, 1)
    shift = tl.where(highest == float("-inf"), 0.0, highest)
    origins, origin = origin_of(highest_of, COARSE), origin_of(shift, COARSE)
    factors = tl.exp2(origins - origin[:, None])
    divisor = tl.sum(tl.load(block_sum_rounded + of_blocks, mask=known, other=0.0) * factors, 1)
    if first_column == 0:
        sums = tl.load(block_sum + of_blocks, mask=known, other=0.0)
        total = tl.exp2(origin - shift) * tl.sum(sums * factors, 1)
        # layout (B, N2, S, group)
        statistics = ((row // sequence * KEY_HEADS + key_head) * sequence + row % sequence) * GROUP + group
        tl.store(softmax_max + statistics, highest / LOG2_E, mask=real)
        tl.store(softmax_sum + statistics, total, mask=real)

    agree = tl.min(((origins == origin[:, None]) | (origins == float("-inf"))).to(tl.int32)) == 1
    of_row = (weights, block_max, value, indices, of_chunk, real, origin, first, visible, key_head, count, first_column)
    if agree:
        average = _sum_of_values(
            *of_row, True, COARSE, KEY_HEADS, TOP_K, WIDTH, BLOCK_COLUMNS, BLOCKS, SCORED_KEYS, BLOCK_KEYS
        )
    else:
        average = _sum_of_values(
            *of_row, False, COARSE, KEY_HEADS, TOP_K, WIDTH, BLOCK_COLUMNS, BLOCKS, SCORED_KEYS, BLOCK_KEYS
        )
    average *= (1 / tl.where(divisor == 0, 1.0, divisor))[:, None]
    columns = first_column + tl.arange(0, BLOCK_COLUMNS)
    entries = ((row * KEY_HEADS + key_head) * GROUP + group)[:, None] * WIDTH + columns[None, :]
    mask = real[:, None] & (columns < WIDTH)[None, :]
    tl.store(out + entries, average.to(out.dtype.element_ty), mask=mask)


@triton.jit
def _sum_of_values(
    weights,
    block_max,
    value,
    indices,
    of_chunk,
    real,
    origin,
    first,
    visible,
    key_head,
    count,
    first_column,
    AGREE: tl.constexpr,
    COARSE: tl.constexpr,
    KEY_HEADS: tl.constexpr,
    TOP_K: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK_COLUMNS: tl.constexpr,
    BLOCKS: tl.constexpr,
    SCORED_KEYS: tl.constexpr,
    BLOCK_KEYS: tl.constexpr,
):
    """Return the sum of a row's values times their exponentials relative to ``origin``.

    With ``AGREE``, all exponentials are already relative to ``origin`` and need no rescaling.
    """
    total = tl.zeros((of_chunk.shape[0], BLOCK_COLUMNS), tl.float32)
    for start in range(0, count, BLOCK_KEYS):
        entries = start + tl.arange(0, BLOCK_KEYS)
        keys, there = keys_at(indices, entries, count, first, visible, key_head, KEY_HEADS)
        mask = real[:, None]
        if TOP_K % BLOCK_KEYS:
            mask = mask & (entries < TOP_K)[None, :]
        w = tl.load(weights + of_chunk[:, None] * TOP_K + entries[None, :], mask=mask, other=0.0)
        v = tile(value, keys * WIDTH, there, first_column, WIDTH, BLOCK_COLUMNS)
        if not AGREE:
            highest = tl.load(block_max + of_chunk * BLOCKS + start // SCORED_KEYS, mask=real, other=float("-inf"))
            factor = tl.exp2(origin_of(highest, COARSE) - origin)
            w = (w.to(tl.float32) * factor[:, None]).to(v.dtype)
        total = tl.dot(w, v, total, input_precision="ieee")
    return total
