"""Trains TorchTitan's debug models with and without converters, or on many layouts, and shows how far curves are apart.

    python tools/parity.py [--models llama3 gpt_oss ...] [--steps 20] [--dtype float32|bfloat16] [--out parity.json]
    python tools/parity.py --layouts [TP2 PP2 ...] [--models deepseek_v32] [--converters] [--documents] [--ranks 4]

A row a model and a list of converters: the largest relative difference of the loss and of the gradient norm from the
eager model's, over all steps; and the same for the eager model with its first weights off by one in the last place,
which shows how far such a difference grows. With bfloat16, how far a run's loss is from the eager model's in float32 is
what rounding does, and that is partly chance: the eager model and every list of converters are trained several times
(``--samples``), with first weights that are off by 0, 1, 2, ... in the last place of float32, which round differently.
The row has the median and the farthest of them, the same of the eager runs, and how many are no farther than the
farthest eager run. One process, on this machine's device. Exit code 1: in float32, a difference of the loss is above
1e-5 or one of the norm above 1e-4 with a converter; in either dtype, a number is not finite.

With ``--layouts`` a row a parallel layout, those named or all on up to ``--ranks`` ranks: the same differences from one
rank's eager run on the same global batches, in float32, and with ``--converters`` also those of all converters on that
layout; the norm also as TorchTitan reports it, which is a rounded sum. Exit code 1 as above. One process a rank; with
fewer GPUs than ranks, on the CPU (``CUDA_VISIBLE_DEVICES=``).

Exit code 2: the arguments, or a job that they make, cannot be; there is no table.
"""

from __future__ import annotations

import argparse
import json
import logging
import sys
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from torchtitan_npu import platform
from torchtitan_npu.cli.arguments import OneLineParser
from torchtitan_npu.cli.parity.converters import compare_converters
from torchtitan_npu.cli.parity.goals import missed
from torchtitan_npu.cli.parity.layouts import LAYOUTS, compare_layouts
from torchtitan_npu.cli.parity.training import MODELS, NEEDS_CUDA
from torchtitan_npu.errors import UsageError


def parse_args(argv: list[str]) -> argparse.Namespace:
    parser = OneLineParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", choices=MODELS, help="all that train here; with --layouts deepseek_v32")
    parser.add_argument("--layouts", nargs="*", choices=LAYOUTS, help="compare layouts instead of converters")
    parser.add_argument("--converters", action="store_true", help="with --layouts: also with all converters")
    parser.add_argument("--documents", action="store_true", help="with --layouts, deepseek_v32: dsa.document_mask")
    parser.add_argument("--ranks", type=int, choices=range(2, 9), help="with --layouts: all on up to so many; 4")
    parser.add_argument("--steps", type=int, help="20; with --layouts 10")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--seq-len", type=int, help="256; with --layouts 64")
    parser.add_argument("--lr", type=float, default=1e-4)
    parser.add_argument("--samples", type=int, help="runs of each, with bfloat16; 8")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args(argv)
    layouts = args.layouts is not None
    if layouts and args.dtype != "float32":
        parser.error("--layouts are compared in float32: in bfloat16 rounding hides what is wrong")
    for option in ("converters", "documents", "ranks"):
        if getattr(args, option) and not layouts:
            parser.error(f"--{option} goes with --layouts, which is not given")
    if args.layouts and args.ranks:
        parser.error("--ranks is for --layouts without names")
    if args.samples is not None and args.dtype == "float32":
        parser.error("--samples goes with --dtype bfloat16: in float32 one run of each is compared")
    here = [name for name in MODELS if platform.backend() == "cuda" or name not in NEEDS_CUDA]
    if elsewhere := [name for name in args.models or () if name not in here]:
        parser.error(f"--models {' '.join(elsewhere)}: trains on CUDA only, for its flex attention")
    args.models = args.models or (["deepseek_v32"] if layouts else here)
    defaults = {"steps": 10 if layouts else 20, "seq_len": 64 if layouts else 256, "samples": 8, "ranks": 4}
    for option, default in defaults.items():
        if getattr(args, option) is None:
            setattr(args, option, default)
        if getattr(args, option) < 1:
            parser.error(f"--{option.replace('_', '-')} must be at least 1")
    return args


def main(argv: list[str]) -> int:
    args = parse_args(argv)
    logging.getLogger().setLevel(logging.ERROR)
    console = Console(width=110)
    compare = compare_converters if args.layouts is None else compare_layouts
    rows: list[dict[str, Any]] = []
    try:
        for name in args.models:
            rows += compare(name, args, console)
    except UsageError as error:
        print(f"parity.py: error: {error}", file=sys.stderr)
        return 2
    return report(rows, args, console)


def report(rows: list[dict[str, Any]], args: argparse.Namespace, console: Console) -> int:
    """Show the table, and what in it is too far off; the exit code."""
    table = Table(*rows[0])
    for row in rows:
        table.add_row(*(f"{value:.1e}" if isinstance(value, float) else str(value) for value in row.values()))
    device = torch.cuda.get_device_name() if platform.backend() == "cuda" else platform.backend()
    console.print(table, f"{device}, torch {torch.__version__}, {args.dtype}, {args.steps} steps")
    if args.out:
        args.out.write_text(json.dumps(rows, indent=1))
    failures = missed(rows, args.dtype)
    for failure in failures:
        console.print(failure)
    return 1 if failures else 0
