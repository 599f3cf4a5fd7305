#!/usr/bin/env python
"""The two kernels of the lightning indexer on a GPU with other tiles: scores, and the best of them.

python tools/bench/indexer_sweep.py
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain

import torch
import triton
from dsa_rows import Row, show
from gpu_timing import timed
from indexer_kernels import HEADS, SIZE, TOP_K, inputs
from record import need_gpu

from torchtitan_npu.ops.lightning_indexer import triton as lightning_indexer
from torchtitan_npu.ops.lightning_indexer import triton_top_k as top_k
from torchtitan_npu.ops.sparse_flash_attention.triton_rows import Rows

SCORE_TILES = [  # rows, keys, warps, stages
    (4, 64, 4, 2),
    (4, 64, 4, 3),
    (4, 128, 8, 2),
    (4, 128, 8, 3),
    (2, 64, 4, 3),
    (2, 128, 4, 2),
    (2, 128, 8, 3),
    (8, 64, 8, 2),
]
SELECT_TILES = [(32768, 1024), (16384, 512), (16384, 1024), (8192, 1024)]  # segment, values of a warp


def score_rows(length: int = 16384) -> Iterator[Row]:
    """The last rows of a sequence, as many as the workspace takes."""
    tensors = inputs(length)
    count = lightning_indexer.WORKSPACE // length
    rows = Rows(
        torch.zeros(count, dtype=torch.int32, device="cuda"),
        torch.arange(length - count + 1, length + 1, dtype=torch.int32, device="cuda"),
    )
    q, w = (tensors[name][0, -count:] for name in ("query", "weights"))
    scores = torch.empty(count, 1, length, device="cuda")
    flops = 2 * HEADS * SIZE * int(rows.visible.sum())
    for queries, keys, warps, stages in SCORE_TILES:
        tiles = {"QUERIES": queries, "KEYS": keys, "num_warps": warps, "num_stages": stages}
        row = {"what": f"scores, {queries} rows x {keys} keys, {warps} warps, {stages} stages", "length": length}
        try:
            yield timed(
                lambda: lightning_indexer.score(q, tensors["key"], w, rows, scores, 0, length, tiles),  # noqa: B023
                flops,
                **row,
            )
        except triton.runtime.errors.OutOfResources as error:  # of a sweep, one candidate
            yield row | {"failed": str(error)}


def select_rows() -> Iterator[Row]:
    before = top_k.SEGMENT, top_k.WARP_VALUES
    for length in (4096, 32768):
        count = 2**26 // length
        values = torch.randn(count, length, device="cuda")
        held = torch.full((count,), length, dtype=torch.int32, device="cuda")
        places = torch.empty(count, TOP_K, dtype=torch.int32, device="cuda")
        for segment, warp_values in SELECT_TILES:
            if segment < 2 * TOP_K or (length < segment and segment != SELECT_TILES[0][0]):
                continue
            top_k.SEGMENT, top_k.WARP_VALUES = segment, warp_values
            what = f"top 2048 of {count} rows, {segment} values at a time, {warp_values} a warp"
            yield timed(lambda: top_k.select_top_k(values, held, 1, places, None), what=what, length=length)  # noqa: B023
    top_k.SEGMENT, top_k.WARP_VALUES = before


if __name__ == "__main__":
    need_gpu()
    torch.manual_seed(0)
    for row in chain(score_rows(), select_rows()):
        print(show(row), flush=True)
