#!/usr/bin/env python
"""Trains TorchTitan's debug models with and without converters, or on many layouts, and shows how far curves are apart.

    python tools/parity.py [--models llama3 gpt_oss ...] [--steps 20] [--dtype float32|bfloat16] [--out parity.json]
    python tools/parity.py --layouts [TP2 PP2 ...] [--models deepseek_v32] [--converters] [--documents] [--ranks 4]

A row a model and a list of converters: the largest relative difference of the loss and of the gradient norm from the
eager model's, over all steps; and the same for the eager model with its first weights off by one in the last place,
which shows how far such a difference grows. With bfloat16, how far a run's loss is from the eager model's in float32 is
what rounding does, and that is partly chance: the eager model and every list of converters are trained several times
(``--samples``), with first weights that are off by 0, 1, 2, ... in the last place of float32, which round differently.
The row has the median and the farthest of them, the same of the eager runs, and how many are no farther than the
farthest eager run. One process, on this machine's device.

With ``--layouts`` a row a parallel layout, those named or all on up to ``--ranks`` ranks: the same differences from one
rank's eager run on the same global batches, in float32, and with ``--converters`` also those of all converters on that
layout; the norm also as TorchTitan reports it, which is a rounded sum. Exit code 1: a difference of the loss is above
1e-5, or one of the norm above 1e-4. One process a rank; with fewer GPUs than ranks, on the CPU
(``CUDA_VISIBLE_DEVICES=``).
"""

from __future__ import annotations

import argparse
import json
import logging
import sys
from pathlib import Path
from typing import Any

import torch
from curve_parity.converters import compare_converters
from curve_parity.layouts import LAYOUTS, compare_layouts, missed
from curve_parity.training import MODELS, NEEDS_CUDA
from rich.console import Console
from rich.table import Table

from torchtitan_npu import platform


def parse_args(argv: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", choices=MODELS, help="all that train here; with --layouts deepseek_v32")
    parser.add_argument("--layouts", nargs="*", choices=LAYOUTS, help="compare layouts instead of converters")
    parser.add_argument("--converters", action="store_true", help="with --layouts: also with all converters")
    parser.add_argument("--documents", action="store_true", help="with --layouts, deepseek_v32: dsa.document_mask")
    parser.add_argument("--ranks", type=int, default=4, help="with --layouts: all on up to so many, at most 8")
    parser.add_argument("--steps", type=int, help="20; with --layouts 10")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--seq-len", type=int, help="256; with --layouts 64")
    parser.add_argument("--lr", type=float, default=1e-4)
    parser.add_argument("--samples", type=int, default=8, help="runs of each, with bfloat16")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args(argv)
    layouts = args.layouts is not None
    if layouts and args.dtype != "float32":
        parser.error("--layouts are compared in float32: in bfloat16 rounding hides what is wrong")
    here = [name for name in MODELS if platform.home() == "cuda" or name not in NEEDS_CUDA]
    args.models = args.models or (["deepseek_v32"] if layouts else here)
    args.steps = args.steps or (10 if layouts else 20)
    args.seq_len = args.seq_len or (64 if layouts else 256)
    return args


def main() -> int:
    args = parse_args(sys.argv[1:])
    logging.getLogger().setLevel(logging.ERROR)
    console = Console(width=110)
    compare = compare_converters if args.layouts is None else compare_layouts
    rows: list[dict[str, Any]] = []
    for name in args.models:
        rows += compare(name, args, console)
    table = Table(*rows[0])
    for row in rows:
        table.add_row(*(f"{value:.1e}" if isinstance(value, float) else str(value) for value in row.values()))
    device = torch.cuda.get_device_name() if platform.home() == "cuda" else platform.home()
    console.print(table, f"{device}, torch {torch.__version__}, {args.dtype}, {args.steps} steps")
    if args.out:
        args.out.write_text(json.dumps(rows, indent=1))
    failures = [] if args.layouts is None else missed(rows)
    for failure in failures:
        console.print(failure)
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
