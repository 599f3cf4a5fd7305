"""The gradient of attention over selected keys on Hopper GPUs, with two persistent kernels in Gluon."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from torchtitan_npu.ops.core.triton_launch import LOG2_E, blocks_in, multiprocessors, power_of_2
from torchtitan_npu.ops.sparse_flash_attention import gluon_grad_keys as keys
from torchtitan_npu.ops.sparse_flash_attention import gluon_grad_scores as scores
from torchtitan_npu.ops.sparse_flash_attention.gluon_grad_keys import add_to_keys
from torchtitan_npu.ops.sparse_flash_attention.gluon_grad_scores import differentiate
from torchtitan_npu.ops.sparse_flash_attention.gluon_tiles import aligned
from torchtitan_npu.ops.sparse_flash_attention.triton_grad import Backward
from torchtitan_npu.ops.sparse_flash_attention.triton_query_blocks import Tiles, select
from torchtitan_npu.ops.sparse_flash_attention.triton_segments import add_segments

TILES = Tiles(heads=128, time_per_key=5.6, time_per_head=0.041)
"""Milliseconds of all kernels for 6.3e6 pairs of a row and a key, measured on an H200 with 16, 64 and 128 heads."""


def npu_sparse_flash_attention_grad(*inputs: Any, **others: Any) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Return the gradients as the reference does.

    Takes what the Gluon forward pass takes, with at most 128 heads per key head, a top-k that is a multiple of 64, and
    no ``value``.
    """
    return HopperBackward(*inputs, **others).run()


class HopperBackward(Backward):
    """A backward pass with Gluon kernels, apart from the products for the queries' gradients."""

    def __init__(self, *inputs: Any, **others: Any):
        super().__init__(*inputs, **others)
        assert self.query_ropes is not None and self.key_rope is not None
        self.queries, self.query_ropes = aligned(self.queries), aligned(self.query_ropes)
        self.key, self.key_rope, self.d_outs = aligned(self.key), aligned(self.key_rope), aligned(self.d_outs)
        self.selection = select(
            *(self.sparse_indices, self.rows, self.key, self.queries.shape[1], self.sequence, self.document, TILES)
        )
        self.select(self.selection.keys, self.selection.rows, self.selection.queries)

    def tokens(self, start: int, count: int) -> slice:
        """Return the tokens of the given rows."""
        return slice(start * self.block, (start + count) * self.block)

    def differentiate(self, start: int, count: int, d_out: Tensor) -> None:
        assert self.query_ropes is not None
        group, here = self.shape["GROUP"], self.tokens(start, count)
        tiles = count * self.key_heads * blocks_in(group, scores.BLOCK_HEADS.value)
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
        group, here = self.shape["GROUP"], self.tokens(start, count)
        block = min(128, max(16, power_of_2(group)))
        # Shared memory holds all columns of 64 heads, so that each weight is read once, and half of those of 128 heads.
        # Fewer heads have few weights to read twice.
        halves = 2 if block == 64 else 1
        tiles = 2 // halves * count * self.key_heads
        segments = self.segments(start, count)
        targets = [self.d_key, self.d_key_rope]
        if segments is not None:
            added = count * self.key_heads * self.top_k
            sizes = [added * size for size in (self.shape["SIZE"], self.shape["ROPE"])]
            targets = list(self.contributions[: sum(sizes)].split(sizes))
        add_to_keys[(min(tiles, multiprocessors(d_out.device)),)](
            *(self.weights, self.d_scores, self.queries[here], self.query_ropes[here], d_out, *self.places),
            *(self.selection.counts, self.selection.active, *targets, start, count),
            *(*self.queries.stride()[:2], *self.query_ropes.stride()[:2], *d_out.stride()[:2]),
            GROUP=group,
            KEY_HEADS=self.key_heads,
            TOP_K=self.top_k,
            QUERIES=self.block,
            BLOCK_HEADS=block,
            HALVES=halves,
            ATOMIC=segments is None,
            STAGGERED=self.staggered,
            **keys.REGISTERS,
            num_warps=4,
        )
        if segments is not None:
            for contributions, gradient in zip(targets, (self.d_key, self.d_key_rope), strict=True):
                add_segments(contributions, segments, gradient)
