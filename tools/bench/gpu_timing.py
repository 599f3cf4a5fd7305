"""Times on a GPU without the host in them, the limits they are held against, and where a table comes from."""

from __future__ import annotations

import json
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
import triton
from torch import Tensor
from triton.testing import do_bench

Run = Callable[[], Any]


@dataclass(frozen=True)
class Machine:
    copy_rate: float
    """Bytes read and written in a second by a device copy."""
    matmul_rate: float
    """Floating point operations in a second of a large bfloat16 product."""

    def limit_ms(self, bytes: float = 0, flops: float = 0) -> float:
        return 1e3 * max(bytes / self.copy_rate, flops / self.matmul_rate)


def device_ms(build: Callable[[], Run], budget_ms: float = 30.0) -> float:
    """The median time on the device of what ``build`` returns, its launches replayed from a graph, with a cold cache.

    A graph takes the host out of short kernels, and takes nothing that waits for the device: so it shows that besides.
    ``build`` runs on the stream that is timed: a backward pass runs on the stream of its forward pass.
    """
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        run = build()
        run()
        run()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            run()
        cold = torch.empty(256 << 20, dtype=torch.int8, device="cuda")
        times: list[float] = []
        while len(times) < 5 or (len(times) < 50 and sum(times) < budget_ms):
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            cold.zero_()
            start.record()
            graph.replay()
            end.record()
            end.synchronize()
            times.append(start.elapsed_time(end))
    torch.cuda.current_stream().wait_stream(stream)
    return statistics.median(times)


def forward_ms(run: Run) -> float:
    return device_ms(lambda: run)


def backward_ms(forward: Callable[[], Tensor], inputs: Sequence[Tensor], grad: Tensor) -> float:
    """The time of the backward pass of ``forward``, alone."""

    def build() -> Run:
        output = forward()
        return lambda: torch.autograd.grad(output, inputs, grad, retain_graph=True)

    return device_ms(build)


def host_us(run: Run, repeats: int = 20) -> float:
    """How long the host takes to launch ``run`` when the device keeps it from nothing."""
    run()
    times = []
    for _ in range(repeats):
        torch.cuda.synchronize()
        start = time.perf_counter()
        run()
        times.append(time.perf_counter() - start)
    torch.cuda.synchronize()
    return 1e6 * statistics.median(times)


def measure_machine() -> Machine:
    source = torch.empty(2 << 30, dtype=torch.int8, device="cuda")
    target = torch.empty_like(source)
    # not from a graph: there a copy is left to another engine, which is slower
    copy = do_bench(lambda: target.copy_(source), return_mode="median")
    a, b = (torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    matmul = forward_ms(lambda: a @ b)
    return Machine(2 * source.numel() / copy * 1e3, 2 * 8192**3 / matmul * 1e3)


def timed(run: Run, flops: float = 0, **row: Any) -> dict[str, Any]:
    """``row`` with the median time, the rate, and the peak of memory beyond what was there before."""
    run()
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    run()
    torch.cuda.synchronize()
    peak = torch.cuda.max_memory_allocated() - before
    ms = do_bench(run, warmup=20, rep=150, return_mode="median")
    return row | {"ms": ms, "tflops": flops / ms / 1e9, "peak_mib": peak / 2**20}


def write(file: Path, rows: list[dict[str, Any]], **more: Any) -> None:
    """``rows`` as JSON, with the date, the machine, the versions and the command that made them."""
    about = {
        "date": datetime.now(UTC).date().isoformat(),
        "machine": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "triton": triton.__version__,
        "command": f"python tools/bench/{Path(sys.argv[0]).name} {' '.join(sys.argv[1:])}".partition(" --json")[0],
    }
    file.write_text(json.dumps({**about, **more, "rows": rows}, indent=1) + "\n")
