#!/usr/bin/env python
"""The experts' gate and up products, forward and backward: as two grouped products, or as one of both weights.

    python tools/bench/grouped_gate_up.py [--rows 4096] [--experts 8] [--dim 512] [--hidden 256] [--dtype float32]
    python tools/bench/grouped_gate_up.py --rows 32768 --experts 4 --dim 7168 --hidden 2048 --dtype bfloat16   # CUDA

Two products give two tensors, which are copied side by side for ``npu_swiglu``. One product gives that at once, of
weights that are copied side by side in each forward pass, and kept for the backward pass. The product is
``npu_grouped_matmul`` on a CPU (our stand-in) and ``torch._grouped_mm`` on CUDA, in bfloat16, where our stand-in is no
measure. A row is the median time, and the peak of memory beyond weights, rows and their gradients. On a CPU each row is
a process of its own.
"""

from __future__ import annotations

import argparse
import json
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from record import machine, write
from torch import Tensor

ROWS = ("two products", "one product")
Product = Callable[[Tensor, Tensor, Tensor], Tensor]


def gate_and_up(row: str, product: Product, x: Tensor, w1: Tensor, w3: Tensor, counts: Tensor) -> Tensor:
    """Both products side by side, (rows, 2 * hidden); ``w1`` and ``w3`` (experts, hidden, dim) as in a checkpoint."""
    if row == "one product":
        return product(x, torch.cat((w1, w3), dim=1).mT, counts)
    return torch.cat((product(x, w1.mT, counts), product(x, w3.mT, counts)), dim=-1)


def choose_product(device: str) -> Product:
    from torchtitan_npu.ops.grouped_matmul.function import grouped_matmul

    def grouped_mm(x: Tensor, weight: Tensor, counts: Tensor) -> Tensor:
        return torch._grouped_mm(x, weight, offs=counts.cumsum(0).int())

    return grouped_mm if device == "cuda" else grouped_matmul


def measure(row: str, args: argparse.Namespace) -> dict[str, Any]:
    """Median seconds and peak bytes of forward and backward."""
    from torchtitan_npu import platform, register

    platform.prepare()
    register()
    device, dtype = ("cuda" if torch.cuda.is_available() else "cpu"), getattr(torch, args.dtype)
    product = choose_product(device)
    torch.manual_seed(0)

    def random(*size: int) -> Tensor:
        return torch.randn(size, device=device, dtype=dtype, requires_grad=True)

    x, w1, w3 = random(args.rows, args.dim), *(random(args.experts, args.hidden, args.dim) for _ in range(2))
    counts = torch.full((args.experts,), args.rows // args.experts, device=device)
    for tensor in (x, w1, w3):
        tensor.grad = torch.zeros_like(tensor)
    seconds, before = [], used(device)
    for _ in range(args.repeats + 1):  # the first to warm up
        start = now(device)
        hidden = torch.ops.npu.npu_swiglu(gate_and_up(row, product, x, w1, w3, counts))
        hidden.backward(torch.ones_like(hidden))
        del hidden
        seconds.append(now(device) - start)
    peak = torch.cuda.max_memory_allocated() if device == "cuda" else resident_peak()
    return {"row": row, "seconds": statistics.median(seconds[1:]), "peak_bytes": peak - before}


def now(device: str) -> float:
    if device == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter()


def used(device: str) -> int:
    if device == "cuda":
        torch.cuda.reset_peak_memory_stats()
        return torch.cuda.memory_allocated()
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


def resident_peak() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, size in {"rows": 4096, "experts": 8, "dim": 512, "hidden": 256, "repeats": 10}.items():
        parser.add_argument(f"--{name}", type=int, default=size)
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--measure", choices=ROWS, help="one row, as JSON")
    parser.add_argument("--json", type=Path, help="where to write the numbers")
    args = parser.parse_args()
    if args.measure:
        print(json.dumps(measure(args.measure, args)))
        return
    command = [sys.executable, __file__, *sys.argv[1:]]
    runs = [subprocess.run([*command, "--measure", row], stdout=subprocess.PIPE, text=True, check=True) for row in ROWS]
    rows = [json.loads(run.stdout.splitlines()[-1]) for run in runs]
    device = "cuda" if torch.cuda.is_available() else "cpu"
    print(f"{args.rows} rows, {args.experts} experts, {args.dim} -> {args.hidden}, {args.dtype}, {machine(device)}\n")
    print("| | time (ms) | peak (MiB) |\n|---|---|---|")
    for row in rows:
        print(f"| {row['row']} | {row['seconds'] * 1e3:.2f} | {row['peak_bytes'] / 2**20:.0f} |")
    if args.json:
        write(args.json, rows, device)


if __name__ == "__main__":
    main()
