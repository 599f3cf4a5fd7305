#!/usr/bin/env python
"""The five kernels of sparse attention on a GPU with other tiles, one kernel at a time: the whole pass is timed.

python tools/bench/attention_sweep.py [--only scores values d_scores d_queries d_keys]
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from functools import partial
from types import ModuleType

import torch
from dsa_rows import Row, show
from gpu_timing import timed
from record import need_gpu
from sparse_attention import TOP_K, backward, forward, head_by_head, tensors

from torchtitan_npu.errors import UsageError
from torchtitan_npu.ops.sparse_flash_attention import triton as sparse_flash_attention
from torchtitan_npu.ops.sparse_flash_attention import triton_grad as sparse_flash_attention_grad

LENGTH = 4096
Tiles = dict[str, int]


def tiles(keys: int, columns: int, warps: int, stages: int) -> Tiles:
    return {"BLOCK_KEYS": keys, "BLOCK_COLUMNS": columns, "num_warps": warps, "num_stages": stages}


PRODUCTS = [
    *(tiles(64, 256, 8, stages) for stages in (4, 5, 6)),
    *(tiles(64, 128, 4, stages) for stages in (4, 5)),
    *(tiles(32, 256, 8, 5), tiles(32, 128, 4, 5), tiles(128, 256, 8, 3)),
]
SWEEPS: dict[str, tuple[ModuleType, str, list[Tiles]]] = {
    "scores": (
        sparse_flash_attention,
        "SCORES",
        [
            *(tiles(256, 64, 8, 3), tiles(256, 64, 8, 4), tiles(256, 32, 8, 3), tiles(256, 32, 8, 4)),
            *(tiles(128, 64, 8, 3), tiles(128, 64, 4, 2), tiles(128, 64, 4, 3), tiles(128, 32, 4, 3)),
        ],
    ),
    "values": (sparse_flash_attention, "VALUES", PRODUCTS),
    "d_scores": (
        sparse_flash_attention_grad,
        "SCORES",
        [
            *(tiles(128, 32, 8, 3), tiles(128, 32, 8, 4), tiles(128, 64, 8, 2), tiles(128, 64, 8, 3)),
            *(tiles(64, 32, 4, 4), tiles(64, 64, 4, 3), tiles(64, 64, 8, 4)),
        ],
    ),
    "d_queries": (sparse_flash_attention_grad, "QUERIES", PRODUCTS),
    "d_keys": (
        sparse_flash_attention_grad,
        "KEYS",
        [*(tiles(64, 128, 4, stages) for stages in (1, 2)), tiles(64, 128, 8, 1), tiles(128, 128, 8, 1)],
    ),
}
"""Of each kernel: the module and the name of its tiles, and candidates."""


def rows(only: list[str]) -> Iterator[Row]:
    """Queries and ``d_out`` lie head by head, as in the model."""
    given = tensors(LENGTH, TOP_K, by_head=True)
    results = forward(**given)
    d_out = head_by_head(torch.randn_like(results[0]))
    passes = {
        sparse_flash_attention: partial(forward, **given),
        sparse_flash_attention_grad: partial(backward, **given, d_out=d_out, results=results),
    }
    for kernel in only:
        module, name, candidates = SWEEPS[kernel]
        chosen = getattr(module, name)
        for candidate in candidates:
            row: Row = {"what": f"{kernel}{' (chosen)' if candidate == chosen else ''}, {candidate}", "length": LENGTH}
            setattr(module, name, candidate)
            try:
                yield timed(passes[module], **row)
            except UsageError as error:  # it does not fit; of a sweep, one candidate
                yield row | {"failed": str(error.__cause__)}
        setattr(module, name, chosen)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=list(SWEEPS), default=list(SWEEPS))
    options = parser.parse_args()
    need_gpu()
    torch.manual_seed(0)
    for row in rows(options.only):
        print(show(row), flush=True)
