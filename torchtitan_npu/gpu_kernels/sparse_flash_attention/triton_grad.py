"""The gradient of attention over selected keys in Triton, in kernels over a chunk of rows.

1. ``_multiply_and_sum`` computes the dot products of ``d_out`` and ``out``.
2. ``_differentiate`` writes the softmax and its gradient, (rows, heads, top-k), to a workspace of bounded size.
3. ``_add_to_queries`` and ``_add_to_keys`` multiply them with keys and queries.

Each is a product over all heads of a row, so each key of a row is added to once, for any number of heads.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from torchtitan_npu.gpu_kernels.launch import LOG2_E, blocks_in, power_of_2, uninitialized
from torchtitan_npu.gpu_kernels.sparse_flash_attention.triton_rows import Rows, count_of, keys_at, rows_of
from torchtitan_npu.gpu_kernels.sparse_flash_attention.triton_segments import Segments, add_segments, segments_of
from torchtitan_npu.gpu_kernels.sparse_flash_attention.triton_tiles import (
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
from torchtitan_npu.ops.sparse_flash_attention.checks import sequence_length

WORKSPACE = 2**30
"""Bytes of the workspace, twice as many with deterministic algorithms. With half of it the chunks of rows are smaller,
and take 2 % longer."""
SUMS = {"BLOCK_ROWS": 8, "num_warps": 4}
SCORES = {"BLOCK_KEYS": 128, "BLOCK_COLUMNS": 32, "num_warps": 8, "num_stages": 4}
QUERIES = {"BLOCK_KEYS": 64, "BLOCK_COLUMNS": 256, "num_warps": 8, "num_stages": 5}
KEYS = {"BLOCK_KEYS": 64, "BLOCK_COLUMNS": 128, "num_warps": 4, "num_stages": 1}
"""Launch options of the kernels, the fastest on an H200. BLOCK_KEYS of QUERIES divides that of SCORES."""


def npu_sparse_flash_attention_grad(*inputs: Any, **keywords: Any) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Return the gradients as the reference does.

    Atomic additions sum the gradients of the keys in float32, in any order; with torch's deterministic algorithms the
    order is fixed.
    """
    return Backward(*inputs, **keywords).run()


class Backward:
    """A backward pass: its inputs, workspaces and results. The methods launch kernels over a chunk of rows."""

    def __init__(
        self,
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
    ):
        self.deterministic = torch.are_deterministic_algorithms_enabled()
        check_size(key, key_rope)
        rows = rows_of(layout, sparse_mode, query, key, actual_seq_qlen, actual_seq_kvlen)
        self.scale = scale_value
        self.sequence = query.shape[-3]  # queries of a sequence (BSND) or of the batch (TND)
        lengths = sequence_length(query, actual_seq_qlen), sequence_length(key, actual_seq_kvlen)
        self.document = (*lengths, sparse_mode == 3)
        self.key_heads = sparse_indices.shape[-2]
        self.queries, self.d_outs, self.outs = by_token(query), by_token(d_out), by_token(out).contiguous()
        self.key = key.contiguous()
        self.value, query_rope, self.key_rope = (
            None if t is None else t.contiguous() for t in (value, query_rope, key_rope)
        )
        self.query_ropes = None if query_rope is None else by_token(query_rope)
        self.softmax_max, self.softmax_sum = softmax_max.contiguous(), softmax_sum.contiguous()
        self.d_query = torch.empty_like(query, memory_format=torch.contiguous_format)
        self.d_query_rope = query.new_empty(0) if query_rope is None else torch.empty_like(query_rope)
        self.d_key, self.d_value, self.d_key_rope = (
            query.new_empty(0, dtype=torch.float32) if t is None else torch.zeros_like(t, dtype=torch.float32)
            for t in (self.key, self.value, self.key_rope)
        )
        self.shape = shape_of(query, query_rope, self.key_heads, sparse_indices.shape[-1])
        self.select(sparse_indices.contiguous(), rows)

    def select(self, sparse_indices: Tensor, rows: Rows, block: int = 1) -> None:
        """Set the selected keys of each row of the kernels, which is a block of neighbouring queries."""
        self.sparse_indices, self.rows, self.block = sparse_indices, rows, block
        self.top_k = sparse_indices.shape[-1]
        self.shape |= {"GROUP": self.queries.shape[1] // self.key_heads * block, "TOP_K": self.top_k}
        self.products = product_shape(self.shape)
        self.entries = (sparse_indices, *rows)
        self.staggered = self.key.shape[-3] <= 2 * self.top_k  # a row selects at least half of the keys

    def run(self) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
        tokens, (heads, size) = len(self.queries), self.queries.shape[1:]
        # With the heads outermost, as the product after attention leaves it, a row of d_out spans one memory page per
        # head. A contiguous copy takes less time than the repeated reads of those pages would.
        copied = not self.d_outs.is_contiguous()
        rows = self.rows_per_chunk(copied)
        self.allocate(rows)
        chunk = rows * self.block
        self.d_out_out = uninitialized((chunk, heads), torch.float32, self.queries.device)
        copy = uninitialized((chunk, heads, size), self.queries.dtype, self.queries.device) if copied else None
        for start in range(0, tokens, chunk):
            count = min(chunk, tokens - start)
            here = slice(start, start + count)
            _multiply_and_sum[(blocks_in(count * heads, SUMS["BLOCK_ROWS"]),)](
                *(self.d_outs[here], self.outs[here], self.d_out_out, copy, count * heads, *self.d_outs.stride()[:2]),
                HEADS=heads,
                SIZE=size,
                BLOCK=power_of_2(size),
                **SUMS,
            )
            self.process(start // self.block, count // self.block, self.d_outs[here] if copy is None else copy)
        d_key, d_value, d_key_rope = map(self.gradient_of_keys, (self.d_key, self.d_value, self.d_key_rope))
        return self.d_query, d_key, d_value, self.d_query_rope, d_key_rope

    def workspace(self) -> int:
        """Return the bytes of all workspaces."""
        return 2 * WORKSPACE if self.deterministic else WORKSPACE

    def rows_per_chunk(self, copied: bool) -> int:
        """Return the number of rows for which the workspaces are bounded. ``copied`` are the output's gradients."""
        heads, size = self.queries.shape[1:]
        slots = heads * max(2 * self.top_k, size if copied else 0) * self.queries.element_size()
        added = contribution_dtype(self.queries.dtype).itemsize * self.contributions_per_row()
        return min(len(self.queries), max(1, self.workspace() // (slots + added)))

    def contributions_per_row(self) -> int:
        """Return the elements of a row's contributions to its keys, for the deterministic sum."""
        return self.key_heads * self.top_k * (self.shape["SIZE"] + self.shape["ROPE"]) if self.deterministic else 0

    def allocate(self, rows: int) -> None:
        """Allocate the workspaces for a chunk."""
        slots = (rows, self.queries.shape[1], self.top_k)
        self.weights, self.d_scores = (uninitialized(slots, self.queries.dtype, self.queries.device) for _ in range(2))
        dtype = contribution_dtype(self.queries.dtype)
        self.contributions = uninitialized((rows * self.contributions_per_row(),), dtype, self.queries.device)

    def process(self, start: int, count: int, d_out: Tensor) -> None:
        """Compute the gradients of a chunk of rows."""
        _differentiate[score_grid(count, self.shape, SCORES)](
            *(self.queries, self.query_ropes, self.key, self.key_rope, self.value, *self.entries),
            *(d_out, self.d_out_out, self.softmax_max, self.softmax_sum, self.weights, self.d_scores),
            *(self.scale, self.scale * LOG2_E.value, start, self.sequence, *self.queries.stride()[:2]),
            **self.shape,
            **score_blocks(self.shape),
            **SCORES,
        )
        # With few stages, two programs of up to 64 heads fit on a multiprocessor: 1.7 instead of 1.9 ms on full rows.
        options = QUERIES if self.shape["GROUP"] > 64 else QUERIES | {"num_stages": 2}
        for of_key, gradient in ((self.key, self.d_query), (self.key_rope, self.d_query_rope)):
            if gradient.numel():
                config, grid = blocks_of(gradient, count * self.key_heads, options)
                _add_to_queries[grid](
                    *(self.d_scores, of_key, *self.entries, gradient, start, count), **self.products, **config
                )
        self.add_to_keys(start, count, d_out)

    def gradient_of_keys(self, total: Tensor) -> Tensor:
        """Return the gradient of keys or values from its sum in float32."""
        return total.to(self.key.dtype)

    def add_to_keys(self, start: int, count: int, d_out: Tensor) -> None:
        here = slice(start, start + count)
        both = (self.weights, d_out) if self.value is None else (None, None)
        segments = self.segments(start, count)
        for (left, right, *second), gradient in (
            ((self.d_scores, self.queries, *both), self.d_key),
            ((self.d_scores, self.query_ropes, None, None), self.d_key_rope),
            ((self.weights, self.d_outs, None, None), self.d_value),
        ):
            if gradient.numel():
                assert right is not None
                config, grid = blocks_of(gradient, count * self.key_heads, KEYS)
                target = gradient if segments is None else self.contributions
                _add_to_keys[grid](
                    *(left, right[here], *second, *self.entries, target, start, count, *right.stride()[:2]),
                    **self.products,
                    **config,
                    ATOMIC=segments is None,
                    STAGGERED=self.staggered,
                )
                if segments is not None:
                    add_segments(self.contributions, segments, gradient)

    def segments(self, start: int, count: int) -> Segments | None:
        """Return the segments of deterministic sums, or None if the order of the sums is arbitrary."""
        if not self.deterministic:
            return None
        keys = self.key.numel() // self.key.shape[-1]
        return segments_of(self.sparse_indices, self.rows, start, count, keys)


def contribution_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype of the contributions that deterministic sums read, for queries of ``dtype``.

    A contribution sums products with a softmax that is rounded to bfloat16, and gets one more rounding of that size.
    float16 could overflow.
    """
    return torch.bfloat16 if dtype == torch.bfloat16 else torch.float32


@triton.jit
def _multiply_and_sum(
    left,
    right,
    total,
    copy,
    rows,
    left_row,
    left_head,
    HEADS: tl.constexpr,
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
):
    """Write the sum of ``left`` times ``right`` over the last dimension, and ``left`` to the contiguous ``copy``."""
    row = tl.program_id(0).to(tl.int64) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    columns = tl.arange(0, BLOCK)[None, :]
    mask = (row < rows)[:, None] & (columns < SIZE)
    of_left = row // HEADS * left_row + row % HEADS * left_head
    a = tl.load(left + of_left[:, None] + columns, mask=mask, other=0.0)
    at = row[:, None] * SIZE + columns
    b = tl.load(right + at, mask=mask, other=0.0)
    tl.store(total + row, tl.sum(a.to(tl.float32) * b.to(tl.float32), 1), mask=row < rows)
    if copy is not None:
        tl.store(copy + at, a, mask=mask)


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
    weights,
    d_scores,
    scale,
    scale_2,  # for powers of 2
    first_row,
    sequence,
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
    """Write the softmax and its gradient, (rows of the chunk, heads, top-k), of a row, a block of heads and entries.

    ``d_out`` and ``d_out_out`` hold the rows of the chunk.
    """
    in_chunk, row, key_head, in_group, first_entry, keys, there = offset_of_scores(
        indices, first_key, visible_keys, first_row, GROUP, KEY_HEADS, TOP_K, BLOCK_HEADS, BLOCK_KEYS
    )
    entries = first_entry + tl.arange(0, BLOCK_KEYS)
    real = in_group < GROUP
    head = (key_head * GROUP + in_group).to(tl.int64)
    of_query = row * query_row + head * query_head
    of_rope = (row * KEY_HEADS * GROUP + head) * ROPE
    of_chunk = in_chunk * KEY_HEADS * GROUP + head
    slots = of_chunk[:, None] * TOP_K + entries[None, :]
    in_slots = real[:, None]
    if TOP_K % BLOCK_KEYS:
        in_slots = in_slots & (entries < TOP_K)[None, :]
    if tl.max(there.to(tl.int32)) == 0:
        indices += (row * KEY_HEADS + key_head) * TOP_K
        count = count_of(indices, tl.load(visible_keys + row), TOP_K, BLOCK_TOP_K)
        if first_entry < count:  # keys follow in later blocks
            zeros = tl.zeros((BLOCK_HEADS, BLOCK_KEYS), d_scores.dtype.element_ty)
            tl.store(d_scores + slots, zeros, mask=in_slots)
        return

    scores = tl.zeros((BLOCK_HEADS, BLOCK_KEYS), tl.float32)
    dp = tl.zeros((BLOCK_HEADS, BLOCK_KEYS), tl.float32)
    for start in range(0, SIZE, BLOCK_COLUMNS):
        q = tile(query, of_query, real, start, SIZE, BLOCK_COLUMNS)
        do = tile(d_out, of_chunk * SIZE, real, start, SIZE, BLOCK_COLUMNS)
        k = tile(key, keys * SIZE, there, start, SIZE, BLOCK_COLUMNS)
        v = k if value is None else tile(value, keys * SIZE, there, start, SIZE, BLOCK_COLUMNS)
        scores = tl.dot(q, tl.trans(k), scores, input_precision="ieee")
        dp = tl.dot(do, tl.trans(v), dp, input_precision="ieee")
    if ROPE:
        q = tile(query_rope, of_rope, real, 0, ROPE, BLOCK_ROPE)
        k = tile(key_rope, keys * ROPE, there, 0, ROPE, BLOCK_ROPE)
        scores = tl.dot(q, tl.trans(k), scores, input_precision="ieee")

    statistics = ((row // sequence * KEY_HEADS + key_head) * sequence + row % sequence) * GROUP + in_group
    highest = tl.load(softmax_max + statistics, mask=real, other=0.0) * LOG2_E
    total = tl.load(softmax_sum + statistics, mask=real, other=1.0)
    delta = tl.load(d_out_out + of_chunk, mask=real, other=0.0)
    p = tl.where(there[None, :], tl.exp2(scores * scale_2 - highest[:, None]) / total[:, None], 0.0)
    ds = p * (dp - delta[:, None]) * scale
    tl.store(weights + slots, p.to(weights.dtype.element_ty), mask=in_slots)
    tl.store(d_scores + slots, ds.to(d_scores.dtype.element_ty), mask=in_slots)


@triton.jit
def _add_to_queries(
    d_scores,
    key,
    indices,
    first_key,
    visible_keys,
    d_query,
    first_row,
    rows,
    GROUP: tl.constexpr,
    KEY_HEADS: tl.constexpr,
    TOP_K: tl.constexpr,
    BLOCK_TOP_K: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK_GROUP: tl.constexpr,
    BLOCK_COLUMNS: tl.constexpr,
    BLOCK_KEYS: tl.constexpr,
):
    """Write d_query of a row, d_scores · keys, (heads, top-k) (top-k, width), for a block of columns."""
    in_chunk, row, key_head, first_column, indices, first, visible, count = offset_of_products(
        indices, first_key, visible_keys, first_row, rows, WIDTH, KEY_HEADS, TOP_K, BLOCK_COLUMNS, BLOCK_TOP_K
    )

    group = tl.arange(0, BLOCK_GROUP)
    columns = first_column + tl.arange(0, BLOCK_COLUMNS)
    of_left = (in_chunk * KEY_HEADS + key_head) * GROUP * TOP_K + group[:, None] * TOP_K
    total = tl.zeros((BLOCK_GROUP, BLOCK_COLUMNS), tl.float32)
    for start in range(0, count, BLOCK_KEYS):
        entries = start + tl.arange(0, BLOCK_KEYS)
        keys, there = keys_at(indices, entries, count, first, visible, key_head, KEY_HEADS)
        mask = (group < GROUP)[:, None]
        if TOP_K % BLOCK_KEYS:
            mask = mask & (entries < TOP_K)[None, :]
        ds = tl.load(d_scores + of_left + entries[None, :], mask=mask, other=0.0)
        k = tile(key, keys * WIDTH, there, first_column, WIDTH, BLOCK_COLUMNS)
        total = tl.dot(ds, k, total, input_precision="ieee")
    of_heads = ((row * KEY_HEADS + key_head) * GROUP + group)[:, None]
    mask = (group < GROUP)[:, None] & (columns < WIDTH)[None, :]
    tl.store(d_query + of_heads * WIDTH + columns[None, :], total.to(d_query.dtype.element_ty), mask=mask)


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
    right_row,
    right_head,
    GROUP: tl.constexpr,
    KEY_HEADS: tl.constexpr,
    TOP_K: tl.constexpr,
    BLOCK_TOP_K: tl.constexpr,
    BLOCK_GROUP: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK_COLUMNS: tl.constexpr,
    ATOMIC: tl.constexpr,
    STAGGERED: tl.constexpr,
    BLOCK_KEYS: tl.constexpr,
):
    """Add leftᵀ right (+ left_2ᵀ right_2), (top-k, heads) (heads, width), to the keys of a row, for a block of columns.

    Without ``ATOMIC``, ``target`` (rows, top-k, width) takes the contributions instead. All four factors hold the rows
    of this chunk. With ``STAGGERED``, neighbouring rows begin at different blocks, so that they do not add to the same
    keys at once. That is faster if they share most keys; otherwise the same part of the keys stays in the cache.
    """
    in_chunk, _, key_head, first_column, indices, first, visible, count = offset_of_products(
        indices, first_key, visible_keys, first_row, rows, WIDTH, KEY_HEADS, TOP_K, BLOCK_COLUMNS, BLOCK_TOP_K
    )

    group = tl.arange(0, BLOCK_GROUP)
    columns = first_column + tl.arange(0, BLOCK_COLUMNS)
    head = (key_head * GROUP + group).to(tl.int64)[:, None]
    of_left = (in_chunk * KEY_HEADS + key_head) * GROUP * TOP_K + group[:, None] * TOP_K
    real = (group < GROUP)[:, None] & (columns < WIDTH)[None, :]
    r = tl.load(right + in_chunk * right_row + head * right_head + columns[None, :], mask=real, other=0.0)
    r_2 = r
    if left_2 is not None:
        r_2 = tl.load(right_2 + (in_chunk * KEY_HEADS * GROUP + head) * WIDTH + columns[None, :], mask=real, other=0.0)
    blocks, shift = tl.cdiv(count, BLOCK_KEYS), in_chunk.to(tl.int32)
    for turn in range(0, blocks):
        block = turn
        if STAGGERED:
            block = (turn + shift) % blocks
        entries = block * BLOCK_KEYS + tl.arange(0, BLOCK_KEYS)
        keys, there = keys_at(indices, entries, count, first, visible, key_head, KEY_HEADS)
        # an entry without a key may hold NaN, which stays in that entry's row of the product and is not added
        mask = (group < GROUP)[:, None]
        if TOP_K % BLOCK_KEYS:
            mask = mask & (entries < TOP_K)[None, :]
        w = tl.load(left + of_left + entries[None, :], mask=mask, other=0.0)
        part = tl.dot(tl.trans(w), r, input_precision="ieee")
        if left_2 is not None:
            w = tl.load(left_2 + of_left + entries[None, :], mask=mask, other=0.0)
            part = tl.dot(tl.trans(w), r_2, part, input_precision="ieee")
        mask = there[:, None] & (columns < WIDTH)[None, :]
        if ATOMIC:
            tl.atomic_add(target + keys[:, None] * WIDTH + columns[None, :], part, mask=mask, sem="relaxed")
        else:
            slots = (in_chunk * KEY_HEADS + key_head) * TOP_K + entries
            tl.store(target + slots[:, None] * WIDTH + columns[None, :], part, mask=mask)
