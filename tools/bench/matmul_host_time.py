"""The host's time to choose a strategy for a matrix product and its gradients, ours and DTensor's own.

    python tools/bench/matmul_host_time.py [--json out.json]

DTensor's own are those for ``aten.mm``, to which torch decomposes the product elsewhere: one for the product, two for
its gradients. All are measured in turns in one run, and include the shape function. With torch_npu loaded
(docs/explanation/contract-tests.md) its strategies are measured too.
"""

from __future__ import annotations

import argparse
import itertools
import random
import statistics
import time
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
from record import machine, write
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
from torch.distributed.tensor._op_schema import OpSchema

from torchtitan_npu.distributed.matmul_whole import our_matmul_sharding, whole_matmul
from torchtitan_npu.ops.core.sharding import has_sharding_rule
from torchtitan_npu.planner import fake_ranks

aten = torch.ops.aten
Shapes = Sequence[tuple[int, ...]]
BATCH, TOKENS, DIM, WIDTH = 4, 64, 32, 96
X, W, Y = (BATCH, TOKENS, DIM), (DIM, WIDTH), (BATCH, TOKENS, WIDTH)
FLAT_X, FLAT_Y = (BATCH * TOKENS, DIM), (BATCH * TOKENS, WIDTH)
MATMUL: tuple[Any, Shapes] = aten.matmul.default, ((TOKENS, DIM), W)
MATMUL_BACKWARD: tuple[Any, Shapes] = aten.matmul_backward.default, (Y, X, W)
MM: list[tuple[Any, Shapes]] = [(aten.mm.default, ((TOKENS, DIM), W))]
TWO_MM: list[tuple[Any, Shapes]] = [
    (aten.mm.default, (FLAT_Y, (WIDTH, DIM))),
    (aten.mm.default, ((DIM, BATCH * TOKENS), FLAT_Y)),
]
SAMPLES = 60
"""Combinations of placements, always the same ones; all of them are up to ten thousand."""
REPEATS = 5


def mean_time(op: Any, shapes: Shapes, mesh_shape: tuple[int, ...]) -> float:
    """The mean time in µs of a choice that is not cached yet, over combinations of the operands' placements."""
    propagator = DTensor._op_dispatcher.sharding_propagator
    mesh = init_device_mesh("cpu", mesh_shape)
    mask = ([True, True],) if op is aten.matmul_backward.default else ()
    every = [
        list(itertools.product([Replicate(), *map(Shard, range(len(shape))), Partial()], repeat=len(mesh_shape)))
        for shape in shapes
    ]
    combinations = list(itertools.product(*every))
    times = []
    for placements in random.Random(0).sample(combinations, min(SAMPLES, len(combinations))):
        specs = []
        for here, shape in zip(placements, shapes, strict=True):
            whole = torch.empty(shape, dtype=torch.bfloat16, device="meta")
            meta = TensorMeta(whole.shape, whole.stride(), whole.dtype)
            specs.append(DTensorSpec(mesh, here, tensor_meta=meta))
        schema = OpSchema(op, (*specs, *mask), {}, propagator.op_to_schema_info.get(op))
        start = time.perf_counter()
        propagator.propagate_op_sharding_non_cached(schema)
        times.append((time.perf_counter() - start) * 1e6)
    return statistics.mean(times)


def host_times(mesh_shape: tuple[int, ...], whole: tuple[Any, Shapes], decomposed: list[Any]) -> dict[str, float]:
    """By whose strategies: the median over the repeats, in µs."""
    ways: dict[str, tuple[list[Any], Any]] = {
        "ours": ([whole], our_matmul_sharding),
        "DTensor's for aten.mm": (decomposed, nullcontext),
    }
    if has_sharding_rule(whole[0]):
        ways["torch_npu's"] = ([whole], nullcontext)
    times: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(REPEATS):
        for name, (calls, strategies) in ways.items():
            with fake_ranks(2 ** len(mesh_shape)), strategies(), whole_matmul():
                times[name].append(sum(mean_time(op, shapes, mesh_shape) for op, shapes in calls))
    return {name: round(statistics.median(some)) for name, some in times.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    rows = [
        {"operator": name, "mesh": "x".join(map(str, mesh)), "µs": host_times(mesh, whole, decomposed)}
        for name, whole, decomposed in (("matmul", MATMUL, MM), ("matmul_backward", MATMUL_BACKWARD, TWO_MM))
        for mesh in ((2,), (2, 2))
    ]
    print(f"{machine('cpu')}, torch {torch.__version__}")
    for row in rows:
        times: Any = row["µs"]
        ratios = [f"{name} {value / times['ours']:.1f} times" for name, value in times.items() if name != "ours"]
        print(f"| {row['operator']} | {row['mesh']} | {times['ours'] / 1000:.1f} ms | {', '.join(ratios)} |")
    if arguments.json:
        write(arguments.json, rows, "cpu")


if __name__ == "__main__":
    main()
