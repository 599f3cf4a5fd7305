"""Compare an AdamW step of the swap optimizer with the bandwidth limit and with other implementations.

    python tools/bench/swap_optimizer.py --json out.json --picture out.png     # 1e9 and 4e9 parameters, float32

Each row is a median of steps, each timed from an idle device to an idle device. The limit is 8 bytes per parameter in
each direction at the bandwidth of the link with both directions busy, measured in the same process before and after
the steps; the better value counts.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from harness import Row, machine, parser_of, store

from torchtitan_npu.components.swap_optimizer.host_memory import link_bandwidth
from torchtitan_npu.components.swap_optimizer.slices import BUFFERS, MIB, SlicePipeline, SliceUpdate
from torchtitan_npu.components.swap_optimizer.swap_adam import SwapAdamW

LANES = {"load": "tab:blue", "update": "tab:orange", "store": "tab:green"}
SHOWN_MS = 16.0
"""Milliseconds to draw, from the middle of the step: about ten slices."""


def record_trace(device: torch.device, step: Callable[[], Any]) -> list[dict[str, Any]]:
    """Profile one ``step``. Return lane, stream, begin and length in milliseconds of each device event."""
    module = torch.get_device_module(device)
    module.synchronize()
    with torch.profiler.profile() as profiler:
        step()
        module.synchronize()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        profiler.export_chrome_trace(str(path))
        events = json.loads(path.read_text())["traceEvents"]
    lanes = {"gpu_memcpy": lambda name: "load" if "HtoD" in name else "store", "kernel": lambda name: "update"}
    found = [
        {
            "lane": lanes[event["cat"]](event["name"]),
            "stream": event["args"]["stream"],
            "begin": event["ts"] / 1e3,
            "length": event["dur"] / 1e3,
        }
        for event in events
        if event.get("cat") in lanes
    ]
    start = min((event["begin"] for event in found), default=0.0)
    return [event | {"begin": event["begin"] - start} for event in found]


def draw_trace(trace: list[dict[str, Any]], path: str) -> None:
    """Draw ``trace`` with one lane per stream, for :data:`SHOWN_MS` in the middle of the step."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    end = max((event["begin"] + event["length"] for event in trace), default=SHOWN_MS)
    left = max(0.0, end / 2 - SHOWN_MS / 2)
    figure, axes = pyplot.subplots(figsize=(10, 2.4), layout="constrained")
    for height, (lane, color) in enumerate(reversed(LANES.items())):
        bars = [(event["begin"], event["length"]) for event in trace if event["lane"] == lane]
        axes.broken_barh(bars, (height + 0.1, 0.8), facecolors=color, edgecolors="white", linewidth=0.5)
    streams = {lane: sorted({event["stream"] for event in trace if event["lane"] == lane}) for lane in LANES}
    labels = [f"{lane} (stream {', '.join(map(str, streams[lane]))})" for lane in reversed(LANES)]
    axes.set_yticks([0.5, 1.5, 2.5], labels)
    axes.set_xlim(left, min(end, left + SHOWN_MS))
    axes.set_xlabel(f"ms since the first load, of {end:.0f} ms")
    axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=150)


OPTIONS: dict[str, Any] = {"lr": 1e-4, "weight_decay": 0.1, "fused": True}
SLICE_MIB = 64
SLICES = (4, 16, 32, 64, 128, 256)
REPEATS = {"swap": 10, "serial": 3, "torchao": 3, "slices": 5}
LINK_BYTES = 1 << 30


def make_parameters(number: int, device: torch.device) -> list[torch.nn.Parameter]:
    """Return about ``number`` float32 parameters with gradients: a language model's embedding, matrices and norms."""
    dim = 4096
    shapes = [(min(number // 2 // dim, 131072), dim)]
    while sum(a * b for a, b in shapes) < number:
        shapes += [(dim, dim), (1, dim)]
    parameters = [torch.nn.Parameter(torch.randn(shape, device=device)) for shape in shapes]
    for parameter in parameters:
        parameter.grad = torch.randn_like(parameter).mul_(1e-3)
    return parameters


def timed(
    device: torch.device, work: Callable[[], Any], repeats: int, prepare: Callable[[], Any] | None = None
) -> float:
    """Return the median seconds of ``work`` after two warm-up runs. ``prepare`` runs before each, untimed."""
    module, seconds = torch.get_device_module(device), []
    for _ in range(repeats + 2):
        if prepare is not None:
            prepare()
        module.synchronize()
        start = time.perf_counter()
        work()
        module.synchronize()
        seconds.append(time.perf_counter() - start)
    return statistics.median(seconds[2:])


def memory_of_a_step(
    device: torch.device, optimizer: torch.optim.Optimizer, parameters: list[torch.nn.Parameter]
) -> dict[str, int]:
    """Return the bytes beyond parameters and gradients: held between steps, the peak of a step, and its bound.

    These are requested bytes: the allocator rounds large tensors up to 2 MiB. ``optimizer`` has already made a step,
    and nothing else is on the device.
    """
    module = torch.get_device_module(device)
    needed = sum(p.nbytes + p.grad.nbytes for p in parameters if p.grad is not None)
    module.synchronize()
    held = module.memory_stats()["requested_bytes.all.current"] - needed
    module.reset_peak_memory_stats()
    optimizer.step()
    module.synchronize()
    peak = module.memory_stats()["requested_bytes.all.peak"] - needed
    return {"held_beyond_bytes": held, "peak_bytes": peak, "peak_bound_bytes": BUFFERS * SLICE_MIB * MIB}


class SerialPipeline(SlicePipeline):
    """Load, update and store without overlap."""

    def _pass(self, turn: SliceUpdate, buffer: torch.Tensor, number: int, main: torch.Stream) -> None:
        self.module.synchronize()
        super()._pass(SliceUpdate(turn.tensors, lambda copies: self._update_alone(turn, copies)), buffer, number, main)
        self.module.synchronize()

    def _update_alone(self, turn: SliceUpdate, copies: list[torch.Tensor]) -> None:
        self.module.synchronize()
        turn.update(copies)
        self.module.synchronize()


def measure_swap(number: int, device: torch.device) -> Row:
    """Measure the swap optimizer with and without overlap, and torch's fused AdamW with states on the device."""
    parameters = make_parameters(number, device)
    total = sum(p.numel() for p in parameters)
    links = [link_bandwidth(device, size=LINK_BYTES)]

    start = time.perf_counter()
    optimizer = SwapAdamW(parameters, slice_mib=SLICE_MIB, **OPTIONS)
    result: Row = {"parameters": total, "slice_mib": SLICE_MIB}
    result["allocation_s"] = time.perf_counter() - start
    progress(f"{optimizer.host_bytes / 1e9:.1f} GB of host memory in {result['allocation_s']:.1f} s")
    result["swap_s"] = timed(device, optimizer.step, REPEATS["swap"])
    links.append(link_bandwidth(device, size=LINK_BYTES))
    result["link_bytes_per_second_each_way"] = links
    result["limit_s"] = 8 * total / max(links)
    progress(
        f"link {links[0] / 1e9:.1f}, {links[1] / 1e9:.1f} GB/s per direction, limit {result['limit_s'] * 1e3:.1f} ms"
    )
    progress(f"swap {result['swap_s'] * 1e3:.1f} ms, {result['swap_s'] / result['limit_s']:.3f} of the limit")
    memory = memory_of_a_step(device, optimizer, parameters)
    progress("beyond parameters and gradients: {held_beyond_bytes} bytes held, peak {peak_bytes}".format(**memory))
    result |= memory
    if number == NUMBERS[0]:
        result["trace"] = record_trace(device, optimizer.step)
    optimizer._pipeline = SerialPipeline(device)
    result["serial_s"] = timed(device, optimizer.step, REPEATS["serial"])
    progress(f"serial {result['serial_s'] * 1e3:.1f} ms")
    del optimizer
    result["on_device_s"] = timed(device, torch.optim.AdamW(parameters, **OPTIONS).step, REPEATS["swap"])
    progress(f"fused on device {result['on_device_s'] * 1e3:.1f} ms")
    return result


def measure_slices(number: int, device: torch.device) -> Row:
    """Measure the step for each slice size, with the limit of the same process."""
    parameters = make_parameters(number, device)
    limit = 8 * sum(p.numel() for p in parameters) / link_bandwidth(device, size=LINK_BYTES)
    seconds = {}
    for slice_mib in SLICES:
        seconds[slice_mib] = timed(
            device, SwapAdamW(parameters, slice_mib=slice_mib, **OPTIONS).step, REPEATS["slices"]
        )
        progress(f"slices of {slice_mib} MiB: {seconds[slice_mib] * 1e3:.1f} ms, {seconds[slice_mib] / limit:.3f}")
    return {"slices_s": seconds, "slices_limit_s": limit}


def measure_torchao(number: int, device: torch.device) -> Row:
    """Measure torchao's CPUOffloadOptimizer, which runs AdamW on the host."""
    from torchao.optim import CPUOffloadOptimizer

    parameters = make_parameters(number, device)
    gradients = [parameter.grad for parameter in parameters]
    optimizer = CPUOffloadOptimizer(parameters, torch.optim.AdamW, **OPTIONS)
    progress("torchao's optimizer is ready")

    def backward() -> None:  # hooks copy the gradients to the host
        optimizer.zero_grad()
        torch.autograd.backward(parameters, gradients)

    step = timed(device, optimizer.step, REPEATS["torchao"], prepare=backward)
    progress(f"torchao {step * 1e3:.1f} ms")
    return {"torchao_s": step}


def progress(text: str) -> None:
    print(f"  {text}", file=sys.stderr, flush=True)


def in_a_process(arguments: list[str]) -> dict[str, Any]:
    """Measure in a new process, which frees its host memory at the end."""
    done = subprocess.run([sys.executable, __file__, *arguments], stdout=subprocess.PIPE, text=True, check=True)
    return json.loads(done.stdout.splitlines()[-1])


def table(rows: list[dict[str, Any]]) -> str:
    lines = ["| parameters | AdamW step | time (ms) | against the limit |", "|---|---|---|---|"]
    names = {
        "limit_s": "the link's limit",
        "swap_s": "swap",
        "serial_s": "serial load, update, store",
        "torchao_s": "torchao CPUOffloadOptimizer",
        "on_device_s": "fused, states on the device",
    }
    for row in rows:
        for key, name in names.items():
            value = f"{row[key] * 1e3:.1f} | {row[key] / row['limit_s']:.2f}" if row.get(key) else "- | -"
            lines.append(f"| {row['parameters']:.3g} | {name} | {value} |")
    return "\n".join(lines)


MEASURES = {"swap": measure_swap, "torchao": measure_torchao, "slices": measure_slices}
NUMBERS = (10**9, 4 * 10**9)
"""Numbers of parameters. The first has a trace, and a step for each slice size."""


def rows() -> Iterator[Row]:
    for number in NUMBERS:
        progress(f"{number:.0e} parameters")
        row = in_a_process(["--measure", "swap", str(number)]) | in_a_process(["--measure", "torchao", str(number)])
        yield row | (in_a_process(["--measure", "slices", str(number)]) if number == NUMBERS[0] else {})


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--picture", help="draw the trace of a step")
    parser.add_argument("--measure", nargs=2, metavar=("WHAT", "PARAMETERS"), help="measure in this process")
    args = parser.parse_args()
    device = torch.accelerator.current_accelerator(check_available=True)
    if device is None:
        raise SystemExit("swap_optimizer.py needs a GPU or an NPU")
    if args.measure:
        what, number = args.measure
        print(json.dumps(MEASURES[what](int(number), device)))
        return
    measured = store(args.json, rows(), device.type)
    print(f"{machine(device.type)}, torch {torch.__version__}, float32 parameters\n\n{table(measured)}")
    if args.picture:
        draw_trace(measured[0]["trace"], args.picture)


if __name__ == "__main__":
    main()
