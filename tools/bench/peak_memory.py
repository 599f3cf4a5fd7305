#!/usr/bin/env python
"""Measure the peak memory of sparse attention, of a training step, and of the experts' gate and up products.

    python tools/bench/peak_memory.py attention [--seq-len 4096]
    python tools/bench/peak_memory.py prediction    # GPU
    python tools/bench/peak_memory.py gate-up [--rows 4096] [--experts 8] [--dim 512] [--hidden 256] [--dtype float32]
    python tools/bench/peak_memory.py gate-up --rows 32768 --experts 4 --dim 7168 --hidden 2048 --dtype bfloat16  # GPU

``attention`` runs forward and backward of one float32 attention layer of deepseek_v32 on the CPU, eager and with
``npu_dsa``. ``prediction`` compares the peak that `torchtitan-npu plan` predicts with the one that a GPU measures for
the same job on one rank; exit code 1 means that they differ by more than 10 %. ``gate-up`` compares two grouped
matmuls, whose results are concatenated for ``npu_swiglu``, with one grouped matmul of concatenated weights, in time
and memory. It uses ``npu_grouped_matmul`` on the CPU and ``torch._grouped_mm`` on CUDA.

Each number comes from a separate process.
"""

from __future__ import annotations

import argparse
import json
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from harness import CONFIGS, GIB, ONE_RANK, machine, need_gpu, rank_environment, trainer_of
from torch import Tensor


def resident() -> int:
    """Return the bytes that this process holds."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


def resident_peak() -> int:
    """Return the largest number of bytes that this process ever held."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def last_line(arguments: list[str]) -> str:
    """Run this program in a new process. Return the last line of its output."""
    command = [sys.executable, __file__, *arguments]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True, env=rank_environment())
    return done.stdout.splitlines()[-1]


# --- attention ---

CONVERTERS: dict[str, list[str]] = {"eager": [], "npu_dsa": ["npu_dsa"]}


def measure_attention(converters: list[str], seq_len: int) -> int:
    """Return the bytes that forward and backward add at their peak to a process that holds the layer and its input."""
    from torchtitan_npu import platform, register

    platform.prepare()
    register()
    from torchtitan.protocols.model_converter import build_model_converters
    from torchtitan.protocols.train_spec import get_train_spec

    from torchtitan_npu.config.job_config import JobConfig
    from torchtitan_npu.distributed.parallel_dims import ParallelDims
    from torchtitan_npu.layers.auxiliary_loss import auxiliary_losses

    config = JobConfig()
    config.model.name, config.model.flavor, config.model.converters = "deepseek_v32", "debugmodel", converters
    config.training.seq_len = seq_len
    args: Any = get_train_spec(config.model.name).model_args[config.model.flavor]
    args.update_from_config(config)
    args.n_layers = args.n_dense_layers = 1
    model: Any = get_train_spec(config.model.name).model_cls(args)
    dims = ParallelDims(dp_replicate=1, dp_shard=1, cp=1, tp=1, pp=1, ep=1, etp=1, world_size=1)
    if converters:
        build_model_converters(config, dims).convert(model)
    torch.manual_seed(0)
    with torch.no_grad():
        model.init_weights(torch.device("cpu"))
    for loss in auxiliary_losses([model]):
        loss.start_batch(torch.tensor(float(seq_len)))
    attention = model.layers["0"].attention
    x = torch.randn(1, seq_len, args.dim, requires_grad=True)

    before = resident()
    attention(x, model.freqs_cis, None).sum().backward()
    assert all(p.grad is not None for p in attention.parameters() if p.requires_grad)
    return resident_peak() - before


def attention(args: argparse.Namespace) -> int:
    """Print the table of ``attention``."""
    if args.measure:
        print(measure_attention(CONVERTERS[args.measure], args.seq_len))
        return 0
    common = ["attention", f"--seq-len={args.seq_len}", "--measure"]
    peaks = {name: int(last_line([*common, name])) for name in CONVERTERS}
    print(f"debugmodel, {args.seq_len} tokens, CPU, float32\n")
    print("| attention | peak (MiB) | of eager |\n|---|---|---|")
    for name, peak in peaks.items():
        print(f"| {name} | {peak / 2**20:.0f} | {peak / peaks['eager']:.2f} |")
    return 0


# --- prediction ---

CONFIG = str(CONFIGS / "deepseek_v32_671b_4layers_4k.toml")
TWO_BATCHES = ["--training.global_batch_size", "2"]
"""Gradient accumulation: the second batch finds the gradients of the first."""
STEPS = 3
ALLOWED = 0.1


def measure_training() -> int:
    """Train with the real Trainer. Return the peak of allocated bytes after the first step."""
    with trainer_of(["--job.config_file", CONFIG, *ONE_RANK, *TWO_BATCHES]) as trainer:
        batches = trainer.batch_generator(trainer.dataloader)
        for step in range(1, STEPS + 1):
            trainer.step = step
            trainer.train_step(batches)
            torch.cuda.synchronize()
            print(f"step {step}: {torch.cuda.max_memory_allocated() / GIB:.2f} GiB", file=sys.stderr)
            if step == 1:
                torch.cuda.reset_peak_memory_stats()
    return torch.cuda.max_memory_allocated()


def predicted_peak() -> int:
    """Return the peak of the rank in bytes that the planner predicts."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "plan.json"
        command = [sys.executable, "-m", "torchtitan_npu.cli.main", "plan", "--config", CONFIG, "--home", "cuda"]
        command += ["--world-size", "1", "--device-memory", "1000GiB", "--json", str(out), *ONE_RANK, *TWO_BATCHES]
        subprocess.run(command, check=True, env=rank_environment())
        return int(json.loads(out.read_text())["ranks"][0]["peak"])


def prediction(args: argparse.Namespace) -> int:
    """Compare the predicted with the measured peak."""
    need_gpu()
    if args.measure:
        print(measure_training())
        return 0
    peak, measured = predicted_peak(), int(last_line(["prediction", "--measure"]))
    print(f"predicted {peak / GIB:.2f} GiB, measured {measured / GIB:.2f} GiB: {peak / measured - 1:+.1%}")
    return 0 if abs(peak / measured - 1) <= ALLOWED else 1


# --- gate-up ---

GATE_UP = ("two products", "one product")
REPEATS = 10
Product = Callable[[Tensor, Tensor, Tensor], Tensor]


def gate_and_up(row: str, product: Product, x: Tensor, w1: Tensor, w3: Tensor, counts: Tensor) -> Tensor:
    """Return both products concatenated, (rows, 2 * hidden). ``w1`` and ``w3`` are (experts, hidden, dim)."""
    if row == "one product":
        return product(x, torch.cat((w1, w3), dim=1).mT, counts)
    return torch.cat((product(x, w1.mT, counts), product(x, w3.mT, counts)), dim=-1)


def measure_gate_up(row: str, args: argparse.Namespace) -> dict[str, Any]:
    """Return the median seconds and the peak bytes of forward and backward, beyond inputs and their gradients."""
    from torchtitan_npu import platform, register

    platform.prepare()
    register()
    from torchtitan_npu.ops.grouped_matmul.op import grouped_matmul

    device, dtype = ("cuda" if torch.cuda.is_available() else "cpu"), getattr(torch, args.dtype)

    def grouped_mm(x: Tensor, weight: Tensor, counts: Tensor) -> Tensor:
        return torch._grouped_mm(x, weight, offs=counts.cumsum(0).int())

    product = grouped_mm if device == "cuda" else grouped_matmul
    torch.manual_seed(0)

    def random(*size: int) -> Tensor:
        return torch.randn(size, device=device, dtype=dtype, requires_grad=True)

    x, w1, w3 = random(args.rows, args.dim), *(random(args.experts, args.hidden, args.dim) for _ in range(2))
    counts = torch.full((args.experts,), args.rows // args.experts, device=device)
    for tensor in (x, w1, w3):
        tensor.grad = torch.zeros_like(tensor)
    if device == "cuda":
        torch.cuda.reset_peak_memory_stats()
    seconds, before = [], torch.cuda.memory_allocated() if device == "cuda" else resident()
    for _ in range(REPEATS + 1):  # the first is the warm-up
        start = now(device)
        hidden = torch.ops.npu.npu_swiglu(gate_and_up(row, product, x, w1, w3, counts))
        hidden.backward(torch.ones_like(hidden))
        del hidden
        seconds.append(now(device) - start)
    peak = torch.cuda.max_memory_allocated() if device == "cuda" else resident_peak()
    return {"row": row, "seconds": statistics.median(seconds[1:]), "peak_bytes": peak - before}


def now(device: str) -> float:
    """Return the time after the device has finished."""
    if device == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter()


def gate_up(args: argparse.Namespace) -> int:
    """Print the table of ``gate-up``."""
    if args.measure:
        print(json.dumps(measure_gate_up(args.measure, args)))
        return 0
    rows = [json.loads(last_line([*sys.argv[1:], "--measure", row])) for row in GATE_UP]
    device = "cuda" if torch.cuda.is_available() else "cpu"
    print(f"{args.rows} rows, {args.experts} experts, {args.dim} -> {args.hidden}, {args.dtype}, {machine(device)}\n")
    print("| | time (ms) | peak (MiB) |\n|---|---|---|")
    for row in rows:
        print(f"| {row['row']} | {row['seconds'] * 1e3:.2f} | {row['peak_bytes'] / 2**20:.0f} |")
    return 0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(required=True)
    one = commands.add_parser("attention", help="sparse attention on the CPU, eager and fused")
    one.set_defaults(run=attention)
    one.add_argument("--seq-len", type=int, default=4096)
    one.add_argument("--measure", choices=CONVERTERS, help="measure one row in this process")
    two = commands.add_parser("prediction", help="predicted and measured peak of a job on one GPU")
    two.set_defaults(run=prediction)
    two.add_argument("--measure", action="store_true", help="train in this process and print the peak")
    three = commands.add_parser("gate-up", help="gate and up products as one or two grouped matmuls")
    three.set_defaults(run=gate_up)
    for name, size in {"rows": 4096, "experts": 8, "dim": 512, "hidden": 256}.items():
        three.add_argument(f"--{name}", type=int, default=size)
    three.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    three.add_argument("--measure", choices=GATE_UP, help="measure one row in this process")
    args = parser.parse_args()
    return args.run(args)


if __name__ == "__main__":
    sys.exit(main())
