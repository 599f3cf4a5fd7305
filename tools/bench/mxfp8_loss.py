#!/usr/bin/env python
"""Loss curves of MXFP8 against bfloat16 on one GPU: four seeds, and which modules cost accuracy.

    python tools/bench/mxfp8_loss.py --json FILE [--only deepseek_v32 qwen3] [--steps 200] [--seconds 660] [--tiny]
    python tools/bench/mxfp8_loss.py --table FILE

The models are DeepSeek-V3.2's 4-layer cut (671B_4layers: full width, one dense layer, 8 experts) and a 4-layer cut of
Qwen3-30B-A3B (full width, 32 experts), both with the vocabulary of the shipped tokenizer. Weights and optimizer states
are float32, products bfloat16 or MXFP8; the data is the shipped corpus. On a GPU the operators are this package's: the
quantization is CANN's, bit by bit, and sums are in cuBLAS's order.

Rows: ``bf16`` and ``mxfp8`` (the default recipe) with each seed; with the first seed also recipes and the default
recipe without one group of modules. The file is written after each row, and a repeated call continues with the missing
rows. ``--seconds`` ends the call after the row that exceeds them. ``--tiny`` trains debug models, for a test on a CPU.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import statistics
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from harness import CONFIGS, GIB, ONE_RANK, Row, machine, parser_of, rank_environment, trainer_of

SEEDS = (0, 1, 2, 3)
LAST = 20
"""A row's loss is the mean over this many last steps."""
COMMON = ["npu_rms_norm", "npu_rope", "npu_permute", "npu_gmm"]
NOT_QUANTIZED = ["output", "router.gate", "indexer"]
EXPERTS = {"without experts": ["--mxfp8.no-experts"], "only experts": ["--mxfp8.no-linear"]}
RECIPES = {
    "mxfp8_floor": ["--mxfp8.recipe_name", "mxfp8_floor"],
    "mxfp8_rceil_wgrad_with_hp": ["--mxfp8.recipe_name", "mxfp8_rceil_wgrad_with_hp"],
    "gradients in E5M2": ["--mxfp8.gradient_dtype", "float8_e5m2"],
}
MODELS: dict[str, dict[str, Any]] = {
    "deepseek_v32": {
        "config": "deepseek_v32_671b_4layers_4k.toml",
        "converters": [*COMMON, "npu_dsa"],
        "linear": {"attention": "attention", "shared experts": "shared_experts", "the dense layer": "feed_forward"},
    },
    "qwen3": {
        "config": "qwen3_30b_a3b.toml",
        "converters": [*COMMON, "npu_attention"],
        "linear": {"attention": "attention"},
    },
}
"""``linear``: groups of linear layers, and the part of their names."""


def filtered(*names: str) -> list[str]:
    """Return the option not to quantize modules whose name contains one of ``names``."""
    return ["--mxfp8.filter_fqns", ",".join(names)]


def leave_one_out(model: str) -> dict[str, list[str]]:
    """Return the options of the rows in which one group of modules, or all but the experts, stay in bfloat16."""
    linear = {f"without {group}": filtered(*NOT_QUANTIZED, part) for group, part in MODELS[model]["linear"].items()}
    return linear | EXPERTS


def cut_models(tiny: bool) -> None:
    """Change the flavors of the TOML files to the models of this benchmark."""
    from torchtitan.models.qwen3 import qwen3_args

    from torchtitan_npu.models.deepseek_v32 import deepseekv32_args

    vocabulary: dict[str, Any] = {"vocab_size": 2048}
    deepseek = deepseekv32_args["debugmodel" if tiny else "671B_4layers"]
    deepseekv32_args["671B_4layers"] = replace(deepseek, **vocabulary)
    qwen3 = qwen3_args["30B-A3B"]
    if tiny:
        qwen3 = replace(qwen3_args["debugmodel_moe"], n_heads=8, n_kv_heads=4, head_dim=64, moe_inter_dim=256)
    experts = replace(qwen3.moe_args, num_experts=min(32, qwen3.moe_args.num_experts))
    qwen3_args["30B-A3B"] = replace(qwen3, n_layers=4, moe_args=experts, **vocabulary)


def job(model: str, quantized: bool, options: list[str], args: argparse.Namespace) -> list[str]:
    """Return the arguments of the job of a row."""
    names = MODELS[model]["converters"] + (["npu_mxfp8"] if quantized else [])
    arguments = ["--job.config_file", str(CONFIGS / MODELS[model]["config"]), *ONE_RANK]
    arguments += ["--model.converters", ",".join(names), "--training.seq_len", str(args.seq_len)]
    arguments += ["--training.local_batch_size", "1", "--training.global_batch_size", "1"]
    arguments += ["--lr_scheduler.warmup_steps", "20", "--training.steps", str(args.steps), "--metrics.log_freq", "1"]
    return [*arguments, "--activation_checkpoint.mode", "none", *options]


def free_memory() -> None:
    """Free the memory of a Trainer to which there are no references. It has reference cycles."""
    import torch

    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def train(model: str, quantized: bool, seed: int, options: list[str], args: argparse.Namespace) -> dict[str, Any]:
    """Train in this process. Return the loss of each step, the peak of memory and the time."""
    import torch

    losses: list[float] = []
    on_gpu = torch.cuda.is_available()
    with trainer_of(job(model, quantized, ["--debug.seed", str(seed), *options], args)) as trainer:
        trainer.metrics_processor.log = lambda step, loss, *_, **__: losses.append(loss)
        batches = trainer.batch_generator(trainer.dataloader)
        start = time.perf_counter()
        for step in range(1, args.steps + 1):
            trainer.step = step
            trainer.train_step(batches)
            if on_gpu and step == 1:
                torch.cuda.reset_peak_memory_stats()
        seconds = time.perf_counter() - start
        memory = torch.cuda.max_memory_allocated() if on_gpu else 0
    del trainer, batches
    free_memory()
    return {"losses": losses, "memory": memory, "seconds": seconds}


def rows_of(model: str) -> list[tuple[str, int, bool, list[str]]]:
    """Return name, seed, whether MXFP8 is used, and options of each row, the most important first."""
    both: list[tuple[str, int, bool, list[str]]] = [
        (name, seed, name == "mxfp8", []) for seed in SEEDS for name in ("bf16", "mxfp8")
    ]
    return [*both, *((name, SEEDS[0], True, options) for name, options in (leave_one_out(model) | RECIPES).items())]


def table(rows: list[Row]) -> str:
    """Return Markdown tables: the difference of losses over the seeds, and the variants of the first seed."""
    found = {(row["model"], row["variant"], row["seed"]): row for row in rows}
    text = ["| model | loss, bfloat16 | difference, MXFP8 | over the seeds | GiB, bfloat16 | GiB, MXFP8 |"]
    text += ["|---|---|---|---|---|---|"]
    for model in MODELS:
        seeds = [seed for seed in SEEDS if {(model, "bf16", seed), (model, "mxfp8", seed)} <= found.keys()]
        if not seeds:
            continue
        plain, other = ([found[model, name, seed] for seed in seeds] for name in ("bf16", "mxfp8"))
        losses = list(map(_loss, plain))
        differences = [100 * (_loss(row) / loss - 1) for row, loss in zip(other, losses, strict=True)]
        loss, difference = (
            (statistics.mean(values), statistics.stdev(values) if len(values) > 1 else 0.0)
            for values in (losses, differences)
        )
        listed = ", ".join(f"{value:+.2f}" for value in differences)
        memory = " | ".join(f"{rows[0]['memory'] / GIB:.1f}" for rows in (plain, other))
        text.append(
            f"| {model} | {loss[0]:.4f} ± {loss[1]:.4f} | {difference[0]:+.2f} % ± {difference[1]:.2f} % "
            f"| {listed} | {memory} |"
        )
    text += ["", "| model | variant | loss | difference to bfloat16 | GiB |", "|---|---|---|---|---|"]
    for model in MODELS:
        bfloat16 = found.get((model, "bf16", SEEDS[0]))
        for name in ("mxfp8", *leave_one_out(model), *RECIPES):
            row = found.get((model, name, SEEDS[0]))
            if bfloat16 and row:
                far, gib = 100 * (_loss(row) / _loss(bfloat16) - 1), row["memory"] / GIB
                text.append(f"| {model} | {name} | {_loss(row):.4f} | {far:+.2f} % | {gib:.1f} |")
    return "\n".join(text)


def _loss(row: dict[str, Any]) -> float:
    return statistics.mean(row["losses"][-LAST:])


def add_options(parser: argparse.ArgumentParser, steps: int) -> None:
    """Add the options of both MXFP8 benchmarks."""
    parser.add_argument("--only", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument("--steps", type=int, default=steps)
    parser.add_argument("--seq-len", type=int, default=1024)
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--table", type=Path, help="print the tables of a file, and compute nothing")


def print_table_of(
    parser: argparse.ArgumentParser, args: argparse.Namespace, table: Callable[[list[Row]], str]
) -> None:
    """With ``--table``, print the ``table`` of a file and exit. Without, ``--json`` is needed."""
    if args.table:
        print(table(json.loads(args.table.read_text())["rows"]))
        parser.exit()
    if args.json is None:
        parser.error("--json is needed")


def prepare(parser: argparse.ArgumentParser, args: argparse.Namespace, *keys: str) -> dict[str, Any]:
    """Prepare this process and the models. Return the content of ``--json``: the options ``keys`` must be the same."""
    os.environ.update(rank_environment())
    import torch

    from torchtitan_npu import platform

    platform.prepare()
    cut_models(args.tiny)
    options = {key: getattr(args, key) for key in ("steps", *keys, "seq_len", "tiny")}
    stored: dict[str, Any] = {"options": options, "rows": []}
    if args.json.exists():
        stored = json.loads(args.json.read_text())
    if stored["options"] != options:
        parser.error(f"{args.json} has rows with other options: {stored['options']}")
    return stored | {"machine": machine("cuda" if torch.cuda.is_available() else "cpu"), "torch": torch.__version__}


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--seconds", type=float, default=660.0)
    add_options(parser, 200)
    args = parser.parse_args()
    print_table_of(parser, args, table)
    stored = prepare(parser, args)
    rows, begin = stored["rows"], time.monotonic()
    done = {(row["model"], row["variant"], row["seed"]) for row in rows}
    for model in args.only:
        for name, seed, quantized, chosen in rows_of(model):
            if (model, name, seed) in done:
                continue
            if time.monotonic() - begin > args.seconds:
                print("time is up; repeat the command for the missing rows")
                return
            row = {"model": model, "variant": name, "seed": seed, **train(model, quantized, seed, chosen, args)}
            rows.append(row)
            args.json.write_text(json.dumps(stored, indent=1) + "\n")
            print(f"{model:13} {name:28} seed {seed}  loss {_loss(row):.4f}  {row['seconds']:.0f} s", flush=True)
    print(table(rows))


if __name__ == "__main__":
    main()
