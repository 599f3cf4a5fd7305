#!/usr/bin/env python
"""Time other tile sizes, warps and stages of the Triton kernels on a GPU.

    python tools/bench/kernel_sweep.py [--only scores values d_scores d_queries d_keys indexer norm_and_gmm]

``scores`` to ``d_keys`` are the kernels of sparse attention: one kernel changes, and the complete pass is timed.
``indexer`` times the scores of the lightning indexer and its top-k. ``norm_and_gmm`` times RMSNorm and grouped matmul.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from functools import partial
from itertools import chain
from types import ModuleType
from typing import Any
from unittest.mock import patch

import torch
import triton
from harness import (
    EXPERT_HIDDEN,
    HIDDEN,
    TOKENS,
    Machine,
    Row,
    forward_ms,
    measure_machine,
    need_gpu,
    random_tensor,
    show,
    timed,
)
from harness import TOP_K as EXPERTS_PER_TOKEN
from indexer_kernels import HEADS as INDEX_HEADS
from indexer_kernels import SIZE as INDEX_SIZE
from indexer_kernels import inputs as indexer_inputs
from sparse_attention import TOP_K, backward, forward, head_by_head, tensors
from torch import Tensor

import torchtitan_npu.ops  # noqa: F401  (it defines npu::)
from torchtitan_npu.errors import UsageError
from torchtitan_npu.ops.lightning_indexer import triton as lightning_indexer
from torchtitan_npu.ops.lightning_indexer import triton_top_k as top_k
from torchtitan_npu.ops.sparse_flash_attention import op
from torchtitan_npu.ops.sparse_flash_attention import triton as sparse_flash_attention
from torchtitan_npu.ops.sparse_flash_attention import triton_grad as sparse_flash_attention_grad
from torchtitan_npu.ops.sparse_flash_attention.triton_rows import Rows

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
"""The module, the name of the tile constant and the candidates of each kernel."""


def attention_rows(only: list[str]) -> Iterator[Row]:
    """Time the Triton kernels of sparse attention, with queries and ``d_out`` in head-major layout as in the model."""
    with patch.object(op, "is_hopper", return_value=False):
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
                what = f"{kernel}{' (chosen)' if candidate == chosen else ''}, {candidate}"
                row: Row = {"what": what, "length": LENGTH}
                setattr(module, name, candidate)
                try:
                    yield timed(passes[module], **row)
                except UsageError as error:  # this candidate does not fit
                    yield row | {"failed": str(error.__cause__)}
            setattr(module, name, chosen)


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
SELECT_TILES = [(32768, 1024), (16384, 512), (16384, 1024), (8192, 1024)]  # segment, values per warp


def score_rows(length: int = 16384) -> Iterator[Row]:
    """Time the scores of the last rows of a sequence, as many as fit into the workspace."""
    tensors = indexer_inputs(length)
    count = lightning_indexer.WORKSPACE // length
    rows = Rows(
        torch.zeros(count, dtype=torch.int32, device="cuda"),
        torch.arange(length - count + 1, length + 1, dtype=torch.int32, device="cuda"),
    )
    q, w = (tensors[name][0, -count:] for name in ("query", "weights"))
    scores = torch.empty(count, 1, length, device="cuda")
    flops = 2 * INDEX_HEADS * INDEX_SIZE * int(rows.visible.sum())
    for queries, keys, warps, stages in SCORE_TILES:
        tiles = {"QUERIES": queries, "KEYS": keys, "num_warps": warps, "num_stages": stages}
        row = {"what": f"scores, {queries} rows x {keys} keys, {warps} warps, {stages} stages", "length": length}
        try:
            yield timed(
                lambda: lightning_indexer.score(q, tensors["key"], w, rows, scores, 0, length, tiles),  # noqa: B023
                flops,
                **row,
            )
        except triton.runtime.errors.OutOfResources as error:  # this candidate does not fit
            yield row | {"failed": str(error)}


def select_rows() -> Iterator[Row]:
    """Time top-k with other segment sizes."""
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
            run = partial(top_k.select_top_k, values, held, 1, places, None, length)
            yield timed(run, what=what, length=length)
    top_k.SEGMENT, top_k.WARP_VALUES = before


def sweep_norm_and_gmm(machine: Machine) -> None:
    """Print other configurations of RMSNorm and grouped matmul, fastest first. Skip those that do not fit."""
    from torchtitan_npu.ops.grouped_matmul import triton as gmm
    from torchtitan_npu.ops.rms_norm import triton as norm

    def of(
        name: str, run: Callable[..., Any], configs: list[dict[str, Any]], limit: float, expected: Tensor | None = None
    ) -> None:
        times = []
        for config in configs:
            try:
                result = run(config=config)
                if expected is not None and not torch.allclose(result, expected, rtol=2**-6, atol=0.5):
                    print(f"{name}: {config}: wrong result")
                    continue
                times.append((forward_ms({"": partial(run, config=config)})[""], config))
            except triton.runtime.errors.OutOfResources as problem:  # this candidate does not fit
                print(f"{name}: {config}: {type(problem).__name__}: {str(problem)[:120]}")
        for time, config in sorted(times, key=lambda pair: pair[0]):
            print(f"{name}: {time:.4f} ms, {limit / time:.0%} of the limit, {config}", flush=True)

    def norm_forward(x: Tensor, gamma: Tensor, config: dict[str, Any]) -> Any:
        return norm.npu_rms_norm(x, gamma, 1e-6, **config)

    def norm_backward(*tensors: Tensor, config: dict[str, Any]) -> Any:
        return norm.npu_rms_norm_backward(*tensors, **config)

    for rows in (4096, 16384):
        x, gamma, dy = random_tensor(rows, HIDDEN), random_tensor(HIDDEN), random_tensor(rows, HIDDEN)
        rstd = norm.npu_rms_norm(x, gamma, 1e-6)[1]
        forward = [{"ROWS": 1, "BLOCK": 8192, "num_warps": w} for w in (4, 8, 16)]
        limit = machine.limit_ms(bytes=4 * x.numel())
        of(f"rms_norm forward {rows}", partial(norm_forward, x, gamma), forward, limit)
        backward = [
            {"ROWS": 1, "BLOCK": 8192, "STAGES": s, "num_warps": w, "per_multiprocessor": p}
            for w in (8, 16)
            for s, p in ((1, 1), (2, 1), (3, 1), (4, 1), (3, 2))
        ]
        limit = machine.limit_ms(bytes=6 * x.numel())
        of(f"rms_norm backward {rows}", partial(norm_backward, dy, x, gamma, rstd), backward, limit)

    tiles = [
        {"BLOCK_M": m, "BLOCK_N": n, "BLOCK_K": k, "num_warps": w, "num_stages": s, "FLATTEN": f}
        for m, n, k, w, s, f in (
            (128, 256, 64, 8, 3, False),
            (128, 256, 64, 8, 4, False),
            (128, 256, 64, 8, 3, True),
            (256, 128, 64, 8, 4, False),
            (256, 128, 64, 8, 3, True),
            (128, 128, 64, 4, 4, False),
        )
    ]
    rows = TOKENS * EXPERTS_PER_TOKEN
    for experts in (8, 64):
        ends = torch.full((experts,), rows // experts, device="cuda").cumsum(0).int()
        x, dy, weight = (
            random_tensor(rows, HIDDEN),
            random_tensor(rows, EXPERT_HIDDEN),
            random_tensor(experts, EXPERT_HIDDEN, HIDDEN).mT,
        )
        limit = machine.limit_ms(flops=2 * rows * HIDDEN * EXPERT_HIDDEN)
        for name, kernel, a, b in (
            ("forward", gmm.rows_product, x, weight),
            ("dX", gmm.rows_product, dy, weight.mT),
            ("dW", gmm.sums_product, dy.t(), x),
        ):
            expected = gmm.torch_product(a, b, ends)  # values of a few hundred: bfloat16 rounding is up to 1
            configs = tiles if experts == 8 else tiles[:3]
            run = partial(kernel, a, b, ends)
            of(f"grouped_matmul {name}, {experts} experts", run, configs, limit, expected)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    names = [*SWEEPS, "indexer", "norm_and_gmm"]
    parser.add_argument("--only", nargs="+", choices=names, default=names)
    only = parser.parse_args().only
    need_gpu()
    torch.manual_seed(0)
    rows = attention_rows([name for name in only if name in SWEEPS]) if set(only) & set(SWEEPS) else iter(())
    for row in chain(rows, *((score_rows(), select_rows()) if "indexer" in only else ())):
        print(show(row), flush=True)
    if "norm_and_gmm" in only:
        sweep_norm_and_gmm(measure_machine())


if __name__ == "__main__":
    main()
