"""Attention over selected keys in two products that all heads of a row share, some rows at a time.

First the exponentials of the scores, (rows, heads, top-k), into a workspace of bounded size, each relative to the
highest of its block of keys; then the average of the values. Keys are read where they lie, a block at a time: nothing
is gathered in memory. One pass over the keys, with a row's average in registers, leaves room for half of the heads, and
Triton then lets all warps compute the same scores.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from torchtitan_npu.errors import UsageError
from torchtitan_npu.ops.selection import statistics_shape
from torchtitan_npu.ops.triton.launch import LOG2_E, blocks_in, power_of_2
from torchtitan_npu.ops.triton.rows import count_of, keys_at, rows_of

WORKSPACE = 2**29
"""Bytes of the workspace. Rows are taken as many at a time as fit."""
SCORES = {"BLOCK_KEYS": 256, "BLOCK_COLUMNS": 64, "num_warps": 8, "num_stages": 3}
VALUES = {"BLOCK_KEYS": 64, "num_warps": 8, "num_stages": 5}
"""How the two kernels are compiled, chosen on an H200. Blocks of VALUES divide those of SCORES."""


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
    """As the reference, but nothing waits for the device: lengths that do not fit the tokens are not looked for, and a
    -1 before a key is passed over."""
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
    weights = query.new_empty(chunk, heads, top_k)
    block_max = torch.empty(chunk, heads, blocks, dtype=torch.float32, device=query.device)
    block_sum = torch.empty_like(block_max)
    shape = shape_of(query, query_rope, key_heads, top_k)
    products = product_shape(shape)
    sequence = tokens if layout_query == "TND" else query.shape[1]
    places = (sparse_indices, *rows)
    for start in range(0, tokens, chunk):
        count = min(chunk, tokens - start)
        _score[score_grid(count, shape, SCORES)](
            *(queries, query_rope, key, key_rope, *places, weights, block_max, block_sum),
            *(scale_value * LOG2_E.value, start, *queries.stride()[:2]),
            **shape,
            **score_blocks(shape),
            **SCORES,
        )
        columns, grid = blocks_of(out, count * key_heads, 256)
        _average[grid](
            *(weights, block_max, block_sum, values, *places, out, softmax_max, softmax_sum, start, count, sequence),
            **products,
            **columns,
            BLOCKS=blocks,
            BLOCK_BLOCKS=power_of_2(blocks),
            SCORED_KEYS=SCORES["BLOCK_KEYS"],
            **VALUES,
        )
    if not return_softmax_lse:
        return out, softmax_max.new_empty(0), softmax_sum.new_empty(0)
    return out, softmax_max, softmax_sum


def check_size(key: Tensor, key_rope: Tensor | None) -> None:
    """The kernels count the elements of the keys in 32 bits."""
    for name, tensor in (("key", key), ("key_rope", key_rope)):
        if tensor is not None and tensor.numel() >= 2**31:
            raise UsageError(
                f"{name} must have less than 2**31 elements on a GPU, not {tensor.numel()}: split the batch"
            )


def by_token(tensor: Tensor) -> Tensor:
    """``tensor`` (..., heads, size) as (tokens, heads, size) with features side by side: a view, where it can be one.
    Queries that a product made for each head lie head by head.

    Contiguous ones too: where a sequence has one token, its stride says nothing of where the next one is.
    """
    flat = tensor.flatten(0, -3)
    return flat if flat.stride(-1) == 1 else flat.contiguous()


def shape_of(query: Tensor, query_rope: Tensor | None, key_heads: int, top_k: int) -> dict[str, int]:
    """What the kernels know of the shapes when they are compiled."""
    *_, heads, size = query.shape
    rope = 0 if query_rope is None else query_rope.shape[-1]
    return {"GROUP": heads // key_heads, "KEY_HEADS": key_heads, "TOP_K": top_k, "SIZE": size, "ROPE": rope}


def score_blocks(shape: dict[str, int]) -> dict[str, int]:
    return {
        "BLOCK_HEADS": min(128, max(16, power_of_2(shape["GROUP"]))),
        "BLOCK_ROPE": max(16, power_of_2(shape["ROPE"])),
        "BLOCK_TOP_K": power_of_2(shape["TOP_K"]),
    }


def score_grid(rows: int, shape: dict[str, int], config: dict[str, int]) -> tuple[int]:
    """A program for each row, block of heads and block of keys."""
    blocks = blocks_in(shape["GROUP"], score_blocks(shape)["BLOCK_HEADS"])
    return (rows * shape["KEY_HEADS"] * blocks * blocks_in(shape["TOP_K"], config["BLOCK_KEYS"]),)


def product_shape(shape: dict[str, int]) -> dict[str, int]:
    return {
        **{name: shape[name] for name in ("GROUP", "KEY_HEADS", "TOP_K")},
        "BLOCK_TOP_K": power_of_2(shape["TOP_K"]),
        "BLOCK_GROUP": max(16, power_of_2(shape["GROUP"])),
    }


def blocks_of(tensor: Tensor, rows: int, most: int) -> tuple[dict[str, int], tuple[int]]:
    """Its last dimension in blocks of at most so many columns; and the grid with a program for each row and block."""
    width = tensor.shape[-1]
    block = min(most, max(16, power_of_2(width)))
    return {"WIDTH": width, "BLOCK_COLUMNS": block}, (rows * blocks_in(width, block),)


@triton.jit
def place_of_scores(
    indices,
    first_key,
    visible_keys,
    first_row,
    GROUP: tl.constexpr,
    KEY_HEADS: tl.constexpr,
    TOP_K: tl.constexpr,
    BLOCK_HEADS: tl.constexpr,
    BLOCK_KEYS: tl.constexpr,
):
    """This program's row, in the chunk and among all; its key head and some heads of its group; its first place of a
    key, and the keys from there on with whether they are there."""
    head_blocks: tl.constexpr = (GROUP + BLOCK_HEADS - 1) // BLOCK_HEADS
    key_blocks: tl.constexpr = (TOP_K + BLOCK_KEYS - 1) // BLOCK_KEYS
    program = tl.program_id(0)
    in_chunk = (program // (head_blocks * key_blocks * KEY_HEADS)).to(tl.int64)
    row = first_row + in_chunk
    key_head = program // (head_blocks * key_blocks) % KEY_HEADS
    in_group = program % head_blocks * BLOCK_HEADS + tl.arange(0, BLOCK_HEADS)
    first_place = program // head_blocks % key_blocks * BLOCK_KEYS
    places = first_place + tl.arange(0, BLOCK_KEYS)
    first, visible = tl.load(first_key + row), tl.load(visible_keys + row)
    indices += (row * KEY_HEADS + key_head) * TOP_K
    keys, there = keys_at(indices, places, TOP_K, first, visible, key_head, KEY_HEADS)
    return in_chunk, row, key_head, in_group, first_place, keys, there


@triton.jit
def place_of_products(
    indices,
    first_key,
    visible_keys,
    first_row,
    rows,
    WIDTH: tl.constexpr,
    KEY_HEADS: tl.constexpr,
    TOP_K: tl.constexpr,
    BLOCK_COLUMNS: tl.constexpr,
    BLOCK_TOP_K: tl.constexpr,
):
    """This program's row, in the chunk and among all, its key head and first column; where its selection lies, its
    document's first key and how many keys it may see; and how many places of the selection are to be looked at.

    The blocks of one row are neighbours, so that they find its keys in the cache; and the last rows come first: they
    have the most keys.
    """
    blocks: tl.constexpr = (WIDTH + BLOCK_COLUMNS - 1) // BLOCK_COLUMNS
    program = tl.program_id(0)
    in_chunk = (rows - 1 - program // (blocks * KEY_HEADS)).to(tl.int64)
    row = first_row + in_chunk
    key_head = program // blocks % KEY_HEADS
    first, visible = tl.load(first_key + row), tl.load(visible_keys + row)
    indices += (row * KEY_HEADS + key_head) * TOP_K
    count = count_of(indices, visible, TOP_K, BLOCK_TOP_K)
    return in_chunk, row, key_head, program % blocks * BLOCK_COLUMNS, indices, first, visible, count


@triton.jit
def tile(pointer, rows, there, start, SIZE: tl.constexpr, BLOCK: tl.constexpr):
    """BLOCK columns from ``start`` on of the rows whose first elements are at ``rows``; zeros for those not ``there``:
    (rows, BLOCK)."""
    columns = start + tl.arange(0, BLOCK)
    mask = there[:, None]
    if SIZE % BLOCK:
        mask = mask & (columns < SIZE)[None, :]
    return tl.load(pointer + rows[:, None] + columns[None, :], mask=mask, other=0.0)


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
    BLOCK_KEYS: tl.constexpr,
    BLOCK_COLUMNS: tl.constexpr,
):
    """Exponentials relative to the highest of the block, (rows of the chunk, heads, top-k), that, and their sum. Places
    without a key are 0, but for blocks of them after a row's last key, which nothing reads."""
    in_chunk, row, key_head, in_group, first_place, keys, there = place_of_scores(
        indices, first_key, visible_keys, first_row, GROUP, KEY_HEADS, TOP_K, BLOCK_HEADS, BLOCK_KEYS
    )
    places = first_place + tl.arange(0, BLOCK_KEYS)
    real = in_group < GROUP
    of_chunk = (in_chunk * KEY_HEADS + key_head) * GROUP + in_group
    of_block = of_chunk * ((TOP_K + BLOCK_KEYS - 1) // BLOCK_KEYS) + first_place // BLOCK_KEYS
    slots = of_chunk[:, None] * TOP_K + places[None, :]
    kept = real[:, None]
    if TOP_K % BLOCK_KEYS:
        kept = kept & (places < TOP_K)[None, :]
    if tl.max(there.to(tl.int32)) == 0:
        tl.store(block_max + of_block, tl.full((BLOCK_HEADS,), float("-inf"), tl.float32), mask=real)
        tl.store(block_sum + of_block, tl.zeros((BLOCK_HEADS,), tl.float32), mask=real)
        indices += (row * KEY_HEADS + key_head) * TOP_K
        count = count_of(indices, tl.load(visible_keys + row), TOP_K, BLOCK_TOP_K)
        if first_place < count:  # there are keys after them
            zeros = tl.zeros((BLOCK_HEADS, BLOCK_KEYS), weights.dtype.element_ty)
            tl.store(weights + slots, zeros, mask=kept)
        return
    head = (key_head * GROUP + in_group).to(tl.int64)  # times a stride it may be large

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
    # -inf - -inf is not a number: a row without keys subtracts 0
    exponentials = tl.exp2(scores - tl.where(highest == float("-inf"), 0.0, highest)[:, None])
    tl.store(weights + slots, exponentials.to(weights.dtype.element_ty), mask=kept)
    tl.store(block_max + of_block, highest, mask=real)
    tl.store(block_sum + of_block, tl.sum(exponentials, 1), mask=real)


@triton.jit
def _average(
    weights,
    block_max,
    block_sum,
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
    BLOCK_KEYS: tl.constexpr,
):
    """The softmax's statistics, and the average of a row's values, (heads, top-k) (top-k, width)."""
    in_chunk, row, key_head, first_column, indices, first, visible, count = place_of_products(
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
    total = tl.sum(tl.load(block_sum + of_blocks, mask=known, other=0.0) * tl.exp2(highest_of - shift[:, None]), 1)
    if first_column == 0:
        # (B, N2, S, group): the rows of one key head after another
        statistics = ((row // sequence * KEY_HEADS + key_head) * sequence + row % sequence) * GROUP + group
        tl.store(softmax_max + statistics, highest / LOG2_E, mask=real)
        tl.store(softmax_sum + statistics, total, mask=real)

    inverse = 1.0 / tl.where(total == 0, 1.0, total)
    average = tl.zeros((BLOCK_GROUP, BLOCK_COLUMNS), tl.float32)
    for start in range(0, count, BLOCK_KEYS):
        places = start + tl.arange(0, BLOCK_KEYS)
        keys, there = keys_at(indices, places, count, first, visible, key_head, KEY_HEADS)
        mask = real[:, None]
        if TOP_K % BLOCK_KEYS:
            mask = mask & (places < TOP_K)[None, :]
        w = tl.load(weights + of_chunk[:, None] * TOP_K + places[None, :], mask=mask, other=0.0)
        v = tile(value, keys * WIDTH, there, first_column, WIDTH, BLOCK_COLUMNS)
        of_block = tl.load(block_max + of_chunk * BLOCKS + start // SCORED_KEYS, mask=real, other=float("-inf"))
        w = (w.to(tl.float32) * tl.exp2(of_block - shift)[:, None]).to(v.dtype)
        average = tl.dot(w, v, average, input_precision="ieee")
    columns = first_column + tl.arange(0, BLOCK_COLUMNS)
    places = ((row * KEY_HEADS + key_head) * GROUP + group)[:, None] * WIDTH + columns[None, :]
    mask = real[:, None] & (columns < WIDTH)[None, :]
    tl.store(out + places, (average * inverse[:, None]).to(out.dtype.element_ty), mask=mask)
