"""Train TorchTitan's debug models with and without converters, or on many layouts, and compare their curves.

    torchtitan-npu parity [--models llama3 gpt_oss ...] [--steps 20] [--dtype float32|bfloat16] [--out parity.json]
    torchtitan-npu parity --layouts [TP2 PP2 ...] [--models deepseek_v32] [--converters] [--documents] [--ranks 4]

The first form prints a row per model and list of converters: the largest relative difference of loss and gradient norm
from the eager model over all steps. A further row shows the eager model with initial weights changed by one ulp, as a
measure of how far rounding errors grow. It runs in one process on this machine's device.

With bfloat16 the row compares the loss with the eager float32 run. Rounding is partly chance, so the eager model and
each list of converters train --samples times, with initial float32 weights changed by 0, 1, 2, ... ulps. The row has
the median and the largest difference, the same for the eager runs, and how many runs are within the eager range.

With --layouts there is a row per parallel layout: the named ones, or all on up to --ranks ranks. Each is compared in
float32 with an eager run on one rank and the same global batches; with --converters also with all converters. The norm
is compared in float64 and as reported by TorchTitan. Each rank is a process; with fewer GPUs than ranks, use the CPU
(CUDA_VISIBLE_DEVICES=).

Exit code 0: passed. 1: a float32 loss differs by more than 1e-5 or a norm by more than 1e-4, or a value is not finite.
2: invalid arguments or an invalid job.
"""

from __future__ import annotations

import argparse
import json
import logging
import sys
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from torchtitan_npu.cli.arguments import OneLineParser
from torchtitan_npu.cli.parity.cases import LAYOUTS, MODELS
from torchtitan_npu.cli.parity.thresholds import find_failures
from torchtitan_npu.errors import UsageError

PROG = "torchtitan-npu parity"


def build_parser() -> OneLineParser:
    parser = OneLineParser(PROG, description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--models", nargs="+", choices=MODELS, help="models to train (default: all; with --layouts deepseek_v32)"
    )
    parser.add_argument(
        "--layouts", nargs="*", choices=LAYOUTS, help="compare layouts instead of converters (default: all)"
    )
    parser.add_argument("--converters", action="store_true", help="with --layouts: also train with all converters")
    parser.add_argument("--documents", action="store_true", help="with --layouts: set dsa.document_mask (deepseek_v32)")
    parser.add_argument(
        "--ranks",
        type=int,
        choices=range(2, 9),
        help="with --layouts: all layouts on up to this many ranks (default 4)",
    )
    parser.add_argument("--steps", type=int, help="training steps (default 20; with --layouts 10)")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--seq-len", type=int, help="sequence length (default 256; with --layouts 64)")
    parser.add_argument("--lr", type=float, default=1e-4, help="learning rate (default %(default)s)")
    parser.add_argument("--samples", type=int, help="with bfloat16: runs of each model (default 8)")
    parser.add_argument("--out", type=Path, help="write the rows as JSON")
    return parser


def parse_args(argv: list[str]) -> argparse.Namespace:
    """Parse and check the arguments."""
    parser = build_parser()
    args = parser.parse_args(argv)
    from torchtitan_npu import platform
    from torchtitan_npu.cli.parity.training import needs_cuda

    layouts = args.layouts is not None
    if layouts and args.dtype != "float32":
        parser.error("--layouts requires --dtype float32: bfloat16 rounding would hide errors")
    for option in ("converters", "documents", "ranks"):
        if getattr(args, option) and not layouts:
            parser.error(f"--{option} requires --layouts")
    if args.layouts and args.ranks:
        parser.error("--ranks applies only to --layouts without names")
    if args.samples is not None and args.dtype == "float32":
        parser.error("--samples requires --dtype bfloat16")
    here = [name for name in MODELS if platform.backend() == "cuda" or not needs_cuda(name)]
    if elsewhere := [name for name in args.models or () if name not in here]:
        parser.error(f"--models {' '.join(elsewhere)}: trains only on CUDA, because of flex attention")
    args.models = args.models or (["deepseek_v32"] if layouts else here)
    defaults = {"steps": 10 if layouts else 20, "seq_len": 64 if layouts else 256, "samples": 8, "ranks": 4}
    for option, default in defaults.items():
        if getattr(args, option) is None:
            setattr(args, option, default)
        if getattr(args, option) < 1:
            parser.error(f"--{option.replace('_', '-')} must be at least 1")
    return args


def main(argv: list[str]) -> int:
    """Run the command and return its exit code."""
    args = parse_args(argv)
    from torchtitan_npu.cli.parity.compare_converters import compare_converters
    from torchtitan_npu.cli.parity.compare_layouts import compare_layouts

    logging.getLogger().setLevel(logging.ERROR)
    console = Console(width=110)
    compare = compare_converters if args.layouts is None else compare_layouts
    rows: list[dict[str, Any]] = []
    try:
        for name in args.models:
            rows += compare(name, args, console)
    except UsageError as error:
        print(f"{PROG}: {error}", file=sys.stderr)
        return 2
    return report(rows, args, console)


def report(rows: list[dict[str, Any]], args: argparse.Namespace, console: Console) -> int:
    """Print the table and its failures. Return the exit code."""
    import torch

    from torchtitan_npu import platform

    table = Table(*rows[0])
    for row in rows:
        table.add_row(*(f"{value:.1e}" if isinstance(value, float) else str(value) for value in row.values()))
    device = torch.cuda.get_device_name() if platform.backend() == "cuda" else platform.backend()
    console.print(table, f"{device}, torch {torch.__version__}, {args.dtype}, {args.steps} steps")
    if args.out:
        args.out.write_text(json.dumps(rows, indent=1))
    failures = find_failures(rows, args.dtype)
    for failure in failures:
        console.print(failure)
    return 1 if failures else 0
