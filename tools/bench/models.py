#!/usr/bin/env python
"""Train DeepSeek-V3.2 with few layers on one GPU, from eager to all fused: tokens per second and peak memory.

    python tools/bench/models.py [--layers 4 8] [--only eager dsa ...] [--seq-len 4096] [--steps 12] [--json FILE]
    python tools/bench/models.py --curves [--layers 4] [--steps 50] [--json FILE]
    python tools/bench/models.py --profile [--layers 8] [--only basic] [--json FILE]

The models are 671B_4layers and 671B_8layers, or have ``--layers`` layers: full width, one dense layer, 8 experts.
Weights and optimizer states are bfloat16; the data is the shipped corpus. Activation checkpointing is as in the TOML
files, and ``full`` for longer sequences. Further arguments are options of the job (--activation_checkpoint.mode full).
Each row is a separate process. Its time covers all steps after the second; only the last step is logged, so nothing
else waits for the device.

``--curves`` trains four eager and four fused models on the same batches, from equal weights except for rounding: one
eager model has absorbed attention, and in five models one percent of the initial weights differ by one ulp. They show
how far rounding alone changes a curve.

``--profile`` measures the kernels of one step by operator. The limit of an operator is its work at the rate of a large
matmul or of a copy, both measured in the same process.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager
from dataclasses import replace
from itertools import product
from typing import Any

from harness import CONFIGS, GIB, ONE_RANK, Row, need_gpu, parser_of, rank_environment, store, trainer_of

ROW_TIMEOUT = 200
"""Time limit of one row in seconds."""
TOTAL_TIMEOUT = 540
"""Time limit of all rows in seconds."""
BASIC = ["npu_rms_norm", "npu_rope", "npu_permute", "npu_gmm"]


def converters(*names: str) -> list[str]:
    return ["--model.converters", ",".join(names)]


FUSED = converters("npu_dsa", *BASIC)
COMPILED = [*FUSED, "--compile.enable", "--npu.bypass_codegen", "inductor"]
VARIANTS = {
    "eager": converters(),
    "dsa": converters("npu_dsa"),
    "basic": FUSED,
    "compile": COMPILED,
    "swap": [*COMPILED, "--optimizer.swap"],
    "chunked": [*FUSED, "--npu.loss_chunk_tokens", "4096"],
}
"""Eager attention expands keys and values of every head. The other variants use absorbed attention on the latent
vectors, like the fused operator."""
BFLOAT16 = ["--training.dtype", "bfloat16"]
FULL = ["--activation_checkpoint.mode", "full"]
CONFIG_SEQUENCE = 4096
"""The sequence length of the TOML files."""
CURVES = {
    **dict.fromkeys(["eager", "absorbed", "nudged 1", "nudged 2"], converters()),
    **dict.fromkeys(["fused", "fused 1", "fused 2", "fused 3"], FUSED),
}
PERTURBED = {"nudged 1": 1, "nudged 2": 2, "fused 1": 1, "fused 2": 2, "fused 3": 3}
CURVE = [*BFLOAT16, *FULL]
WARM_UP = 2


def perturb(model: Any, seed: int) -> None:
    """Change one percent of the bfloat16 weights by one ulp."""
    import torch

    device = next(model.parameters()).device
    generator = torch.Generator(device).manual_seed(seed)
    for parameter in model.parameters():
        chosen = torch.rand(parameter.shape, device=device, generator=generator) < 0.01
        parameter.detach().view(torch.int16).bitwise_xor_(chosen.to(torch.int16))


def trainer_of_layers(layers: int, eager: bool, options: list[str]) -> AbstractContextManager[Any]:
    """Build the trainer of a model with ``layers`` layers in this process, and close it at the end."""
    from torchtitan_npu.models.deepseek_v32 import deepseekv32_args

    flavor = "671B_8layers"
    changes: dict[str, Any] = {"n_layers": layers, "absorb": not eager}
    deepseekv32_args[flavor] = replace(deepseekv32_args[flavor], **changes)
    config_file = CONFIGS / f"deepseek_v32_{flavor.lower()}_4k.toml"
    arguments = ["--job.config_file", str(config_file), *ONE_RANK, "--training.global_batch_size", "1"]
    return trainer_of([*arguments, *options])


def train(trainer: Any, batches: Iterator[Any], steps: int) -> dict[str, Any]:
    """Train from the first step on.

    Return the logged losses, the tokens per second after the warm-up, and the peak of allocated bytes after the first
    step.
    """
    import torch

    losses, peaks = [], []
    log = trainer.metrics_processor.log

    def keep(step: int, loss: float, *args: object, **kwargs: object) -> None:
        losses.append(loss)
        peaks.append(torch.cuda.max_memory_allocated())  # since the previous log, where TorchTitan resets it
        log(step, loss, *args, **kwargs)

    trainer.metrics_processor.log = keep
    for step in range(1, steps + 1):
        trainer.step = step
        trainer.train_step(batches)
        if step in (WARM_UP, steps):
            torch.cuda.synchronize()
        if step == WARM_UP:
            start = time.perf_counter()
    seconds = (time.perf_counter() - start) / (steps - WARM_UP)
    trainer.metrics_processor.log = log
    tokens = trainer.job_config.training.seq_len * trainer.job_config.training.local_batch_size
    return {"tokens_per_second": tokens / seconds, "memory": max(peaks[1:]), "losses": losses}


def measure(layers: int, eager: bool, steps: int, perturbed: int, options: list[str]) -> Row:
    """Train in this process."""
    with trainer_of_layers(layers, eager, options) as trainer:
        if perturbed:
            perturb(trainer.model_parts[0], perturbed)
        return train(trainer, trainer.batch_generator(trainer.dataloader), steps)


def profile_step(layers: int, eager: bool, options: list[str]) -> dict[str, Any]:
    """Train in this process up to the end of the warm-up, and measure the next step by operator."""
    import torch
    from harness import measure_machine
    from step_profile import operator_rows

    machine = measure_machine()
    torch.cuda.empty_cache()
    with trainer_of_layers(layers, eager, options) as trainer:
        batches = trainer.batch_generator(trainer.dataloader)

        def step() -> None:
            trainer.step += 1
            trainer.train_step(batches)

        for _ in range(WARM_UP):
            step()
        rows = operator_rows(step, machine)
        torch.cuda.synchronize()
        start = time.perf_counter()
        step()
        torch.cuda.synchronize()
    return {"step_ms": 1e3 * (time.perf_counter() - start), "operators": rows, **machine.rates()}


def in_a_process(layers: int, name: str, steps: int, options: list[str], timeout: float) -> dict[str, Any]:
    """Run :func:`measure` in a new process. Return its error if it fails or exceeds the time limit."""
    variables = rank_environment(PYTORCH_ALLOC_CONF="expandable_segments:True")
    command = [sys.executable, __file__, "--measure", "--layers", str(layers), "--steps", str(steps), *options]
    command += ["--eager"] if name in ("eager", "nudged 1", "nudged 2") else []
    command += ["--perturbed", str(PERTURBED[name])] if name in PERTURBED else []
    try:
        done = subprocess.run(command, capture_output=True, text=True, env=variables, timeout=timeout)
    except subprocess.TimeoutExpired:
        return {"failed": f"time limit of {timeout:.0f} s exceeded", "unknown": True}
    if done.returncode:
        lines = done.stderr.strip().splitlines() or ["no message"]
        errors = [line for line in lines if re.match(r"(\[rank\d+\]:\s*)?[\w.]*(Error|Unsupported|Exit)\w*:", line)]
        return {"failed": (errors or lines)[-1][:300]}
    return json.loads(done.stdout.splitlines()[-1])


def line(row: Row) -> str:
    """Return a row for the console."""
    if "failed" in row:
        return row["failed"]
    if "operators" not in row:
        return f"{row['tokens_per_second']:8.0f} tokens/s  {row['memory'] / GIB:6.1f} GiB"
    operators = [
        f"{each['ms']:9.2f} ms  {each['calls']:5} calls  {each['limit_ms'] / each['ms']:4.0%} of the limit  "
        f"{each['operator']}"
        for each in row["operators"]
    ]
    return "\n".join([f"{row['step_ms']:.1f} ms a step", *operators])


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--layers", type=int, nargs="+", default=[4, 8])
    parser.add_argument("--only", nargs="+", choices=[*VARIANTS, *(name for name in CURVES if name not in VARIANTS)])
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--seq-len", type=int, default=CONFIG_SEQUENCE)
    parser.add_argument("--curves", action="store_true")
    parser.add_argument("--profile", action="store_true", help="measure the kernels of one step by operator")
    parser.add_argument("--measure", action="store_true", help="measure one row in this process")
    parser.add_argument("--eager", action="store_true", help="with --measure")
    parser.add_argument("--perturbed", type=int, default=0, help="with --measure")
    args, options = parser.parse_known_args()
    need_gpu()
    if args.steps <= WARM_UP:
        parser.error(f"--steps must be above {WARM_UP}: the first steps are the warm-up")
    if args.measure:
        (layers,) = args.layers
        if args.profile:
            print(json.dumps(profile_step(layers, args.eager, options)))
        else:
            print(json.dumps(measure(layers, args.eager, args.steps, args.perturbed, options)))
        return
    runs, always = (CURVES, CURVE) if args.curves else (VARIANTS, BFLOAT16)
    if unknown := set(args.only or runs) - set(runs):
        parser.error(f"--only: {', '.join(sorted(unknown))} is none of {', '.join(runs)}")
    longer = FULL if args.seq_len > CONFIG_SEQUENCE else []
    every = [*always, *longer, "--training.seq_len", str(args.seq_len), *options]
    every += ["--metrics.log_freq", "1" if args.curves else str(args.steps)]
    every += ["--profile"] if args.profile else []

    def rows() -> Iterator[Row]:
        begin, done = time.monotonic(), []
        for layers, name in product(args.layers, args.only or runs):
            timeout = max(0.0, min(ROW_TIMEOUT, begin + TOTAL_TIMEOUT - time.monotonic()))
            row = in_a_process(layers, name, args.steps, [*every, *runs[name]], timeout)
            print(f"{layers} layers  {args.seq_len:6}  {name:10} {line(row)}", flush=True)
            done.append(row)
            yield {"layers": layers, "seq_len": args.seq_len, "variant": name, **row}
        # out of memory is a result, a time limit is not
        if all("failed" in row for row in done) or any("unknown" in row for row in done):
            raise SystemExit(1)

    store(args.json, rows())


if __name__ == "__main__":
    main()
