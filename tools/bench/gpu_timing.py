"""Times on a GPU without the host in them, and the limits they are held against."""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch._functorch.config as functorch_config
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

    def rates(self) -> dict[str, float]:
        return {"copy_GB_s": self.copy_rate / 1e9, "matmul_TFLOP_s": self.matmul_rate / 1e12}


def device_ms(builds: Mapping[str, Callable[[], Run]], budget_ms: float = 30.0) -> dict[str, float]:
    """The median times on the device of what ``builds`` return, their launches replayed from graphs, with a cold cache.

    In turns, one replay each, the order drawn anew every time: the clock falls with what was multiplied before, so what
    is compared shares it. A graph takes the host out of short kernels, and takes nothing that waits for the device: so
    it shows that besides. A ``build`` runs on the stream that is timed: a backward pass runs on the stream of its
    forward pass.
    """
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    draw = random.Random(0)
    with torch.cuda.stream(stream):
        runs = {name: build() for name, build in builds.items()}  # they hold what their graphs read
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
    return device_ms({name: partial(_itself, run) for name, run in runs.items()}, budget_ms)


def _itself(run: Run) -> Run:
    return run


def backward_ms(
    forwards: Mapping[str, Run], inputs: Sequence[Tensor], grad: Tensor, besides: Mapping[str, Run] | None = None
) -> dict[str, float]:
    """The times of the backward passes of ``forwards``, alone; and of what is to be timed ``besides``, in turns."""
    builds = {name: partial(_backward, forward, inputs, grad) for name, forward in forwards.items()}
    return device_ms(builds | {name: partial(_itself, run) for name, run in (besides or {}).items()})


def _backward(forward: Run, inputs: Sequence[Tensor], grad: Tensor) -> Run:
    output = forward()
    return lambda: torch.autograd.grad(output, inputs, grad, retain_graph=True)


def compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    """``function`` by torch.compile: what PyTorch itself makes of small ops."""
    # a graph of a backward pass is replayed, so nothing that was saved for it may be written over
    functorch_config.donated_buffer = False
    return torch.compile(function, dynamic=False)


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
    matmul = forward_ms({"": lambda: a @ b})[""]
    return Machine(2 * source.numel() / copy * 1e3, 2 * 8192**3 / matmul * 1e3)


def size(*values: Any) -> int:
    """The bytes of the tensors among ``values``."""
    return sum(value.nbytes for value in values if isinstance(value, Tensor))


def timed(run: Run, flops: float = 0, **row: Any) -> dict[str, Any]:
    """``row`` with the time by :func:`device_ms`, the rate, and the peak of memory beyond what was there before."""
    return _timed(partial(_itself, run), flops, row)


def timed_backward(forward: Run, inputs: Sequence[Tensor], grad: Tensor, **row: Any) -> dict[str, Any]:
    """As :func:`timed`, of the backward pass of ``forward`` alone."""
    return _timed(partial(_backward, forward, inputs, grad), 0, row)


def _timed(build: Callable[[], Run], flops: float, row: dict[str, Any]) -> dict[str, Any]:
    # built anew for the time: what autograd kept of this one belongs to another stream
    peak = _peak_bytes(build())
    ms = device_ms({"": build})[""]
    return row | {"ms": ms, "tflops": flops / ms / 1e9, "peak_mib": peak / 2**20}


def _peak_bytes(run: Run) -> int:
    run()
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    run()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before
