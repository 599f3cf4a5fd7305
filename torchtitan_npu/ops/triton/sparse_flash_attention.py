"""Attention over selected keys: a program takes one query row and a block of its heads, and walks over the row's keys.

Keys are read where they lie, a block at a time: nothing is gathered in memory. Where keys and values are one tensor, a
block is read once for both.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from torchtitan_npu.ops.selection import statistics_shape
from torchtitan_npu.ops.triton.rows import rows_of

LOG2_E = 1.4426950408889634


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
    """As the reference, but nothing waits for the device: a -1 before a key and lengths that do not fit the tokens are
    not looked for."""
    *_, heads, size = query.shape
    key_heads, top_k = sparse_indices.shape[-2:]
    rows = rows_of(layout_query, sparse_mode, query, key, actual_seq_lengths_query, actual_seq_lengths_kv)
    out = torch.empty(query.shape, dtype=query.dtype, device=query.device)
    softmax_max, softmax_sum = (
        torch.empty(statistics_shape(query, key), dtype=torch.float32, device=query.device) for _ in range(2)
    )
    shared = value is None or (value.data_ptr() == key.data_ptr() and value.stride() == key.stride())
    group = heads // key_heads
    block_heads = min(64, max(16, triton.next_power_of_2(group)))
    tokens = rows.first.numel()
    _attend[(tokens * key_heads * triton.cdiv(group, block_heads),)](
        query.contiguous(),
        query if query_rope is None else query_rope.contiguous(),
        key.contiguous(),
        key if key_rope is None else key_rope.contiguous(),
        key if value is None or shared else value.contiguous(),
        sparse_indices.contiguous(),
        rows.first,
        rows.visible,
        out,
        softmax_max,
        softmax_sum,
        scale_value * LOG2_E,
        tokens,
        tokens if layout_query == "TND" else query.shape[1],
        **sizes(query, query_rope, key_heads, top_k),
        SHARED=shared,
        BLOCK_HEADS=block_heads,
        **forward_config(size, block_heads),
    )
    if not return_softmax_lse:
        return out, softmax_max.new_empty(0), softmax_sum.new_empty(0)
    return out, softmax_max, softmax_sum


def sizes(query: Tensor, query_rope: Tensor | None, key_heads: int, top_k: int) -> dict[str, int]:
    """What the kernels know of the shapes when they are compiled."""
    rope = 0 if query_rope is None else query_rope.shape[-1]
    return {
        "GROUP": query.shape[-2] // key_heads,
        "KEY_HEADS": key_heads,
        "TOP_K": top_k,
        "BLOCK_TOP_K": triton.next_power_of_2(top_k),
        "SIZE": query.shape[-1],
        "ROPE": rope,
        "BLOCK_SIZE": max(16, triton.next_power_of_2(query.shape[-1])),
        "BLOCK_ROPE": max(16, triton.next_power_of_2(rope)),
    }


def forward_config(size: int, block_heads: int) -> dict[str, int]:
    """The best of those tried on an H200 (tools/bench/sparse_attention.py)."""
    return {"BLOCK_KEYS": 64, "num_warps": 8 if size * block_heads > 64 * 128 else 4, "num_stages": 2}


@triton.jit
def place_of(tokens, GROUP: tl.constexpr, KEY_HEADS: tl.constexpr, BLOCK_HEADS: tl.constexpr):
    """This program's row, key head and first head of its group.

    The blocks of one row are neighbours, so that they find its keys in the cache; and the last rows come first: they
    have the most keys.
    """
    blocks: tl.constexpr = (GROUP + BLOCK_HEADS - 1) // BLOCK_HEADS
    program = tl.program_id(0)
    row = tokens - 1 - program // (blocks * KEY_HEADS)
    return row.to(tl.int64), program // blocks % KEY_HEADS, program % blocks * BLOCK_HEADS


@triton.jit
def count_of(indices, TOP_K: tl.constexpr, BLOCK_TOP_K: tl.constexpr):
    """How many places of a row hold a key; the others come after them."""
    places = tl.arange(0, BLOCK_TOP_K)
    return tl.sum((tl.load(indices + places, mask=places < TOP_K, other=-1) >= 0).to(tl.int32))


@triton.jit
def tile(pointer, rows, there, start, SIZE: tl.constexpr, BLOCK: tl.constexpr):
    """BLOCK columns from ``start`` on of the ``rows`` that are ``there``, zeros for the others: (rows, BLOCK)."""
    columns = start + tl.arange(0, BLOCK)
    mask = there[:, None]
    if SIZE % BLOCK:
        mask = mask & (columns < SIZE)[None, :]
    return tl.load(pointer + rows[:, None] * SIZE + columns[None, :], mask=mask, other=0.0)


@triton.jit
def scores_of(q, q_rope, k, k_rope, ROPE: tl.constexpr):
    """(heads, keys): the products of queries and keys, their ropes' included."""
    scores = tl.dot(q, tl.trans(k), input_precision="ieee")
    if ROPE:
        scores = tl.dot(q_rope, tl.trans(k_rope), scores, input_precision="ieee")
    return scores


@triton.jit
def _attend(
    query,
    query_rope,
    key,
    key_rope,
    value,
    indices,
    first_key,
    visible_keys,
    out,
    softmax_max,
    softmax_sum,
    scale,  # for powers of 2
    tokens,
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
    row, key_head, first_head = place_of(tokens, GROUP, KEY_HEADS, BLOCK_HEADS)
    first = tl.load(first_key + row)
    visible = tl.load(visible_keys + row)
    indices += (row * KEY_HEADS + key_head) * TOP_K
    count = tl.where(visible > 0, count_of(indices, TOP_K, BLOCK_TOP_K), 0)

    in_group = first_head + tl.arange(0, BLOCK_HEADS)
    real = in_group < GROUP
    heads = (row * KEY_HEADS + key_head) * GROUP + in_group
    q = tile(query, heads, real, 0, SIZE, BLOCK_SIZE)
    q_rope = tile(query_rope, heads, real, 0, ROPE, BLOCK_ROPE)

    maximum = tl.full((BLOCK_HEADS,), float("-inf"), tl.float32)
    total = tl.zeros((BLOCK_HEADS,), tl.float32)
    average = tl.zeros((BLOCK_HEADS, BLOCK_SIZE), tl.float32)
    for start in range(0, count, BLOCK_KEYS):
        places = start + tl.arange(0, BLOCK_KEYS)
        index = tl.load(indices + places, mask=places < count, other=-1)
        there = (index >= 0) & (index < visible)
        keys = (first + index) * KEY_HEADS + key_head
        k = tile(key, keys, there, 0, SIZE, BLOCK_SIZE)
        k_rope = tile(key_rope, keys, there, 0, ROPE, BLOCK_ROPE)
        scores = tl.where(there[None, :], scores_of(q, q_rope, k, k_rope, ROPE) * scale, float("-inf"))
        highest = tl.maximum(maximum, tl.max(scores, 1))
        # -inf - -inf is not a number: a row without keys so far subtracts 0
        shift = tl.where(highest == float("-inf"), 0.0, highest)
        weights = tl.exp2(scores - shift[:, None])
        decay = tl.exp2(maximum - shift)
        total = total * decay + tl.sum(weights, 1)
        v = k if SHARED else tile(value, keys, there, 0, SIZE, BLOCK_SIZE)
        average = tl.dot(weights.to(v.dtype), v, average * decay[:, None], input_precision="ieee")
        maximum = highest

    columns = tl.arange(0, BLOCK_SIZE)
    average = average / tl.where(total == 0, 1.0, total)[:, None]
    places = heads[:, None] * SIZE + columns[None, :]
    tl.store(out + places, average.to(out.dtype.element_ty), mask=real[:, None] & (columns < SIZE)[None, :])
    # (B, N2, S, group): the rows of one key head after another
    statistics = ((row // sequence * KEY_HEADS + key_head) * sequence + row % sequence) * GROUP + in_group
    tl.store(softmax_max + statistics, maximum / 1.4426950408889634, mask=real)
    tl.store(softmax_sum + statistics, total, mask=real)
