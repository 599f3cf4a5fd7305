"""The gradient of attention over selected keys on Hopper GPUs, with a persistent kernel in Gluon.

Its inputs include the dot products of ``d_out`` and ``out``. With deterministic algorithms it stores contributions of
each row to its keys, and a Triton kernel adds them in a fixed order.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from torchtitan_npu.gpu_kernels.launch import LOG2_E, blocks_in, multiprocessors, uninitialized
from torchtitan_npu.gpu_kernels.sparse_flash_attention.gluon_grad_kernel import (
    REGISTERS,
    add_gradients,
    restore_columns,
)
from torchtitan_npu.gpu_kernels.sparse_flash_attention.gluon_tiles import BLOCK_HEADS, aligned
from torchtitan_npu.gpu_kernels.sparse_flash_attention.triton_grad import Backward, contribution_dtype
from torchtitan_npu.gpu_kernels.sparse_flash_attention.triton_query_blocks import select
from torchtitan_npu.gpu_kernels.sparse_flash_attention.triton_segments import add_segments


def npu_sparse_flash_attention_grad(*inputs: Any, **keywords: Any) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Return the gradients as the reference does.

    Takes what the Gluon forward pass takes, with a top-k that is a multiple of 64, and no ``value``.
    """
    return HopperBackward(*inputs, **keywords).run()


class HopperBackward(Backward):
    """A backward pass whose rows may be blocks of neighbouring queries."""

    def __init__(self, *inputs: Any, **keywords: Any):
        super().__init__(*inputs, **keywords)
        assert self.query_ropes is not None and self.key_rope is not None
        self.queries, self.query_ropes = aligned(self.queries), aligned(self.query_ropes)
        self.key, self.key_rope, self.d_outs = aligned(self.key), aligned(self.key_rope), aligned(self.d_outs)
        heads = self.queries.shape[1]
        self.selection = select(self.sparse_indices, self.rows, self.key, heads, self.sequence, self.document)
        self.select(self.selection.keys, self.selection.rows, self.selection.queries)
        self.head_tiles = blocks_in(self.shape["GROUP"], BLOCK_HEADS.value)

    def rows_per_chunk(self, copied: bool) -> int:
        """Return the rows of a chunk: all, or fewer if ``d_out`` is copied or contributions are stored."""
        rows = len(self.queries) // self.block
        per_row = self.block * self.d_outs[0].nbytes if copied else 0
        per_row += self.contributions_per_row() * contribution_dtype(self.queries.dtype).itemsize
        return min(rows, max(1, self.workspace() // per_row)) if per_row else rows

    def contributions_per_row(self) -> int:
        """Return the elements of a row's contributions to its keys. Each tile of heads adds some."""
        return self.head_tiles * super().contributions_per_row()

    def allocate(self, rows: int) -> None:
        """Allocate the contributions of a chunk to the keys, and to their ropes."""
        dtype = contribution_dtype(self.queries.dtype)
        entries = rows * self.contributions_per_row() // (self.shape["SIZE"] + self.shape["ROPE"])
        self.key_contributions = tuple(
            uninitialized((entries * self.shape[name],), dtype, self.queries.device) for name in ("SIZE", "ROPE")
        )

    def process(self, start: int, count: int, d_out: Tensor) -> None:
        assert self.query_ropes is not None
        here = slice(start * self.block, (start + count) * self.block)
        tiles = count * self.key_heads * self.head_tiles
        totals = self.d_key, self.d_key_rope
        add_gradients[(min(tiles, multiprocessors(d_out.device)),)](
            *(self.queries[here], self.query_ropes[here], d_out, self.key, self.key_rope, *self.entries),
            *(self.selection.counts, self.selection.chosen, self.selection.active),
            *(self.d_out_out, self.softmax_max, self.softmax_sum),
            *(self.d_query, self.d_query_rope, *(self.key_contributions if self.deterministic else totals)),
            torch.zeros(1, dtype=torch.int32, device=d_out.device),
            *(self.scale, self.scale * LOG2_E.value, start, count),
            *(len(self.queries) // self.block, self.sequence // self.block),
            *(*self.queries.stride()[:2], *self.query_ropes.stride()[:2], *d_out.stride()[:2]),
            GROUP=self.shape["GROUP"],
            KEY_HEADS=self.key_heads,
            TOP_K=self.top_k,
            QUERIES=self.block,
            IN_ORDER=self.deterministic,
            **REGISTERS,
            num_warps=4,
        )
        segments = self.segments(start, count)
        if segments is None:
            return
        entries = count * self.key_heads * self.top_k
        for contributions, total in zip(self.key_contributions, totals, strict=True):
            for of_heads in contributions[: self.head_tiles * entries * total.shape[-1]].chunk(self.head_tiles):
                add_segments(of_heads, segments, total)

    def gradient_of_keys(self, total: Tensor) -> Tensor:
        return restore_columns(total, self.key.dtype)
