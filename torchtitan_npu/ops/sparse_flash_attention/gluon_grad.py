"""The gradient of attention over selected keys on Hopper GPUs, with two persistent kernels in Gluon.

Up to 64 heads, most of the time is that of additions to the keys' gradients. There, two neighbouring rows are a *pair*:
in blocks of places with the same keys, the gradients of both rows are summed before they are added. If the keys of the
rows ascend, those that both selected come first.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from torchtitan_npu.ops.core.triton_launch import LOG2_E, blocks_in, multiprocessors, power_of_2
from torchtitan_npu.ops.sparse_flash_attention import gluon_grad_keys as keys
from torchtitan_npu.ops.sparse_flash_attention import gluon_grad_scores as scores
from torchtitan_npu.ops.sparse_flash_attention.gluon_grad_keys import add_to_keys
from torchtitan_npu.ops.sparse_flash_attention.gluon_grad_scores import differentiate
from torchtitan_npu.ops.sparse_flash_attention.gluon_pairs import KEYS, MOST_PLACES, plan_pairs
from torchtitan_npu.ops.sparse_flash_attention.gluon_tiles import aligned
from torchtitan_npu.ops.sparse_flash_attention.triton_grad import QUERIES, Backward, add_to_queries
from torchtitan_npu.ops.sparse_flash_attention.triton_query_blocks import Selection, Tiles, of_each_query, select
from torchtitan_npu.ops.sparse_flash_attention.triton_rows import Rows
from torchtitan_npu.ops.sparse_flash_attention.triton_segments import add_segments
from torchtitan_npu.ops.sparse_flash_attention.triton_tiles import blocks_of

TILES = Tiles(heads=128, time_per_key=5.6, time_per_head=0.041)
"""Milliseconds of all kernels for 6.3e6 pairs of a row and a key, measured on an H200 with 16, 64 and 128 heads."""
PAIRED_HEADS = 64
"""Up to this number of heads, rows that are no blocks of queries are in pairs."""
QUERY_HEADS = 64
"""Up to this number of heads, one launch adds to the queries and their ropes."""


class Pairs(NamedTuple):
    """The selected keys of pairs of rows."""

    keys: Tensor
    """The keys of each row, (..., 1, K), in an order with more common blocks where there is one."""
    blocks: Tensor
    """The number of common blocks of keys of each pair, at the beginning of both rows: (pairs,)."""
    common: Selection
    """The keys of these blocks, for ``add_to_keys``. At a key of the second row only, the softmax of the first is 0."""


def paired(indices: Tensor, rows: Rows, visible: int) -> Pairs:
    """Return the selected keys of each two rows, (..., 1, K), of which each may see up to ``visible`` keys."""
    top_k = indices.shape[-1]
    # rows that see at most top_k keys have them at the same places already
    ordered = torch.empty_like(indices) if top_k < visible and top_k <= MOST_PLACES else None
    plan = indices.new_empty(rows.first.numel() // 2, 4)
    plan_pairs(indices, None, rows, plan, None if ordered is None else (ordered, None))
    ordered = indices if ordered is None else ordered
    blocks = plan[:, 0].flip(0)  # the last pair came first
    second = Rows(*(of_rows[1::2].contiguous() for of_rows in rows))
    lists = ordered.view(-1, 1, top_k)[1::2]
    common = Selection(2, lists, second, blocks * KEYS.value, chosen=None, active=None)
    return Pairs(ordered, blocks, common)


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
        heads = self.queries.shape[1]
        # the deterministic sum takes the contributions of each row, or of each block of rows
        pairs = self.key_heads == 1 and heads <= PAIRED_HEADS and len(self.queries) % 2 == 0 and not self.deterministic
        if pairs and 2 * heads > PAIRED_HEADS:  # a block of two rows would gather more keys, and add no fewer
            self.selection = of_each_query(self.sparse_indices, self.rows)
        else:
            self.selection = select(
                *(self.sparse_indices, self.rows, self.key, heads, self.sequence, self.document, TILES)
            )
        self.pairs: Pairs | None = None
        if pairs and self.selection.queries == 1:
            self.pairs = paired(self.sparse_indices, self.rows, self.key.shape[-3])
            self.selection = self.selection._replace(keys=self.pairs.keys)
        together = 1 if self.pairs is None else 2
        self.select(self.selection.keys, self.selection.rows, self.selection.queries, together)

    def tokens(self, start: int, count: int, block: int) -> slice:
        """Return the tokens of the given rows, which are blocks of queries."""
        return slice(start * block, (start + count) * block)

    def differentiate(self, start: int, count: int, d_out: Tensor) -> None:
        assert self.query_ropes is not None
        group, here = self.shape["GROUP"], self.tokens(start, count, self.block)
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

    def add_to_queries(self, start: int, count: int) -> None:
        if self.shape["GROUP"] > QUERY_HEADS:
            super().add_to_queries(start, count)
            return
        # Two programs fit on a multiprocessor. With the rope in another launch, d_scores would be read again.
        config, grid = blocks_of(self.d_query, count * self.key_heads, QUERIES | {"num_stages": 2, "num_warps": 4})
        rope = self.shape["ROPE"]
        add_to_queries[grid](
            *(self.d_scores, self.key, self.key_rope, *self.places, self.d_query, self.d_query_rope, start, count),
            **self.products | {"BLOCK_GROUP": QUERY_HEADS},  # fewer rows would not be a product of a warp group
            **config,
            ROPE=rope,
            BLOCK_ROPE=rope * config["BLOCK_COLUMNS"] // config["WIDTH"],
        )

    def add_to_keys(self, start: int, count: int, d_out: Tensor) -> None:
        if self.pairs is not None:
            self.multiply_and_add(self.pairs.common, start // 2, count // 2, d_out)
            self.multiply_and_add(self.selection, start, count, d_out, common_blocks=self.pairs.blocks)
            return
        segments = self.segments(start, count)
        if segments is None:
            self.multiply_and_add(self.selection, start, count, d_out)
            return
        places = count * self.key_heads * self.top_k
        sizes = [places * size for size in (self.shape["SIZE"], self.shape["ROPE"])]
        contributions = self.contributions[: sum(sizes)].split(sizes)
        self.multiply_and_add(self.selection, start, count, d_out, contributions)
        for contribution, gradient in zip(contributions, (self.d_key, self.d_key_rope), strict=True):
            add_segments(contribution, segments, gradient)

    def multiply_and_add(
        self,
        selection: Selection,
        start: int,
        count: int,
        d_out: Tensor,
        contributions: Sequence[Tensor] | None = None,
        common_blocks: Tensor | None = None,
    ) -> None:
        """Add to the gradients of the keys of the ``selection``, or write ``contributions``.

        With ``common_blocks``, the number of a pair's common blocks, these are left out. They come first in both rows.
        """
        assert self.query_ropes is not None
        here = self.tokens(start, count, selection.queries)
        group = self.queries.shape[1] // self.key_heads * selection.queries
        block = min(128, max(16, power_of_2(group)))
        # Shared memory holds all columns of 64 heads, so that each weight is read once, and half of those of 128 heads.
        # Fewer heads have few weights to read twice.
        halves = 2 if block == 64 else 1
        tiles = 2 // halves * count * self.key_heads
        add_to_keys[(min(tiles, multiprocessors(d_out.device)),)](
            *(self.weights, self.d_scores, self.queries[here], self.query_ropes[here], d_out),
            *(selection.keys, *selection.rows, selection.counts, common_blocks, selection.active),
            *(*(contributions or (self.d_key, self.d_key_rope)), start, count, selection.keys.flatten(0, -3).stride(0)),
            *(*self.queries.stride()[:2], *self.query_ropes.stride()[:2], *d_out.stride()[:2]),
            GROUP=group,
            KEY_HEADS=self.key_heads,
            TOP_K=self.top_k,
            QUERIES=selection.queries,
            BLOCK_HEADS=block,
            HALVES=halves,
            ATOMIC=contributions is None,
            STAGGERED=self.staggered,
            **keys.REGISTERS,
            num_warps=4,
        )
