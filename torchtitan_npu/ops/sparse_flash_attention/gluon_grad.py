"""The gradient of attention over selected keys on Hopper GPUs, with persistent kernels in Gluon.

One kernel computes all gradients, given the dot products of ``d_out`` and ``out``. With deterministic algorithms, Gluon
kernels write the softmax and its gradient, and the contributions of each row to its keys. Triton kernels compute the
gradients of the queries, and add the contributions in a fixed order.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from torchtitan_npu.ops.core.triton_launch import LOG2_E, blocks_in, multiprocessors, power_of_2
from torchtitan_npu.ops.sparse_flash_attention import gluon_grad_fused as fused
from torchtitan_npu.ops.sparse_flash_attention import gluon_grad_keys as keys
from torchtitan_npu.ops.sparse_flash_attention import gluon_grad_scores as scores
from torchtitan_npu.ops.sparse_flash_attention.gluon import TILES
from torchtitan_npu.ops.sparse_flash_attention.gluon_grad_fused import add_gradients, in_order
from torchtitan_npu.ops.sparse_flash_attention.gluon_grad_keys import multiply_keys
from torchtitan_npu.ops.sparse_flash_attention.gluon_grad_scores import differentiate
from torchtitan_npu.ops.sparse_flash_attention.gluon_tiles import BLOCK_HEADS, aligned
from torchtitan_npu.ops.sparse_flash_attention.triton_grad import Backward
from torchtitan_npu.ops.sparse_flash_attention.triton_query_blocks import Tiles, select
from torchtitan_npu.ops.sparse_flash_attention.triton_segments import add_segments

TILES_IN_ORDER = Tiles(heads=128, time_per_key=5.6, time_per_head=0.041)
"""Milliseconds of all kernels for 6.3e6 pairs of a row and a key, measured on an H200 with 16, 64 and 128 heads.
The kernels were those before commit e4ca70c."""


def npu_sparse_flash_attention_grad(*inputs: Any, **others: Any) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Return the gradients as the reference does.

    Takes what the Gluon forward pass takes, with at most 128 heads per key head, a top-k that is a multiple of 64, and
    no ``value``.
    """
    in_fixed_order = torch.are_deterministic_algorithms_enabled()
    return (InOrder if in_fixed_order else InOneKernel)(*inputs, **others).run()


class HopperBackward(Backward):
    """A backward pass whose rows may be blocks of neighbouring queries."""

    def __init__(self, tiles: Tiles, *inputs: Any, **others: Any):
        super().__init__(*inputs, **others)
        assert self.query_ropes is not None and self.key_rope is not None
        self.queries, self.query_ropes = aligned(self.queries), aligned(self.query_ropes)
        self.key, self.key_rope, self.d_outs = aligned(self.key), aligned(self.key_rope), aligned(self.d_outs)
        heads = self.queries.shape[1]
        self.selection = select(self.sparse_indices, self.rows, self.key, heads, self.sequence, self.document, tiles)
        self.select(self.selection.keys, self.selection.rows, self.selection.queries)

    def tokens(self, start: int, count: int) -> slice:
        """Return the tokens of the given rows."""
        return slice(start * self.block, (start + count) * self.block)


class InOneKernel(HopperBackward):
    """A backward pass with one kernel and atomic additions."""

    def __init__(self, *inputs: Any, **others: Any):
        super().__init__(TILES, *inputs, **others)

    def rows_per_chunk(self, copied: bool) -> int:
        """Return all rows, or a number for which the copy of the output's gradients is bounded."""
        rows = len(self.queries) // self.block
        return min(rows, max(1, self.workspace() // (self.block * self.d_outs[0].nbytes))) if copied else rows

    def allocate(self, rows: int) -> None:
        """There are no workspaces."""

    def process(self, start: int, count: int, d_out: Tensor) -> None:
        assert self.query_ropes is not None
        group, here = self.shape["GROUP"], self.tokens(start, count)
        tiles = count * self.key_heads * blocks_in(group, BLOCK_HEADS.value)
        add_gradients[(min(tiles, multiprocessors(d_out.device)),)](
            *(self.queries[here], self.query_ropes[here], d_out, self.key, self.key_rope, *self.places),
            *(self.selection.counts, self.selection.chosen, self.selection.active),
            *(self.d_out_out, self.softmax_max, self.softmax_sum),
            *(self.d_query, self.d_query_rope, self.d_key, self.d_key_rope),
            torch.zeros(1, dtype=torch.int32, device=d_out.device),
            *(self.scale, self.scale * LOG2_E.value, start, count),
            *(len(self.queries) // self.block, self.sequence // self.block),
            *(*self.queries.stride()[:2], *self.query_ropes.stride()[:2], *d_out.stride()[:2]),
            GROUP=group,
            KEY_HEADS=self.key_heads,
            TOP_K=self.top_k,
            QUERIES=self.block,
            **fused.REGISTERS,
            num_warps=4,
        )

    def gradient_of_keys(self, total: Tensor) -> Tensor:
        return in_order(total, self.key.dtype)


class InOrder(HopperBackward):
    """A backward pass that stores the contributions of each row to its keys, and adds them in a fixed order.

    The gradients of the queries are those of the base class.
    """

    def __init__(self, *inputs: Any, **others: Any):
        super().__init__(TILES_IN_ORDER, *inputs, **others)

    def differentiate(self, start: int, count: int, d_out: Tensor) -> None:
        assert self.query_ropes is not None
        group, here = self.shape["GROUP"], self.tokens(start, count)
        tiles = count * self.key_heads * blocks_in(group, BLOCK_HEADS.value)
        differentiate[(min(tiles, multiprocessors(d_out.device)),)](
            *(self.queries[here], self.query_ropes[here], d_out, self.key, self.key_rope, *self.places),
            *(self.selection.counts, self.selection.chosen, self.d_out_out, self.softmax_max, self.softmax_sum),
            *(self.weights, self.d_scores, self.scale, self.scale * LOG2_E.value, start, count),
            *(len(self.queries) // self.block, self.sequence // self.block),
            *(*self.queries.stride()[:2], *self.query_ropes.stride()[:2], *d_out.stride()[:2]),
            GROUP=group,
            KEY_HEADS=self.key_heads,
            TOP_K=self.top_k,
            QUERIES=self.block,
            **scores.REGISTERS,
            num_warps=4,
        )

    def add_to_keys(self, start: int, count: int, d_out: Tensor) -> None:
        assert self.query_ropes is not None
        segments, here = self.segments(start, count), self.tokens(start, count)
        assert segments is not None
        places = count * self.key_heads * self.top_k
        sizes = [places * size for size in (self.shape["SIZE"], self.shape["ROPE"])]
        contributions = self.contributions[: sum(sizes)].split(sizes)
        block = min(128, max(16, power_of_2(self.shape["GROUP"])))
        # Shared memory holds all columns of 64 heads, so that each weight is read once, and half of those of 128 heads.
        # Fewer heads have few weights to read twice.
        halves = 2 if block == 64 else 1
        tiles = 2 // halves * count * self.key_heads
        multiply_keys[(min(tiles, multiprocessors(d_out.device)),)](
            *(self.weights, self.d_scores, self.queries[here], self.query_ropes[here], d_out),
            *(self.sparse_indices, self.rows.visible, self.selection.counts, self.selection.active),
            *(*contributions, start, count),
            *(*self.queries.stride()[:2], *self.query_ropes.stride()[:2], *d_out.stride()[:2]),
            GROUP=self.shape["GROUP"],
            KEY_HEADS=self.key_heads,
            TOP_K=self.top_k,
            QUERIES=self.block,
            BLOCK_HEADS=block,
            HALVES=halves,
            **keys.REGISTERS,
            num_warps=4,
        )
        for contribution, gradient in zip(contributions, (self.d_key, self.d_key_rope), strict=True):
            add_segments(contribution, segments, gradient)
