#!/usr/bin/env python
"""Rehearses a training job on this machine, without its devices: does it start, does it fit, what does a step take?

    python tools/rehearse.py --config X.toml [--world-size 64] [--rank all-kinds|N] [--device-memory 64GiB]
        [--expert-load balanced|1.5|worst] [--tflops 100] [--bandwidth 100,tp=200] [--advise]
        [--json FILE] [--picture FILE] [--section.key value ...]
    python tools/rehearse.py --config X.toml --world-size 64 --search [--top 3]

The second training step of one rank of each kind, on fake tensors over a fake process group, through the project's own
Trainer: docs/rehearse-a-job.md. Options of the job (``--training.seq_len 4096``) go on the command line as in training.
Exit code 0: it starts and fits. 1: it does not fit, or a parameter gets no gradient. 2: the error of a real start.
"""

from __future__ import annotations

import argparse
import json
import logging
import re
import sys
import warnings
from pathlib import Path
from typing import Any

from rich.console import Console

from torchtitan_npu import platform
from torchtitan_npu.errors import UsageError

UNITS = {"GiB": 1 << 30, "GB": 10**9}


def parse_args(argv: list[str]) -> tuple[argparse.Namespace, list[str]]:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", required=True, help="the job's TOML file")
    parser.add_argument("--world-size", type=int, help="ranks; by default those of the file's layout")
    parser.add_argument("--rank", default="all-kinds", help="all-kinds, or one rank's number")
    parser.add_argument("--device-memory", type=memory, default=64 << 30, metavar="64GiB")
    parser.add_argument("--expert-load", default="balanced", help="balanced, worst, or a factor such as 1.5")
    parser.add_argument("--tflops", type=float, default=100.0, help="10¹² operations a second of a device")
    parser.add_argument("--bandwidth", default="100", help="GB/s that a device sends; 100,tp=200 by group")
    parser.add_argument("--advise", action="store_true", help="rehearse what would make it fit")
    parser.add_argument("--search", action="store_true", help="find the layouts that fit")
    parser.add_argument("--top", type=int, default=3, help="with --search: how many to rehearse")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--picture", type=Path)
    return parser.parse_known_args(argv)


def memory(text: str) -> int:
    """``64GiB`` or ``128GB``, in bytes."""
    match = re.fullmatch(r"([\d.]+) *(GiB|GB)", text)
    if not match:
        raise argparse.ArgumentTypeError(f"{text}: say 64GiB or 64GB")
    return int(float(match[1]) * UNITS[match[2]])


def main(argv: list[str]) -> int:
    args, options = parse_args(argv)
    console = Console(width=max(100, Console().width))
    platform.prepare()
    logging.disable(logging.WARNING)  # what a real start logs, and warns of
    try:
        with warnings.catch_warnings(action="ignore"):
            return run(args, options, console)
    except UsageError as error:
        print(f"torchtitan_npu: error: {error}", file=sys.stderr)  # as the entry says it
        return 2
    finally:
        logging.disable(logging.NOTSET)


def run(args: argparse.Namespace, options: list[str], console: Console) -> int:
    from torchtitan_npu.config_manager import JobConfigManager, import_module
    from torchtitan_npu.rehearsal.advice import advise, print_advice
    from torchtitan_npu.rehearsal.job import kinds, layout_name, rehearse_job, stated_load, world_size_of
    from torchtitan_npu.rehearsal.picture import draw
    from torchtitan_npu.rehearsal.rates import Rates, step_seconds
    from torchtitan_npu.rehearsal.report import as_json, print_memory, print_work
    from torchtitan_npu.rehearsal.search import print_layouts, search

    config = JobConfigManager().parse_args(["--job.config_file", args.config, *options])
    if config.experimental.custom_import:
        import_module("experimental.custom_import", config.experimental.custom_import)
    world_size = args.world_size or world_size_of(config)
    rates = Rates.parse(args.tflops, args.bandwidth)
    load = stated_load(args.expert_load, config)
    console.print(HOMES[platform.home()])
    if config.compile.enable:
        console.print("compile.enable: rehearsed without, as eager operators")
    report: dict[str, Any] = {"config": args.config, "options": options, "world_size": world_size}
    report |= {"home": platform.home(), "expert_load": args.expert_load, "device_memory": args.device_memory}
    if args.search:
        found = search(config, world_size, args.device_memory, args.expert_load, rates, args.top, console)
        print_layouts(console, found, args.device_memory)
        report["layouts"] = [one.as_json() for one in found]
        fits = any(one.fits(args.device_memory) for one in found)
    else:
        names = kinds(config, world_size) if args.rank == "all-kinds" else {int(args.rank): "this rank"}
        rehearsals = rehearse_job(config, world_size, list(names), load)
        by_name = dict(zip(names.values(), rehearsals, strict=True))
        title = f"{config.model.name} {config.model.flavor}, {config.training.seq_len} tokens, {layout_name(config)}"
        title += f", {world_size} ranks, expert load {args.expert_load}"
        console.print(f"\n{title}")
        print_memory(console, by_name, args.device_memory)
        print_work(console, by_name, rates)
        report["layout"], report["step_seconds"] = layout_name(config), step_seconds(rehearsals, config, rates)
        report["ranks"] = [as_json(name, one, rates, args.device_memory) for name, one in by_name.items()]
        fits = all(one.peak <= args.device_memory and not one.without_gradient for one in rehearsals)
        if not args.advise and any(one.peak > args.device_memory for one in rehearsals):
            console.print("--advise rehearses what would make it fit: swap, activation checkpointing, CP, batch")
        if args.picture:
            draw(args.picture, by_name, args.device_memory, title)
        if args.advise:
            worst = max(rehearsals, key=lambda one: one.peak)
            tried = advise(config, world_size, worst, load)
            print_advice(console, tried, worst, args.device_memory)
            report["advice"] = [vars(one) for one in tried]
    if args.json:
        args.json.write_text(json.dumps(report, indent=1) + "\n")
    return 0 if fits else 1


HOMES = {
    "npu": "rehearsed against torch_npu: its operators, shape functions and autograd, on fake npu tensors",
    "cuda": "rehearsed with the project's stand-ins for torch_npu's operators, on fake CUDA tensors",
    "cpu": "rehearsed with the project's stand-ins for torch_npu's operators, on fake CPU tensors; "
    "source tools/rehearsal_env.sh for torch_npu's own",
}


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
