"""The gradient of attention over selected keys, some rows at a time, in two passes.

The first pass has a program for a row and a block of its heads, as the forward has: it makes the query's gradient, and
leaves the softmax and its gradient, (rows, heads, top-k), in a workspace of bounded size. The second adds what all
heads of a row give to its keys: it multiplies the workspace with the row's queries and output gradients, so that each
key of a row is added to once, whatever the number of heads.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from torchtitan_npu.ops.triton.rows import rows_of
from torchtitan_npu.ops.triton.segments import add_segments
from torchtitan_npu.ops.triton.sparse_flash_attention import LOG2_E, count_of, place_of, scores_of, sizes, tile

WORKSPACE = 2**29
"""Bytes of the workspace. Rows are taken as many at a time as fit."""


def npu_sparse_flash_attention_grad(
    query: Tensor,
    key: Tensor,
    value: Tensor | None,
    sparse_indices: Tensor,
    d_out: Tensor,
    out: Tensor,
    softmax_max: Tensor,
    softmax_sum: Tensor,
    scale_value: float,
    query_rope: Tensor | None,
    key_rope: Tensor | None,
    actual_seq_qlen: Tensor | None,
    actual_seq_kvlen: Tensor | None,
    layout: str,
    sparse_mode: int,
    **_: object,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """As the reference. The keys' gradients are added in float32, by atomic additions in any order; in the order of the
    rows where deterministic algorithms are asked for."""
    deterministic = torch.are_deterministic_algorithms_enabled()
    key_heads, top_k = sparse_indices.shape[-2:]
    rows = rows_of(layout, sparse_mode, query, key, actual_seq_qlen, actual_seq_kvlen)
    tokens, heads = rows.first.numel(), query.shape[-2]
    query, key, d_out, sparse_indices = (t.contiguous() for t in (query, key, d_out, sparse_indices))
    query_rope, key_rope = (None if t is None else t.contiguous() for t in (query_rope, key_rope))
    d_query = torch.empty_like(query)
    d_query_rope = query.new_empty(0) if query_rope is None else torch.empty_like(query_rope)
    d_key, d_value, d_key_rope = (
        None if tensor is None else torch.zeros(tensor.shape, dtype=torch.float32, device=tensor.device)
        for tensor in (key, value, key_rope)
    )

    d_out_out = torch.empty(query.shape[:-1], dtype=torch.float32, device=query.device)
    block = triton.next_power_of_2(query.shape[-1])
    _multiply_and_sum[(d_out_out.numel(),)](d_out, out.contiguous(), d_out_out, SIZE=query.shape[-1], BLOCK=block)

    constants = sizes(query, query_rope, key_heads, top_k)
    block_heads = min(64, max(16, triton.next_power_of_2(constants["GROUP"])))
    blocks = key_heads * triton.cdiv(constants["GROUP"], block_heads)
    widest = key_heads * top_k * query.shape[-1] * 4 if deterministic else 0
    chunk = max(1, WORKSPACE // (2 * heads * top_k * query.element_size() + widest))
    weights, d_scores = (query.new_empty(min(chunk, tokens), heads, top_k) for _ in range(2))
    contributions = query.new_empty(widest // 4 * weights.shape[0], dtype=torch.float32) if deterministic else None
    for start in range(0, tokens, chunk):
        count = min(chunk, tokens - start)
        _differentiate[(count * blocks,)](
            query,
            query if query_rope is None else query_rope,
            key,
            key if key_rope is None else key_rope,
            key if value is None else value.contiguous(),
            sparse_indices,
            rows.first,
            rows.visible,
            d_out,
            d_out_out,
            softmax_max.contiguous(),
            softmax_sum.contiguous(),
            d_query,
            d_query_rope,
            weights,
            d_scores,
            scale_value,
            scale_value * LOG2_E,
            start,
            count,
            tokens if layout == "TND" else query.shape[1],
            **constants,
            SHARED=value is None,
            BLOCK_HEADS=block_heads,
            **query_config(query.shape[-1], block_heads),
        )
        for products, target in (
            ([(d_scores, query)] + ([(weights, d_out)] if value is None else []), d_key),
            ([(d_scores, query_rope)], d_key_rope),
            ([(weights, d_out)], d_value),
        ):
            if target is None:
                continue
            width = target.shape[-1]
            block_columns = min(256, max(16, triton.next_power_of_2(width)))
            (left, right), (left_2, right_2) = products[0], products[-1]
            _add_to_keys[(count * key_heads * triton.cdiv(width, block_columns),)](
                left,
                right,
                left_2,
                right_2,
                sparse_indices,
                rows.first,
                rows.visible,
                contributions if deterministic else target,
                start,
                count,
                **{name: constants[name] for name in ("GROUP", "KEY_HEADS", "TOP_K", "BLOCK_TOP_K")},
                WIDTH=width,
                BOTH=len(products) == 2,
                ATOMIC=not deterministic,
                BLOCK_GROUP=max(16, triton.next_power_of_2(constants["GROUP"])),
                BLOCK_COLUMNS=block_columns,
                **key_config(constants["GROUP"], block_columns),
            )
            if contributions is not None:
                add_segments(contributions, sparse_indices, rows, start, count, target)
    return (
        d_query,
        *(query.new_empty(0) if t is None else t.to(query.dtype) for t in (d_key, d_value)),
        d_query_rope,
        query.new_empty(0) if d_key_rope is None else d_key_rope.to(query.dtype),
    )


def query_config(size: int, block_heads: int) -> dict[str, int]:
    """The best of those tried on an H200 (tools/bench/sparse_attention.py)."""
    return {"BLOCK_KEYS": 32, "num_warps": 8 if size * block_heads > 64 * 128 else 4, "num_stages": 3}


def key_config(group: int, block_columns: int) -> dict[str, int]:
    """The best of those tried on an H200 (tools/bench/sparse_attention.py)."""
    return {"BLOCK_KEYS": 64, "num_warps": 8 if block_columns > 64 else 4, "num_stages": 2}


@triton.jit
def _multiply_and_sum(left, right, total, SIZE: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    a = tl.load(left + row * SIZE + columns, mask=columns < SIZE, other=0.0)
    b = tl.load(right + row * SIZE + columns, mask=columns < SIZE, other=0.0)
    tl.store(total + row, tl.sum(a.to(tl.float32) * b.to(tl.float32)))


@triton.jit
def _differentiate(
    query,
    query_rope,
    key,
    key_rope,
    value,
    indices,
    first_key,
    visible_keys,
    d_out,
    d_out_out,
    softmax_max,
    softmax_sum,
    d_query,
    d_query_rope,
    weights,
    d_scores,
    scale,
    scale_2,  # for powers of 2
    first_row,
    rows,
    sequence,
    GROUP: tl.constexpr,
    KEY_HEADS: tl.constexpr,
    TOP_K: tl.constexpr,
    BLOCK_TOP_K: tl.constexpr,
    SIZE: tl.constexpr,
    ROPE: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_ROPE: tl.constexpr,
    SHARED: tl.constexpr,
    BLOCK_HEADS: tl.constexpr,
    BLOCK_KEYS: tl.constexpr,
):
    in_chunk, key_head, first_head = place_of(rows, GROUP, KEY_HEADS, BLOCK_HEADS)
    row = first_row + in_chunk
    first = tl.load(first_key + row)
    visible = tl.load(visible_keys + row)
    indices += (row * KEY_HEADS + key_head) * TOP_K
    count = tl.where(visible > 0, count_of(indices, TOP_K, BLOCK_TOP_K), 0)

    in_group = first_head + tl.arange(0, BLOCK_HEADS)
    real = in_group < GROUP
    heads = (row * KEY_HEADS + key_head) * GROUP + in_group
    kept = ((in_chunk * KEY_HEADS + key_head) * GROUP + in_group)[:, None] * TOP_K
    q = tile(query, heads, real, SIZE, SIZE, BLOCK_SIZE)
    q_rope = tile(query_rope, heads, real, ROPE, ROPE, BLOCK_ROPE)
    do = tile(d_out, heads, real, SIZE, SIZE, BLOCK_SIZE)
    delta = tl.load(d_out_out + heads, mask=real, other=0.0)
    statistics = ((row // sequence * KEY_HEADS + key_head) * sequence + row % sequence) * GROUP + in_group
    highest = tl.load(softmax_max + statistics, mask=real, other=0.0) * 1.4426950408889634
    total = tl.load(softmax_sum + statistics, mask=real, other=1.0)

    dq = tl.zeros((BLOCK_HEADS, BLOCK_SIZE), tl.float32)
    dq_rope = tl.zeros((BLOCK_HEADS, BLOCK_ROPE), tl.float32)
    for start in range(0, count, BLOCK_KEYS):
        places = start + tl.arange(0, BLOCK_KEYS)
        index = tl.load(indices + places, mask=places < count, other=-1)
        there = (index >= 0) & (index < visible)
        keys = (first + index) * KEY_HEADS + key_head
        k = tile(key, keys, there, SIZE, SIZE, BLOCK_SIZE)
        k_rope = tile(key_rope, keys, there, ROPE, ROPE, BLOCK_ROPE)
        scores = scores_of(q, q_rope, k, k_rope, ROPE) * scale_2
        p = tl.where(there[None, :], tl.exp2(scores - highest[:, None]) / total[:, None], 0.0)
        v = k if SHARED else tile(value, keys, there, SIZE, SIZE, BLOCK_SIZE)
        dp = tl.dot(do, tl.trans(v), input_precision="ieee")
        ds = (p * (dp - delta[:, None]) * scale).to(k.dtype)
        mask = real[:, None]
        if TOP_K % BLOCK_KEYS:
            mask = mask & (places < TOP_K)[None, :]
        tl.store(weights + kept + places[None, :], p.to(k.dtype), mask=mask)
        tl.store(d_scores + kept + places[None, :], ds, mask=mask)
        dq = tl.dot(ds, k, dq, input_precision="ieee")
        if ROPE:
            dq_rope = tl.dot(ds, k_rope, dq_rope, input_precision="ieee")

    columns = tl.arange(0, BLOCK_SIZE)
    mask = real[:, None] & (columns < SIZE)[None, :]
    tl.store(d_query + heads[:, None] * SIZE + columns[None, :], dq.to(d_query.dtype.element_ty), mask=mask)
    if ROPE:
        columns = tl.arange(0, BLOCK_ROPE)
        mask = real[:, None] & (columns < ROPE)[None, :]
        tl.store(
            d_query_rope + heads[:, None] * ROPE + columns[None, :], dq_rope.to(d_query.dtype.element_ty), mask=mask
        )


@triton.jit
def _add_to_keys(
    left,
    right,
    left_2,
    right_2,
    indices,
    first_key,
    visible_keys,
    target,
    first_row,
    rows,
    GROUP: tl.constexpr,
    KEY_HEADS: tl.constexpr,
    TOP_K: tl.constexpr,
    BLOCK_TOP_K: tl.constexpr,
    WIDTH: tl.constexpr,
    BOTH: tl.constexpr,
    ATOMIC: tl.constexpr,
    BLOCK_GROUP: tl.constexpr,
    BLOCK_COLUMNS: tl.constexpr,
    BLOCK_KEYS: tl.constexpr,
):
    """target[keys of a row] += leftᵀ right (+ left_2ᵀ right_2), (top-k, heads) (heads, width); one program for a row
    and some columns. ``left`` holds the rows of this chunk, ``right`` all. Not ``ATOMIC``: (rows, top-k, width)."""
    in_chunk, key_head, first_column = place_of(rows, WIDTH, KEY_HEADS, BLOCK_COLUMNS)
    row = first_row + in_chunk
    first = tl.load(first_key + row)
    visible = tl.load(visible_keys + row)
    indices += (row * KEY_HEADS + key_head) * TOP_K
    count = tl.where(visible > 0, count_of(indices, TOP_K, BLOCK_TOP_K), 0)

    group = tl.arange(0, BLOCK_GROUP)
    columns = first_column + tl.arange(0, BLOCK_COLUMNS)
    of_right = (row * KEY_HEADS + key_head) * GROUP * WIDTH + group[:, None] * WIDTH + columns[None, :]
    of_left = (in_chunk * KEY_HEADS + key_head) * GROUP * TOP_K + group[:, None] * TOP_K
    real = (group < GROUP)[:, None] & (columns < WIDTH)[None, :]
    r = tl.load(right + of_right, mask=real, other=0.0)
    r_2 = r
    if BOTH:
        r_2 = tl.load(right_2 + of_right, mask=real, other=0.0)
    for start in range(0, count, BLOCK_KEYS):
        places = start + tl.arange(0, BLOCK_KEYS)
        index = tl.load(indices + places, mask=places < count, other=-1)
        there = (index >= 0) & (index < visible)
        # what lies in a place without a key, even if it is not a number, stays in that place's row, which is not added
        mask = (group < GROUP)[:, None]
        if TOP_K % BLOCK_KEYS:
            mask = mask & (places < TOP_K)[None, :]
        w = tl.load(left + of_left + places[None, :], mask=mask, other=0.0)
        part = tl.dot(tl.trans(w), r, input_precision="ieee")
        if BOTH:
            w = tl.load(left_2 + of_left + places[None, :], mask=mask, other=0.0)
            part = tl.dot(tl.trans(w), r_2, part, input_precision="ieee")
        mask = there[:, None] & (columns < WIDTH)[None, :]
        if ATOMIC:
            keys = (first + index) * KEY_HEADS + key_head
            tl.atomic_add(target + keys[:, None] * WIDTH + columns[None, :], part, mask=mask, sem="relaxed")
        else:
            slots = (in_chunk * KEY_HEADS + key_head) * TOP_K + places
            tl.store(target + slots[:, None] * WIDTH + columns[None, :], part, mask=mask)
