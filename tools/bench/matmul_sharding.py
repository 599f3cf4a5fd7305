"""What matrix products under tensor parallel move, and what it takes the host to decide it.

    PYTHONPATH=. python tools/bench/matmul_sharding.py [--json out.json]

Two products of DeepSeek-V3, on fake tensors of their real sizes over ranks that exist in name only; and the host's time
to choose a strategy, ours and DTensor's own for ``aten.mm``, in turns in one run. With torch_npu loaded
(docs/rehearsal.md) its strategies are measured too.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
from torch.distributed.tensor._op_schema import OpSchema
from torch.distributed.tensor.debug import CommDebugMode, _clear_sharding_prop_cache
from torch.distributed.tensor.experimental import register_sharding

from tests.collectives import Collectives
from tests.whole_matmul import our_matmul_sharding, whole_matmul
from torchtitan_npu import platform
from torchtitan_npu.ops.sharding import has_sharding_rule
from torchtitan_npu.rehearsal import fake_device, fake_ranks

aten = torch.ops.aten
R, P = Replicate(), Partial()
RANKS, TOKENS, DIM, Q_LORA, VOCABULARY = 4, 4096, 7168, 1536, 129280
REPEATS = 30
DEVICE = "npu" if platform.home() == "npu" else "cpu"
"""The CPU has no all-to-all: DTensor gathers there instead."""


@contextmanager
def cut_inside() -> Iterator[None]:
    """What torch_npu up to 2.9 did with these two: the inner dimension is cut, whatever the inputs are."""
    with our_matmul_sharding():  # puts back what was there

        @register_sharding(aten.matmul.default)
        def matmul(left: Any, right: Any) -> Any:
            return [([P], [Shard(left.ndim - 1), Shard(0)])]

        @register_sharding(aten.matmul_backward.default)
        def backward(grad: Any, left: Any, right: Any, mask: Any) -> Any:
            cut = [Shard(left.ndim - 1), Shard(0)]
            return [(cut, [R, *cut, None])]

        _clear_sharding_prop_cache()
        yield


def q_lora(mesh: DeviceMesh) -> None:
    """The projection to the queries' latents, which the plan leaves replicated, and wants back replicated."""
    x, weight = tensor(mesh, (1, TOKENS, DIM), R), tensor(mesh, (DIM, Q_LORA), R)
    aten.matmul(x, weight).redistribute(mesh, [R])


def output_backward(mesh: DeviceMesh) -> None:
    """The gradients of the projection to the vocabulary, which is cut by columns."""
    grad, x = tensor(mesh, (1, TOKENS, VOCABULARY), Shard(2)), tensor(mesh, (1, TOKENS, DIM), R)
    aten.matmul_backward(grad, x, tensor(mesh, (DIM, VOCABULARY), Shard(1)), [True, True])


def tensor(mesh: DeviceMesh, shape: tuple[int, ...], placement: Any) -> DTensor:
    local = [size // mesh.size() if placement == Shard(dim) else size for dim, size in enumerate(shape)]
    return DTensor.from_local(
        torch.empty(local, dtype=torch.bfloat16, device=DEVICE), mesh, [placement], run_check=False
    )


def traffic(case: Callable[[DeviceMesh], None], strategies: Any) -> dict[str, Any]:
    with fake_ranks(RANKS), strategies(), whole_matmul():
        mesh = init_device_mesh(DEVICE, (RANKS,))
        with fake_device(), torch.no_grad():
            case(mesh)  # when DTensor meets an operator for the first time, it runs it once more
            with CommDebugMode() as counts:
                case(mesh)
            with Collectives() as collectives:
                case(mesh)
        assert counts.get_total_counts() == len(collectives.calls)
        kinds = ", ".join(f"{kind} {count}" for kind, count in collectives.kinds.items())
        return {"collectives": kinds or "none", "MiB sent a rank": round(collectives.sent / 2**20, 1)}


def host_time(op: Any, mesh_shape: tuple[int, ...]) -> float:
    """The mean time in µs of a choice that is not cached yet, over every pair of placements of the operands."""
    propagator = DTensor._op_dispatcher.sharding_propagator
    mesh = init_device_mesh("cpu", mesh_shape)
    one = [R, Shard(0), Shard(1), P]
    info = propagator.op_to_schema_info.get(op)
    times = []
    for placements in itertools.product(itertools.product(one, repeat=len(mesh_shape)), repeat=2):
        specs = [
            DTensorSpec(mesh, here, tensor_meta=TensorMeta(shape, (shape[1], 1), torch.bfloat16))
            for here, shape in zip(placements, (torch.Size((64, 32)), torch.Size((32, 96))), strict=True)
        ]
        schema = OpSchema(op, tuple(specs), {}, info)
        start = time.perf_counter()
        propagator.propagate_op_sharding_non_cached(schema)
        times.append((time.perf_counter() - start) * 1e6)
    return statistics.mean(times)


def host_times(mesh_shape: tuple[int, ...]) -> dict[str, float]:
    ways: dict[str, tuple[Any, Any]] = {
        "ours": (aten.matmul.default, our_matmul_sharding),
        "DTensor's for aten.mm": (aten.mm.default, nullcontext),
    }
    if has_sharding_rule(aten.matmul.default):
        ways["torch_npu's"] = (aten.matmul.default, nullcontext)
    times: dict[str, list[float]] = {name: [] for name in ways}
    ranks = 2 ** len(mesh_shape)
    for _ in range(REPEATS if len(mesh_shape) == 1 else 3):
        for name, (op, strategies) in ways.items():
            with fake_ranks(ranks), strategies(), whole_matmul():
                times[name].append(host_time(op, mesh_shape))
    return {name: round(statistics.median(some)) for name, some in times.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    strategies: dict[str, Any] = {"torch_npu up to 2.9": cut_inside, "ours": our_matmul_sharding}
    if has_sharding_rule(aten.matmul.default):
        strategies["torch_npu, loaded"] = nullcontext
    rows = [
        {"case": case.__name__, "strategies": name, **traffic(case, strategy)}
        for case in (q_lora, output_backward)
        for name, strategy in strategies.items()
    ]
    for row in rows:
        print(" | ".join(map(str, row.values())))
    times = {"x".join(map(str, mesh)): host_times(mesh) for mesh in ((2,), (2, 2))}
    for mesh, some in times.items():
        ratios = ", ".join(f"{name} {value} µs ({value / some['ours']:.1f})" for name, value in some.items())
        print(f"host time of a choice, mesh {mesh}: {ratios}")
    if arguments.json:
        arguments.json.write_text(
            json.dumps(
                {"machine": os.uname().machine, "torch": torch.__version__, "rows": rows, "times": times}, indent=1
            )
        )


if __name__ == "__main__":
    main()
