"""Shared parts of the benchmarks: device timing, rows of tables, and JSON records of results."""

from __future__ import annotations

import argparse
import json
import os
import platform
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import partial
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
import torch._functorch.config as functorch_config
from torch import Tensor

PEERS = ("liger-kernel", "attn_gym")
"""Libraries that are also measured if they are installed."""
ROOT = Path(__file__).resolve().parents[2]
CONFIGS = ROOT / "train_configs"
ONE_RANK = ["--parallelism.data_parallel_shard_degree", "1", "--parallelism.expert_parallel_degree", "1"]
GIB = 1 << 30
CONVERTERS = {
    "llama3": ["npu_rms_norm", "npu_rope", "npu_attention"],
    "qwen3": ["npu_rms_norm", "npu_rope", "npu_attention"],
    "qwen3_moe": ["npu_rms_norm", "npu_rope", "npu_attention", "npu_permute", "npu_gmm"],
    "deepseek_v3": ["npu_rms_norm", "npu_rope", "npu_attention", "npu_permute", "npu_gmm"],
    "deepseek_v32": ["npu_rms_norm", "npu_rope", "npu_gating", "npu_permute", "npu_gmm", "npu_dsa"],
    "qwen3_vl": ["npu_rms_norm", "npu_rope", "npu_mrope", "npu_attention"],
}
"""All converters of each model."""

Row = dict[str, Any]
Run = Callable[[], Any]


def parser_of(doc: str | None) -> argparse.ArgumentParser:
    """Return a parser with the help text ``doc`` and the option ``--json``."""
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, metavar="FILE", help="file for the results")
    return parser


def need_gpu() -> None:
    """Exit with an error if there is no GPU."""
    if not torch.cuda.is_available():
        raise SystemExit(f"{Path(sys.argv[0]).name} needs a GPU")


def machine(device: str = "cuda") -> str:
    """Return the name of the GPU or of the processor. ``/proc/cpuinfo`` has no name on ARM."""
    if device != "cpu":
        return torch.get_device_module(device).get_device_name()
    lines = subprocess.run(["lscpu"], capture_output=True, text=True, check=True).stdout.splitlines()
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("Model name")]
    return f"{os.cpu_count()}-core {platform.machine()}" + (f" ({names[0]})" if names else "")


def installed(names: tuple[str, ...]) -> dict[str, str]:
    """Return the versions of the installed packages among ``names``."""
    found = {}
    for name in names:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found


def peers_in(folder: Path, modules: Mapping[str, str]) -> dict[str, str]:
    """Make ``folder`` importable and return the versions of the peers in it, by the names of their ``modules``."""
    sys.path.insert(0, str(folder))
    found = {name: import_module(module) for name, module in modules.items() if find_spec(module)}
    return {name: getattr(module, "__version__", "from source") for name, module in found.items()}


def partial_file(file: Path) -> Path:
    """Return the file for incomplete results: ops.partial.json for ops.json."""
    return file.with_suffix(".partial.json")


def store(file: Path | None, rows: Iterable[Row], device: str = "cuda", /, **more: Any) -> list[Row]:
    """Return all ``rows``, and write them to ``file`` as JSON with the date, the machine, the versions and the command.

    Until the last row they are in :func:`partial_file`: an interrupted run keeps its rows and does not change ``file``.
    """
    if file is None:
        return [*rows]
    about = {
        "date": datetime.now(UTC).date().isoformat(),
        "machine": machine(device),
        "torch": torch.__version__,
        "triton": installed(("triton",)).get("triton", "not installed"),
        "peers": installed(PEERS),
        "command": f"python tools/bench/{Path(sys.argv[0]).name} {' '.join(sys.argv[1:])}".partition(" --json")[0],
    }
    found: list[Row] = []
    for row in rows:
        found.append(row)
        partial_file(file).write_text(json.dumps({**about, **more, "rows": found}, indent=1) + "\n")
    partial_file(file).replace(file)
    return found


def printed(parts: Iterable[Iterable[Row]], line: Callable[[Row], str]) -> Iterator[Row]:
    """Print each row of the ``parts`` and pass it on. The memory of a part is freed after it."""
    for part in parts:
        for row in part:
            print(line(row), flush=True)
            yield row
        if torch.cuda.is_available():
            torch.cuda.empty_cache()


def rank_environment(**more: str) -> dict[str, str]:
    """Return the environment of a training process with one rank, as a launcher sets it."""
    launcher = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "localhost", "MASTER_PORT": "0"}
    paths = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    return {**os.environ, **launcher, "PYTHONPATH": paths, **more}


@contextmanager
def trainer_of(arguments: list[str]) -> Iterator[Any]:
    """Build the trainer of a job in this process, and close it at the end. The job leaves no files."""
    import torchtitan_npu.trainer as trainer_module
    from torchtitan_npu.config.parser import JobConfigManager

    with tempfile.TemporaryDirectory() as folder:
        config = JobConfigManager().parse_args(arguments)
        config.job.dump_folder, config.checkpoint.enable = folder, False
        config.metrics.enable_tensorboard = False
        trainer = trainer_module.Trainer(config)
        yield trainer
        trainer.close()


@dataclass(frozen=True)
class Machine:
    """Hold the measured rates of the GPU."""

    copy_rate: float
    """Bytes per second that a device copy reads and writes."""
    matmul_rate: float
    """Floating-point operations per second of a large bfloat16 matmul."""

    def limit_ms(self, bytes: float = 0, flops: float = 0) -> float:
        """Return the least time in milliseconds to move ``bytes`` and compute ``flops``."""
        return 1e3 * max(bytes / self.copy_rate, flops / self.matmul_rate)

    def rates(self) -> dict[str, float]:
        """Return the rates as they are stored in the results."""
        return {"copy_GB_s": self.copy_rate / 1e9, "matmul_TFLOP_s": self.matmul_rate / 1e12}


def device_ms(builds: Mapping[str, Callable[[], Run]], budget_ms: float = 30.0) -> dict[str, float]:
    """Return the median device times in milliseconds, replayed from CUDA graphs with a cold cache.

    All candidates take turns in random order, because the GPU's clock depends on the preceding work. A graph removes
    the host time of short kernels. It also fails on code that waits for the device. Each ``build`` runs on the timed
    stream, because a backward pass runs on the stream of its forward pass.
    """
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    draw = random.Random(0)
    with torch.cuda.stream(stream):
        runs = {name: build() for name, build in builds.items()}  # keeps the tensors of the graphs alive
        graphs = {name: _graph(run, stream) for name, run in runs.items()}
        cold = torch.empty(256 << 20, dtype=torch.int8, device="cuda")
        times: dict[str, list[float]] = {name: [] for name in graphs}
        rounds = 0
        while rounds < 5 or (rounds < 50 and min(map(sum, times.values())) < budget_ms):
            for name in draw.sample(list(graphs), len(graphs)):
                start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
                cold.zero_()
                start.record()
                graphs[name].replay()
                end.record()
                end.synchronize()
                times[name].append(start.elapsed_time(end))
            rounds += 1
    torch.cuda.current_stream().wait_stream(stream)
    return {name: statistics.median(of_name) for name, of_name in times.items()}


def _graph(run: Run, stream: torch.cuda.Stream) -> torch.cuda.CUDAGraph:
    run()
    run()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        run()
    return graph


def forward_ms(runs: Mapping[str, Run], budget_ms: float = 30.0) -> dict[str, float]:
    """Return the device times of ``runs``."""
    return device_ms({name: lambda run=run: run for name, run in runs.items()}, budget_ms)  # type: ignore[misc]


def backward_of(forward: Run, inputs: Sequence[Tensor], grad: Tensor) -> Run:
    """Run ``forward``, and return its backward pass."""
    output = forward()
    return lambda: torch.autograd.grad(output, inputs, grad, retain_graph=True)


def backward_ms(runs: Mapping[str, Run], inputs: Sequence[Tensor], grad: Tensor, **besides: Run) -> dict[str, float]:
    """Return the device times of the backward passes of ``runs``, and of the runs ``besides``."""
    builds = {name: partial(backward_of, run, inputs, grad) for name, run in runs.items()}
    return device_ms(builds | {name: lambda run=run: run for name, run in besides.items()})  # type: ignore[misc]


def compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    """Compile ``function`` with torch.compile."""
    # The backward pass is replayed, so its saved tensors must not be overwritten.
    functorch_config.donated_buffer = False
    return torch.compile(function, dynamic=False)


def host_us(run: Run, repeats: int = 20) -> float:
    """Return the median host time in microseconds to launch ``run`` on an idle device."""
    run()
    times = []
    for _ in range(repeats):
        torch.cuda.synchronize()
        start = time.perf_counter()
        run()
        times.append(time.perf_counter() - start)
    torch.cuda.synchronize()
    return 1e6 * statistics.median(times)


def launches(run: Run) -> int:
    """Return the number of kernels, copies and fills that ``run`` launches."""
    run()
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        run()
        torch.cuda.synchronize()
    return sum(event.device_type == torch.autograd.DeviceType.CUDA for event in profile.events())


def measure_machine() -> Machine:
    """Measure the rates of a device copy and of a matmul."""
    from triton.testing import do_bench

    source = torch.empty(2 << 30, dtype=torch.int8, device="cuda")
    target = torch.empty_like(source)
    # Not from a graph: there the copy runs on a slower copy engine.
    copy = do_bench(lambda: target.copy_(source), return_mode="median")
    a, b = (torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    matmul = forward_ms({"": lambda: a @ b})[""]
    return Machine(2 * source.numel() / copy * 1e3, 2 * 8192**3 / matmul * 1e3)


def size(*values: Any) -> int:
    """Return the bytes of the tensors among ``values``."""
    return sum(value.nbytes for value in values if isinstance(value, Tensor))


def timed(run: Run, flops: float = 0, backward: tuple[Sequence[Tensor], Tensor] | None = None, **row: Any) -> Row:
    """Return ``row`` with the time of :func:`device_ms`, the rate, and the peak of additional memory.

    With ``backward``, the inputs and the gradient of the output, only the backward pass of ``run`` is measured.
    """
    build: Callable[[], Run] = partial(backward_of, run, *backward) if backward else lambda: run
    # built again for timing: the autograd graph of this one belongs to another stream
    peak = peak_bytes(build())
    ms = device_ms({"": build})[""]
    return row | {"ms": ms, "tflops": flops / ms / 1e9, "peak_mib": peak / 2**20}


def peak_bytes(run: Run) -> int:
    """Return the peak of additional memory of a second run."""
    run()
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    run()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before


BF16 = torch.bfloat16
TOKENS, HIDDEN, TOP_K, EXPERT_HIDDEN = 4096, 7168, 8, 2048


def op_row(op: str, shape: str, times: dict[str, float], limit: float, worst: float, host: float | None = None) -> Row:
    """Return the measurement of an operator.

    Args:
        times: milliseconds of each implementation, with our kernel as "ours" and eager code as "small ops".
        limit: milliseconds that the hardware needs at least.
        worst: the largest error in units of bfloat16 rounding of the float64 result.
        host: microseconds of the host to launch our kernel.
    """
    peers = {name: ms for name, ms in times.items() if name not in ("small ops", "ours")}
    measured = {"eager": times["small ops"], "peers": peers, "ours": times["ours"], "limit": limit}
    return {"op": op, "shape": shape, **measured, "host_us": host, "error": worst}


def op_line(row: Row) -> str:
    """Return the table row of an :func:`op_row` for the console."""
    peer = best_peer(row["peers"]) or ("-", float("nan"))
    host = "" if row["host_us"] is None else f"{row['host_us']:.0f} µs"
    return (
        f"| {row['op']} | {row['shape']} | {row['eager']:.3f} | {peer[1]:.3f} ({peer[0]}) | {row['ours']:.3f} "
        f"| {row['limit']:.3f} | {row['limit'] / row['ours']:.0%} | {row['eager'] / row['ours']:.1f}× | {host} "
        f"| {row['error']:.2f} |"
    )


def best_peer(peers: dict[str, float]) -> tuple[str, float] | None:
    """Return the fastest public implementation. "Triton" is this package's kernel."""
    public = [pair for pair in peers.items() if pair[0] != "Triton"]
    return min(public, key=lambda pair: pair[1], default=None)


def random_tensor(*shape: int, grad: bool = False) -> Tensor:
    """Return a random bfloat16 tensor on the GPU."""
    return torch.randn(shape, device="cuda", dtype=BF16, requires_grad=grad)


def error(actual: Tensor, oracle: Tensor) -> float:
    """Return the largest error in units of its budget: bfloat16 rounding, plus float32 rounding of long sums."""
    budget = oracle.abs() * torch.finfo(BF16).eps / 2 + oracle.abs().max() * 2.0**-18 + 1e-30
    ratio = ((actual.double() - oracle).abs() / budget).max().item() if oracle.numel() else 0.0
    if not ratio <= 1.01:
        raise SystemExit(f"wrong result: {ratio:.2f} times the error budget")
    return ratio


def difference(one: Tensor, other: Tensor) -> float:
    """Return the L2 norm of the difference, relative to ``other``."""
    return ((one.double() - other.double()).norm() / other.double().norm()).item()


def compare(ours: Callable[..., Any], oracle: Callable[..., Any], *tensors: Tensor) -> float:
    """Return the largest error of ``ours`` and its gradients against ``oracle`` in float64."""
    results = []
    for function, dtype in ((ours, BF16), (oracle, torch.float64)):
        inputs = [t.detach().to(dtype).requires_grad_() for t in tensors]
        y = function(*inputs)
        torch.manual_seed(1)
        grad = torch.randn(y.shape, device="cuda", dtype=BF16)
        results.append([y.detach(), *torch.autograd.grad(y, inputs, grad.to(dtype))])
    return max(error(actual, expected) for actual, expected in zip(*results, strict=True))


def of_peer(measure: Callable[..., Row], *arguments: Any, **row: Any) -> Row:
    """Return the row of ``measure``, or a row with the error of a peer that fails."""
    import triton

    try:
        return measure(*arguments, **row)
    except (AssertionError, ImportError, RuntimeError, TypeError, ValueError, triton.TritonError) as problem:
        return row | {"failed": f"{type(problem).__name__}: {problem}".splitlines()[0][:200]}


def in_turns(builds: Mapping[str, Callable[[], Run]], work: Mapping[str, tuple[float, float]], **row: Any) -> list[Row]:
    """Return a row with time, memory, rate and limit for each of ``builds``, measured in turns by :func:`device_ms`.

    A build returns the function to measure. A peer that is missing or fails has a row with its error. ``work`` has the
    floating-point operations and the limit in ms of each build.
    """
    runs: dict[str, Run] = {}

    def prepare(build: Callable[[], Run], what: str, **row: Any) -> Row:
        run = build()
        peak = peak_bytes(run)
        runs[what] = run
        return row | {"what": what, "peak_mib": peak / 2**20}

    rows = [of_peer(prepare, build, what=what, **row) for what, build in builds.items()]
    for what, ms in forward_ms(runs).items():  # gradients, too: the runs call their operators
        flops, limit = work[what]
        (measured,) = (row for row in rows if row["what"] == what)
        measured |= {"ms": ms, "tflops": flops / ms / 1e9, "limit_ms": limit}
    return rows


def check_peer(got: Tensor, ours: Tensor, most: float) -> float:
    """Return the difference of a peer's result from ours. One above ``most`` is an error, which becomes the row."""
    if (error := difference(got, ours)) > most:
        raise ValueError(f"its result differs from ours by {error:.1e}")
    return error


def mask_of(indices: Tensor) -> Tensor:
    """Convert ``indices`` (1, S, 1, K), padded with -1, to a mask (S, S) of selected keys."""
    length = indices.shape[1]
    mask = torch.zeros(length, length + 1, dtype=torch.bool, device=indices.device)
    return mask.scatter_(-1, indices[0, :, 0].long() % (length + 1), True)[:, :length]


def show(row: Row) -> str:
    """Return a line for the console."""
    what = f"{row['what']:56}"
    if "error" in row:
        return f"{what} {row['error']:.2e}"
    if "failed" in row:
        return f"{what} failed: {row['failed']}"
    rate = f"{row['tflops']:6.0f} TFLOP/s" if row["tflops"] else " " * 14
    limit = f"{row['limit_ms'] / row['ms']:4.0%} of the limit" if "limit_ms" in row else ""
    return f"{what} {row['length']:7d} {row['ms']:9.3f} ms {rate} {row['peak_mib']:8.0f} MiB {limit}"
