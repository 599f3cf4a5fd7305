#!/usr/bin/env python
"""Cuts of DeepSeek-V3.2 through the real trainer on one GPU: tokens a second and peak memory, from eager to all fused.

    python tools/bench/models.py [--layers 4 8] [--only eager dsa ...] [--seq-len 4096] [--steps 12] [--json FILE]
    python tools/bench/models.py --curves [--layers 4] [--steps 50] [--json FILE]

The cuts are 671B_4layers and 671B_8layers, or of as many layers: full width, one dense layer, 8 experts. Weights and
states in bfloat16, the shipped text, activation checkpointing as in the cuts' TOML files, and on longer sequences full,
as in that of 32k; other options of a job may follow (--activation_checkpoint.mode full). Each row is a process of its
own; its time is that of all steps after the second in a row, of which only the last is logged: nothing else waits for
the device. ``--curves`` trains four eager models and four fused ones on the same batches, from the same weights but for
rounding: one eager model works on latent vectors, and of five of the others a hundredth of the first weights are off by
one in the last place. They show how far rounding alone takes a curve.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

from one_rank import CONFIGS, ONE_RANK, environment
from record import need_gpu, write, write_partial

GIB = 1 << 30
PATIENCE = 200
"""Seconds that a row may take."""
ALL = 540
"""Seconds that all rows together may take."""
BASIC = ["npu_rms_norm", "npu_rope", "npu_permute", "npu_gmm"]


def converters(*names: str) -> list[str]:
    return ["--model.converters", ",".join(names)]


VARIANTS = {
    "eager": converters(),
    "dsa": converters("npu_dsa"),
    "basic": converters("npu_dsa", *BASIC),
    "compile": [*converters("npu_dsa", *BASIC), "--compile.enable", "--npu.bypass_codegen"],
    "swap": [*converters("npu_dsa", *BASIC), "--compile.enable", "--npu.bypass_codegen", "--optimizer.swap"],
}
"""Each adds to the one before. Eager makes every head's keys and values, as the small operators of the model do; the
others work on the latent vectors, as the fused operator does."""
BFLOAT16 = ["--training.dtype", "bfloat16"]
FULL = ["--activation_checkpoint.mode", "full"]
CUTS_SEQUENCE = 4096
"""That of the cuts' TOML files."""
CURVES = {
    **dict.fromkeys(["eager", "absorbed", "nudged 1", "nudged 2"], converters()),
    **dict.fromkeys(["fused", "fused 1", "fused 2", "fused 3"], converters("npu_dsa", *BASIC)),
}
NUDGED = {"nudged 1": 1, "nudged 2": 2, "fused 1": 1, "fused 2": 2, "fused 3": 3}
CURVE = [*BFLOAT16, *FULL]
WARM_UP = 2


def nudge(model: Any, seed: int) -> None:
    """One in a hundred of the bfloat16 weights, off by one in the last place."""
    import torch

    generator = torch.Generator("cuda").manual_seed(seed)
    for parameter in model.parameters():
        chosen = torch.rand(parameter.shape, device="cuda", generator=generator) < 0.01
        parameter.detach().view(torch.int16).bitwise_xor_(chosen.to(torch.int16))


def measure(layers: int, eager: bool, steps: int, nudged: int, options: list[str]) -> dict[str, Any]:
    """Train in this process; the losses that are logged, tokens a second after the warm-up, and the bytes allocated at
    the most after the first step."""
    import torch

    import torchtitan_npu.train as entry
    from torchtitan_npu.config.parser import JobConfigManager
    from torchtitan_npu.models.deepseek_v32 import deepseekv32_args

    flavor = "671B_8layers"
    changes: dict[str, Any] = {"n_layers": layers, "absorb": not eager}
    deepseekv32_args[flavor] = replace(deepseekv32_args[flavor], **changes)
    with tempfile.TemporaryDirectory() as folder:
        config_file = CONFIGS / f"deepseek_v32_{flavor.lower()}_4k.toml"
        arguments = ["--job.config_file", str(config_file), *ONE_RANK, "--training.global_batch_size", "1"]
        config = JobConfigManager().parse_args([*arguments, *options])
        config.job.dump_folder, config.checkpoint.enable = folder, False
        config.metrics.enable_tensorboard = False
        trainer = entry.Trainer(config)
        if nudged:
            nudge(trainer.model_parts[0], nudged)
        losses, peaks = [], []
        log = trainer.metrics_processor.log

        def keep(step: int, loss: float, *args: object, **kwargs: object) -> None:
            losses.append(loss)
            peaks.append(torch.cuda.max_memory_allocated())  # since the log before: TorchTitan's starts it anew
            log(step, loss, *args, **kwargs)  # type: ignore[arg-type]

        trainer.metrics_processor.log = keep  # type: ignore[method-assign, assignment]
        batches = trainer.batch_generator(trainer.dataloader)  # type: ignore[arg-type]
        for step in range(1, steps + 1):
            trainer.step = step
            trainer.train_step(batches)
            if step in (WARM_UP, steps):
                torch.cuda.synchronize()
            if step == WARM_UP:
                start = time.perf_counter()
        seconds = (time.perf_counter() - start) / (steps - WARM_UP)
        tokens = config.training.seq_len * config.training.local_batch_size
        result = {"tokens_per_second": tokens / seconds, "memory": max(peaks[1:]), "losses": losses}
        trainer.close()
    return result


def in_a_process(layers: int, name: str, steps: int, options: list[str], patience: float) -> dict[str, Any]:
    """As :func:`measure`; where it fails, the last line of what it said, or that it took too long to know."""
    variables = environment(PYTORCH_ALLOC_CONF="expandable_segments:True")
    command = [sys.executable, __file__, "--measure", "--layers", str(layers), "--steps", str(steps), *options]
    command += ["--eager"] if name in ("eager", "nudged 1", "nudged 2") else []
    command += ["--nudged", str(NUDGED[name])] if name in NUDGED else []
    try:
        done = subprocess.run(command, capture_output=True, text=True, env=variables, timeout=patience)
    except subprocess.TimeoutExpired:
        return {"failed": f"it did not end in {patience:.0f} s", "unknown": True}
    if done.returncode:
        lines = done.stderr.strip().splitlines() or ["no message"]
        errors = [line for line in lines if re.match(r"(\[rank\d+\]:\s*)?[\w.]*(Error|Unsupported|Exit)\w*:", line)]
        return {"failed": (errors or lines)[-1][:300]}
    return json.loads(done.stdout.splitlines()[-1])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, nargs="+", default=[4, 8])
    parser.add_argument("--only", nargs="+", choices=[*VARIANTS, *(name for name in CURVES if name not in VARIANTS)])
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--seq-len", type=int, default=CUTS_SEQUENCE)
    parser.add_argument("--curves", action="store_true")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--measure", action="store_true", help="one row, in this process")
    parser.add_argument("--eager", action="store_true", help="with --measure")
    parser.add_argument("--nudged", type=int, default=0, help="with --measure")
    args, options = parser.parse_known_args()
    need_gpu()
    if args.steps <= WARM_UP:
        parser.error(f"--steps: the first {WARM_UP} are not timed")
    if args.measure:
        print(json.dumps(measure(args.layers[0], args.eager, args.steps, args.nudged, options)))
        return 0
    runs, always = (CURVES, CURVE) if args.curves else (VARIANTS, BFLOAT16)
    if unknown := set(args.only or runs) - set(runs):
        parser.error(f"--only: {', '.join(sorted(unknown))} is none of {', '.join(runs)}")
    jobs = [(layers, name) for layers in args.layers for name in args.only or runs]
    longer = FULL if args.seq_len > CUTS_SEQUENCE else []
    every = [*always, *longer, "--training.seq_len", str(args.seq_len), *options]
    every += ["--metrics.log_freq", "1" if args.curves else str(args.steps)]
    begin = time.monotonic()

    def run(layers: int, name: str) -> dict[str, Any]:
        patience = max(0.0, min(PATIENCE, begin + ALL - time.monotonic()))
        row = in_a_process(layers, name, args.steps, [*every, *runs[name]], patience)
        shown = row.get("failed") or f"{row['tokens_per_second']:8.0f} tokens/s  {row['memory'] / GIB:6.1f} GiB"
        print(f"{layers} layers  {args.seq_len:6}  {name:10} {shown}", flush=True)
        return {"layers": layers, "seq_len": args.seq_len, "variant": name, **row}

    rows = []
    for layers, name in jobs:
        rows.append(run(layers, name))
        if args.json:
            write_partial(args.json, rows)
    # what does not fit is a result; what was not waited for is none
    failed = all("failed" in row for row in rows) or any("unknown" in row for row in rows)
    if args.json and not failed:
        write(args.json, rows)
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
