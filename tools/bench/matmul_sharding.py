"""Measure the traffic and the host time of DTensor's strategies for matmul under tensor parallelism.

    python tools/bench/matmul_sharding.py                        # the tables of docs/explanation/matmul-sharding.md
    python tools/bench/matmul_sharding.py --host-time

The first form runs two matmuls of DeepSeek-V3 on fake tensors of their real sizes over fake ranks. If torch_npu is
loaded (docs/explanation/contract-tests.md), it also runs all placements of a matmul, and training steps, with
torch_npu's strategies and with this package's.

``--host-time`` measures how long the host takes to choose a strategy for a matmul and its gradients: this package's,
DTensor's for ``aten.mm``, to which torch decomposes a matmul on other backends, and torch_npu's if it is loaded. They
take turns in one run, shape inference included.
"""

from __future__ import annotations

import argparse
import copy
import itertools
import math
import random
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
from torch.distributed.tensor._op_schema import OpSchema
from torch.distributed.tensor.debug import CommDebugMode
from torch.distributed.tensor.experimental import register_sharding

import torchtitan_npu
from torchtitan_npu import platform

sys.path.insert(0, str(Path(__file__).parents[2]))
platform.prepare()
torchtitan_npu.register()

from torchtitan.protocols.train_spec import get_train_spec  # noqa: E402

from tests._helpers.collectives import Collective, Collectives  # noqa: E402
from tests._helpers.undecomposed_matmul import undecomposed_matmul  # noqa: E402
from torchtitan_npu.config.job_config import JobConfig  # noqa: E402
from torchtitan_npu.distributed.matmul_sharding import use_matmul_sharding  # noqa: E402
from torchtitan_npu.distributed.parallel_dims import ParallelDims  # noqa: E402
from torchtitan_npu.layers.auxiliary_loss import auxiliary_losses  # noqa: E402
from torchtitan_npu.planner import AssumedLoad, fake_device, fake_ranks  # noqa: E402
from torchtitan_npu.torch_internals.dtensor import clear_sharding_cache, has_rule  # noqa: E402

aten = torch.ops.aten
R, P = Replicate(), Partial()
WITH_TORCH_NPU = has_rule(aten.matmul.default)  # before ours are registered
RANKS, TOKENS, DIM, Q_LORA, VOCABULARY = 4, 4096, 7168, 1536, 129280
DEVICE = "npu" if platform.backend() == "npu" else "cpu"
"""On a CPU, DTensor uses an all-gather instead of an all-to-all."""

LATENTS = {"n_layers": 2, "q_lora_rank": 24, "moe_args.num_experts": 4, "moe_args.top_k": 2}
"""Two layers, one with experts. Gradients of latents are partial sums over the tensor-parallel ranks."""
REAL_WIDTH = {"n_layers": 2, "n_dense_layers": 1, "moe_args.num_experts": 16, "attn_type": "sdpa"}
STEPS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "llama3": ("llama3", "debugmodel", {}),
    "qwen3": ("qwen3", "debugmodel", {}),
    "deepseek_v3": ("deepseek_v3", "debugmodel", LATENTS),
    "deepseek_v32": ("deepseek_v32", "debugmodel", LATENTS),
    "deepseek_v3, layers in their real width": ("deepseek_v3", "671B", {**REAL_WIDTH, "attn_mask_type": "causal"}),
    "deepseek_v32, layers in their real width": ("deepseek_v32", "671B", REAL_WIDTH),
}
"""Model, base flavor and changed arguments of each row."""


def shard_inner_dimension() -> None:
    """Register the strategy in the bug report about torch_npu: always shard the inner dimension.

    It stays registered, so it has to be measured last.
    """

    @register_sharding(aten.matmul.default)
    def matmul(left: Any, right: Any) -> Any:
        return [([P], [Shard(left.ndim - 1), Shard(0)])]

    @register_sharding(aten.matmul_backward.default)
    def backward(grad: Any, left: Any, right: Any, mask: Any) -> Any:
        inner = [Shard(left.ndim - 1), Shard(0)]
        return [(inner, [R, *inner, None])]

    clear_sharding_cache()


def q_lora(mesh: DeviceMesh) -> None:
    """Run the projection to the query latents, with replicated input and output."""
    x, weight = tensor(mesh, (1, TOKENS, DIM), R), tensor(mesh, (DIM, Q_LORA), R)
    aten.matmul(x, weight).redistribute(mesh, [R])


def output_backward(mesh: DeviceMesh) -> None:
    """Run the backward of the projection to the vocabulary, sharded by columns."""
    grad, x = tensor(mesh, (1, TOKENS, VOCABULARY), Shard(2)), tensor(mesh, (1, TOKENS, DIM), R)
    aten.matmul_backward(grad, x, tensor(mesh, (DIM, VOCABULARY), Shard(1)), [True, True])


def tensor(mesh: DeviceMesh, shape: tuple[int, ...], placement: Any) -> DTensor:
    """Return a DTensor with the local shard of the first rank."""
    local = [math.ceil(size / mesh.size()) if placement == Shard(dim) else size for dim, size in enumerate(shape)]
    whole = torch.empty(shape, dtype=torch.bfloat16, device=DEVICE)
    return DTensor.from_local(
        whole.new_empty(local), mesh, [placement], run_check=False, shape=whole.shape, stride=whole.stride()
    )


def traffic(case: Callable[[DeviceMesh], None], enabled: bool) -> str:
    """Return the collectives of ``case`` and the MiB sent per rank, by our strategies if ``enabled``."""
    with fake_ranks(RANKS), undecomposed_matmul():
        mesh = init_device_mesh(DEVICE, (RANKS,))
        use_matmul_sharding(mesh, enabled)
        with fake_device(), torch.no_grad():
            case(mesh)  # DTensor runs a new operator once more for its shape
            with CommDebugMode() as counts:
                case(mesh)
            with Collectives() as collectives:
                case(mesh)
        assert counts.get_total_counts() == len(collectives.calls)
        calls = ", ".join(f"{name} {count}" for name, count in collectives.kinds.items())
        return f"{calls or 'none'}: {round(collectives.sent / 2**20, 1)} MiB"


def step(row: str, enabled: bool) -> tuple[Any, list[Collective]]:
    """Run forward and backward with tensor parallelism 2 and FSDP 4. Return the model and its collectives."""
    model, flavor, changes = STEPS[row]
    with fake_ranks(8):
        config = JobConfig()
        config.model.name, config.training.seq_len = model, 256
        config.parallelism.tensor_parallel_degree = 2
        config.activation_checkpoint.mode = "none"
        dims = ParallelDims(dp_replicate=1, dp_shard=4, cp=1, tp=2, pp=1, ep=1, etp=1, world_size=8)
        use_matmul_sharding(dims.get_mesh("tp"), enabled)
        spec = get_train_spec(model)
        args: Any = copy.deepcopy(spec.model_args[flavor])
        for path, value in changes.items():
            owner, _, field = path.rpartition(".")
            setattr(getattr(args, owner) if owner else args, field, value)
        args.update_from_config(config)
        with torch.device("meta"):
            whole: Any = spec.model_cls(args)
        parallel: Any = spec.parallelize_fn(whole, dims, config)
        # a device's backward thread has a separate cache of DTensor's decisions, which no other thread can clear
        with fake_device(), AssumedLoad(), torch.autograd.set_multithreading_enabled(False):
            parallel.to_empty(device="npu")
            for _ in range(2):  # DTensor runs a new operator once more for its shape
                with Collectives() as collectives:
                    tokens = torch.zeros(2, 256, dtype=torch.int64, device="npu")
                    for loss in auxiliary_losses([parallel]):
                        loss.start_batch(torch.ones((), device="npu"), 1)
                    logits = parallel(tokens)
                    (logits.to_local() if isinstance(logits, DTensor) else logits).float().sum().backward()
        return parallel, collectives.calls


def step_row(row: str, of_torch_npu: list[Collective], ours: list[Collective]) -> str:
    cells = [f"{len(calls)}, {sum(x.sent for x in calls) / 1e6:.2f} MB" for calls in (of_torch_npu, ours)]
    return f"| {row} | {cells[0]} | {cells[1]}{', the same ones' if of_torch_npu == ours else ''} |"


SIZES = {"even": ((16, 4096, 8192), (8192, 2048)), "uneven": ((15, 4095, 8191), (8191, 2047))}


def bytes_moved(op: Any, sizes: str, enabled: bool) -> list[int]:
    """Return the bytes that a rank sends, for every combination of placements on two ranks.

    They include the reduction of a partial dX.
    """
    left_shape, right_shape = SIZES[sizes]
    shapes = [left_shape, right_shape]
    backward = op is aten.matmul_backward
    if backward:
        shapes.insert(0, (*left_shape[:-1], right_shape[-1]))
    every = [[R, *map(Shard, range(len(shape))), P] for shape in shapes]
    moved = []
    with fake_ranks(2):
        mesh = init_device_mesh(DEVICE, (2,))
        use_matmul_sharding(mesh, enabled)
        with fake_device(), torch.no_grad(), undecomposed_matmul():
            for placements in itertools.product(*every):
                inputs = [tensor(mesh, shape, x) for shape, x in zip(shapes, placements, strict=True)]
                for _ in range(2):  # DTensor runs a new operator once more for its shape
                    with Collectives() as collectives:
                        results = op(*inputs, [True, True]) if backward else op(*inputs)
                        if backward and results[0].placements[0].is_partial() and not placements[-1].is_shard():
                            results[0].redistribute(mesh, [Shard(1)])
                moved.append(collectives.sent)
    return moved


# --- host time ---

Shapes = Sequence[tuple[int, ...]]
BATCH, FEW_TOKENS, SMALL_DIM, SMALL_WIDTH = 4, 64, 32, 96
X, W, Y = (BATCH, FEW_TOKENS, SMALL_DIM), (SMALL_DIM, SMALL_WIDTH), (BATCH, FEW_TOKENS, SMALL_WIDTH)
FLAT_X, FLAT_Y = (BATCH * FEW_TOKENS, SMALL_DIM), (BATCH * FEW_TOKENS, SMALL_WIDTH)
MATMUL: tuple[Any, Shapes] = aten.matmul.default, ((FEW_TOKENS, SMALL_DIM), W)
MATMUL_BACKWARD: tuple[Any, Shapes] = aten.matmul_backward.default, (Y, X, W)
MM: list[tuple[Any, Shapes]] = [(aten.mm.default, ((FEW_TOKENS, SMALL_DIM), W))]
TWO_MM: list[tuple[Any, Shapes]] = [
    (aten.mm.default, (FLAT_Y, (SMALL_WIDTH, SMALL_DIM))),
    (aten.mm.default, ((SMALL_DIM, BATCH * FEW_TOKENS), FLAT_Y)),
]
SAMPLES = 60
"""Number of placement combinations to sample, out of up to ten thousand."""
REPEATS = 5


def mean_time(op: Any, shapes: Shapes, mesh_shape: tuple[int, ...], enabled: bool) -> float:
    """Return the mean time in µs of an uncached choice, over combinations of placements."""
    propagator = DTensor._op_dispatcher.sharding_propagator
    mesh = init_device_mesh("cpu", mesh_shape)
    use_matmul_sharding(mesh, enabled)
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
    """Return the median time in µs of each set of strategies."""
    candidates: dict[str, list[Any]] = {"ours": [whole], "DTensor's for aten.mm": decomposed}
    if WITH_TORCH_NPU:
        candidates["torch_npu's"] = [whole]
    times: dict[str, list[float]] = {name: [] for name in candidates}
    for _ in range(REPEATS):
        for name, calls in candidates.items():
            with fake_ranks(2 ** len(mesh_shape)), undecomposed_matmul():
                times[name].append(sum(mean_time(op, shapes, mesh_shape, name == "ours") for op, shapes in calls))
    return {name: round(statistics.median(some)) for name, some in times.items()}


def print_host_times() -> None:
    """Print the table of host times."""
    sys.path.insert(0, str(Path(__file__).parent))
    from harness import machine

    print(f"{machine('cpu')}, torch {torch.__version__}")
    for name, whole, decomposed in (("matmul", MATMUL, MM), ("matmul_backward", MATMUL_BACKWARD, TWO_MM)):
        for mesh in ((2,), (2, 2)):
            times = host_times(mesh, whole, decomposed)
            ours = times.pop("ours")
            ratios = ", ".join(f"{strategies} {value / ours:.1f} times" for strategies, value in times.items())
            print(f"| {name} | {'x'.join(map(str, mesh))} | {ours / 1000:.1f} ms | {ratios} |")


def print_traffic() -> None:
    """Print the tables of traffic."""
    cases = (q_lora, output_backward)
    products = {"torch_npu, loaded": [traffic(case, enabled=False) for case in cases]} if WITH_TORCH_NPU else {}
    products["ours"] = [traffic(case, enabled=True) for case in cases]
    if WITH_TORCH_NPU:
        print_comparisons()
    shard_inner_dimension()
    products = {"as the report shows": [traffic(case, enabled=False) for case in cases], **products}
    print("| product |", " | ".join(products), "|")
    for case, *cells in zip(cases, *products.values(), strict=True):
        print(f"| {case.__name__} |", " | ".join(cells), "|")


def print_comparisons() -> None:
    """Print the tables that compare torch_npu's strategies with ours."""
    print("| operator, sizes | placements | nothing sent: torch_npu | ours | less sent with ours | more |")
    for op, sizes in itertools.product((aten.matmul, aten.matmul_backward), SIZES):
        upstream, ours = bytes_moved(op, sizes, enabled=False), bytes_moved(op, sizes, enabled=True)
        pairs = list(zip(upstream, ours, strict=True))
        less, more = sum(here < there for there, here in pairs), sum(here > there for there, here in pairs)
        print(f"| {op.__name__}, {sizes} | {len(ours)} | {upstream.count(0)} | {ours.count(0)} | {less} | {more} |")
    print("| model | torch_npu | ours |")
    for row in STEPS:
        print(step_row(row, step(row, enabled=False)[1], step(row, enabled=True)[1]))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--host-time", action="store_true", help="measure the host time instead of the traffic")
    args = parser.parse_args()
    if args.host_time:
        print_host_times()
    else:
        print_traffic()


if __name__ == "__main__":
    main()
