#!/usr/bin/env python
"""Trains TorchTitan's debug models with and without converters, and shows how far their curves are apart.

    python tools/parity.py [--models llama3 gpt_oss ...] [--steps 20] [--dtype float32|bfloat16] [--out parity.json]

A row a model and a list of converters: the largest relative difference of the loss and of the gradient norm from the
eager model's, over all steps; and the same for the eager model with its first weights off by one in the last place,
which shows how far such a difference grows. With bfloat16, the eager model is trained in float32 too: how far the
eager model in bfloat16 is from it, the spread, is what rounding alone does. One process, on this machine's device.
"""

from __future__ import annotations

import argparse
import copy
import json
import logging
import os
import tempfile
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from rich.console import Console
from rich.table import Table

from torchtitan_npu import platform, register

platform.prepare()
register()

from torch.nn.attention.flex_attention import flex_attention  # noqa: E402
from torchtitan.models.attention import FlexAttentionWrapper  # noqa: E402
from torchtitan.protocols.train_spec import get_train_spec  # noqa: E402

from torchtitan_npu.config import JobConfig  # noqa: E402
from torchtitan_npu.config_manager import shipped  # noqa: E402
from torchtitan_npu.converters import CONVERTERS  # noqa: E402
from torchtitan_npu.preflight import build_on_meta, check_job  # noqa: E402
from torchtitan_npu.train import Trainer  # noqa: E402

MODELS = {
    "llama3": ("llama3", "debugmodel"),
    "llama4": ("llama4", "debugmodel"),
    "qwen3": ("qwen3", "debugmodel"),
    "qwen3_moe": ("qwen3", "debugmodel_moe"),
    "deepseek_v3": ("deepseek_v3", "debugmodel"),
    "gpt_oss": ("gpt_oss", "debugmodel"),
}
"""By name: TorchTitan's model and flavor."""
NEEDS_CUDA = ("gpt_oss",)
"""Flex attention has no gradient on a CPU. (llama4's, for chunked layers, fails in TorchTitan 0.2.2 on any device.)"""
FLAVOR = "parity"
NUDGED = "none, weights off by one in the last place"


class Curve(NamedTuple):
    """What a run reported, step by step."""

    losses: list[float]
    norms: list[float]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    default = [name for name in MODELS if platform.home() == "cuda" or name not in NEEDS_CUDA]
    parser.add_argument("--models", nargs="+", choices=MODELS, default=default)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--seq-len", type=int, default=256)
    parser.add_argument("--lr", type=float, default=1e-4)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    logging.getLogger().setLevel(logging.ERROR)
    console = Console(width=110)
    rows = []
    for name in args.models:
        rows += compare(name, args, console)
    table = Table(*rows[0])
    for row in rows:
        table.add_row(*(f"{value:.1e}" if isinstance(value, float) else str(value) for value in row.values()))
    device = torch.cuda.get_device_name() if platform.home() == "cuda" else platform.home()
    console.print(table, f"{device}, torch {torch.__version__}, {args.dtype}, {args.steps} steps")
    if args.out:
        args.out.write_text(json.dumps(rows, indent=1))


def compare(name: str, args: argparse.Namespace, console: Console) -> list[dict[str, Any]]:
    """A row for each converter that applies to the model, and one for all of them."""
    add_flavor(name)
    matching = converters_for(name)
    rows = []
    eager = run(name, [], args.dtype, args)
    console.print(f"{name}: eager, loss {eager.losses[0]:.4f} to {eager.losses[-1]:.4f}")
    exact = None
    if args.dtype != "float32":
        exact = run(name, [], "float32", args)
    variants = {**{one: [one] for one in matching}, "all": matching, NUDGED: []}
    for what, converters in variants.items():
        curve = run(name, converters, args.dtype, args, nudge=what == NUDGED)
        row: dict[str, Any] = {"model": name, "converters": what, "loss": apart(curve.losses, eager.losses)}
        row["gradient norm"] = apart(curve.norms, eager.norms)
        if exact:
            row |= {"loss, from float32": apart(curve.losses, exact.losses)}
            row |= {"eager loss, from float32": apart(eager.losses, exact.losses)}
        rows.append(row)
        console.print(f"{name}: {what}, {row['loss']:.1e}")
    return rows


def apart(ours: list[float], theirs: list[float]) -> float:
    """The largest relative difference of two curves."""
    return max(abs(a - b) / abs(b) for a, b in zip(ours, theirs, strict=True))


def add_flavor(name: str) -> None:
    """The model's debug flavor with the experts in a loop: TorchTitan's grouped product on CUDA is in bfloat16 only."""
    model, flavor = MODELS[name]
    spec = get_train_spec(model)
    args: Any = copy.deepcopy(spec.model_args[flavor])
    if hasattr(args, "moe_args"):
        args.moe_args.use_grouped_mm = False
    spec.model_args[FLAVOR] = args  # type: ignore[index]
    if model == "gpt_oss":  # whose blocks are in bfloat16 as they are built
        model_cls = spec.model_cls
        spec.model_cls = lambda args: model_cls(args).float()  # type: ignore[assignment, attr-defined]
        # TorchTitan has flex attention tuned, which takes minutes
        FlexAttentionWrapper._compiled_flex_attn = staticmethod(torch.compile(flex_attention))  # type: ignore[assignment]


def converters_for(name: str) -> list[str]:
    """Those that find something to replace."""
    config = JobConfig()
    config.model.name, config.model.flavor = MODELS[name][0], FLAVOR
    model = build_on_meta(config)
    return [one for one, converter in CONVERTERS.items() if converter(config, None).targets(model)]  # type: ignore[arg-type]


def run(name: str, converters: list[str], dtype: str, args: argparse.Namespace, nudge: bool = False) -> Curve:
    """Train for some steps, alone, and record what is reported; ``nudge`` moves weights by one in the last place."""
    with tempfile.TemporaryDirectory() as folder:
        config = JobConfig()
        config.job.dump_folder = folder
        config.model.name, config.model.flavor = MODELS[name][0], FLAVOR
        config.model.hf_assets_path = shipped("torchtitan_npu/assets/tokenizer")
        config.model.converters = converters
        config.training.dataset = "tiny_corpus"
        config.training.local_batch_size, config.training.seq_len, config.training.steps = 4, args.seq_len, args.steps
        config.optimizer.lr = args.lr
        config.training.mixed_precision_param = dtype  # type: ignore[assignment]
        config.lr_scheduler.warmup_steps = 2
        config.metrics.log_freq = 1
        config.comm.trace_buf_size = 0
        config.activation_checkpoint.mode = "none"
        config.debug.seed = 7
        os.environ |= {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1"}
        os.environ |= {"MASTER_ADDR": "localhost", "MASTER_PORT": "0"}
        check_job(config, 1)
        trainer = Trainer(config)
        curve = Curve([], [])
        if nudge:
            with torch.no_grad():
                torch._foreach_mul_(list(trainer.model_parts[0].parameters()), 1 + torch.finfo(torch.float32).eps)

        def log(step: int, loss: float, max_loss: float, norm: float, **kwargs: Any) -> None:
            curve.losses.append(loss)
            curve.norms.append(norm)

        trainer.metrics_processor.log = log  # type: ignore[method-assign]
        batches = trainer.batch_generator(trainer.dataloader)
        for _ in range(args.steps):
            trainer.step += 1
            trainer.train_step(batches)
        trainer.close()
        dist.destroy_process_group()
    return curve


if __name__ == "__main__":
    main()
