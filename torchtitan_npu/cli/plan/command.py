"""Rehearses a training job on this machine, without its devices: does it start, does it fit, what does a step take?

    python tools/rehearse.py --config X.toml [--world-size 64] [--rank all-kinds|N] [--device-memory 64GiB]
        [--expert-load balanced|1.5|worst] [--tflops 100] [--bandwidth 100,tp=200] [--no-advice]
        [--backend npu|cuda|cpu] [--json FILE] [--picture FILE] [--section.key value ...]
    python tools/rehearse.py --config X.toml --world-size 64 --search [--top 3]

The second training step of one rank of each kind, on fake tensors over a fake process group, through the project's own
Trainer: docs/how-to/plan-a-job.md. Options of the job (``--training.seq_len 4096``) are given as in training.
Exit code 0: it starts and fits. 1: it does not fit, or a parameter gets no gradient. 2: the error of a real start, or
why it cannot be rehearsed.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import re
import sys
import warnings
from pathlib import Path
from typing import Any

from rich.console import Console

from torchtitan_npu import platform
from torchtitan_npu.cli.arguments import OneLineParser
from torchtitan_npu.errors import UsageError

UNITS = {"GiB": 1 << 30, "GB": 10**9}


def parse_args(argv: list[str]) -> tuple[argparse.Namespace, list[str]]:
    parser = OneLineParser("rehearse.py", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", required=True, help="the job's TOML file")
    parser.add_argument("--world-size", type=int, help="ranks; by default those of the file's layout")
    parser.add_argument("--rank", default="all-kinds", help="all-kinds, or one rank's number")
    parser.add_argument("--device-memory", type=memory, default=64 << 30, metavar="64GiB")
    parser.add_argument("--expert-load", default="balanced", help="balanced, worst, or a factor such as 1.5")
    parser.add_argument("--tflops", type=float, default=100.0, help="10¹² operations a second of a device")
    parser.add_argument("--bandwidth", default="100", help="GB/s that a device sends; 100,tp=200 by group")
    parser.add_argument("--no-advice", action="store_true", help="if it does not fit, do not try what would")
    parser.add_argument("--search", action="store_true", help="find the layouts that fit")
    parser.add_argument("--top", type=int, default=3, help="with --search: how many that fit to rehearse")
    parser.add_argument(
        "--backend", "--home", choices=("npu", "cuda", "cpu"), default="npu", help="where the job is to train"
    )
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
        with warnings.catch_warnings(action="ignore"), platform.job_for(args.backend):
            return run(args, options, console)
    except UsageError as error:
        print(f"torchtitan_npu: error: {error}", file=sys.stderr)  # as the entry says it
        if args.json and not unwritable(args.json):
            args.json.write_text(json.dumps({"error": str(error)}) + "\n")
        return 2
    finally:
        logging.disable(logging.NOTSET)


def check_options(args: argparse.Namespace) -> None:
    """Raise :class:`UsageError` for the first option that cannot be; a rehearsal takes its time, and would be lost."""
    if args.world_size is not None and args.world_size < 1:
        raise UsageError(f"--world-size {args.world_size}: at least 1")
    if args.device_memory < 1:
        raise UsageError("--device-memory: more than 0")
    if args.top < 1:
        raise UsageError(f"--top {args.top}: at least 1")
    for name, path in (("--json", args.json), ("--picture", args.picture)):
        if path and (why := unwritable(path)):
            raise UsageError(f"{name} {path}: {why}")
    if args.search:
        asked = {"--picture": args.picture, "--rank": args.rank != "all-kinds", "--no-advice": args.no_advice}
        for name, there in asked.items():
            if there:
                raise UsageError(f"{name} does not go with --search")
    if args.picture:
        from matplotlib.figure import Figure

        kinds = Figure().canvas.get_supported_filetypes()
        if args.picture.suffix[1:].lower() not in kinds:
            raise UsageError(f"--picture {args.picture}: its name ends in one of .{', .'.join(sorted(kinds))}")


def unwritable(path: Path) -> str:
    """Why ``path`` cannot be written, or nothing; it is left as it is."""
    if not path.parent.is_dir():
        return f"there is no folder {path.parent}"
    there = os.path.lexists(path)
    try:
        path.open("a").close()
    except OSError as error:
        return f"cannot be written: {error.strerror}"
    if not there:
        path.unlink()
    return ""


def run(args: argparse.Namespace, options: list[str], console: Console) -> int:
    from torchtitan_npu.config.parser import JobConfigManager, import_module
    from torchtitan_npu.planner.layout import with_all_degrees, world_size_of
    from torchtitan_npu.planner.rates import Rates

    check_options(args)
    rates = Rates.parse(args.tflops, args.bandwidth)
    config = JobConfigManager().parse_args(["--job.config_file", args.config, *options])
    if config.experimental.custom_import:
        import_module("experimental.custom_import", config.experimental.custom_import)
    world_size = args.world_size or world_size_of(config)
    config = with_all_degrees(config, world_size)
    console.print(f"{BACKENDS[platform.backend()]}; defaults and limits are those of a start on {args.backend}")
    if config.compile.enable:
        console.print("compile.enable: rehearsed without, as eager operators")
    report: dict[str, Any] = {"config": args.config, "options": options, "world_size": world_size}
    report |= {"operators": platform.backend(), "backend": args.backend}
    report |= {"expert_load": args.expert_load, "device_memory": args.device_memory}
    code = (look_for_layouts if args.search else rehearse)(args, config, rates, world_size, report, console)
    if args.json:
        args.json.write_text(json.dumps(report, indent=1) + "\n")
    return code


def rehearse(
    args: argparse.Namespace, config: Any, rates: Any, world_size: int, report: dict[str, Any], console: Console
) -> int:
    """The job as it is, and if it does not fit, what would make it."""
    from torchtitan_npu.config.preflight import check_job
    from torchtitan_npu.planner.job import Failure, rehearse_job
    from torchtitan_npu.planner.layout import layout_name
    from torchtitan_npu.planner.representative_ranks import asked_ranks

    check_job(config, world_size)
    names = asked_ranks(args.rank, config, world_size)
    results = dict(zip(names.values(), rehearse_job(config, world_size, list(names), args.expert_load), strict=True))
    failures = {name: one for name, one in results.items() if isinstance(one, Failure)}
    rehearsals = {name: one for name, one in results.items() if not isinstance(one, Failure)}
    report["layout"] = layout_name(config)
    title = f"{config.model.name} {config.model.flavor}, {config.training.seq_len} tokens, {layout_name(config)}"
    title += f", {world_size} ranks, expert load {args.expert_load}"
    console.print(f"\n{title}")
    show_failures(failures, report, console)
    if rehearsals:
        show_ranks(args, config, rates, rehearsals, title, report, console)
    if failures:
        return 2
    fits = all(one.needed <= args.device_memory for one in rehearsals.values())
    if not fits and not args.no_advice:
        advise_and_show(args, config, world_size, list(rehearsals.values()), report, console)
    return int(not fits or any(one.without_gradient for one in rehearsals.values()))


def show_failures(failures: dict[str, Any], report: dict[str, Any], console: Console) -> None:
    """What would end the start, by kind of rank."""
    for name, failure in failures.items():
        console.print(f"rank {failure.rank} ({name}): {failure}", style="red", markup=False)
    report["failures"] = [{"kind": name, **vars(one)} for name, one in failures.items()]


def show_ranks(
    args: argparse.Namespace,
    config: Any,
    rates: Any,
    rehearsals: dict[str, Any],
    title: str,
    report: dict[str, Any],
    console: Console,
) -> None:
    """The tables, the picture, and the same for the report."""
    from torchtitan_npu.planner.picture import draw
    from torchtitan_npu.planner.rates import step_seconds
    from torchtitan_npu.planner.report import as_json, print_memory, print_work

    print_memory(console, rehearsals, args.device_memory)
    print_work(console, rehearsals, rates)
    report["step_seconds"] = step_seconds(list(rehearsals.values()), config, rates)
    console.print(f"a step takes {report['step_seconds']:.4g} s at these rates, with what a pipeline's ranks wait")
    report["ranks"] = [as_json(name, one, rates, args.device_memory) for name, one in rehearsals.items()]
    if args.picture:
        draw(args.picture, rehearsals, args.device_memory, title)


def advise_and_show(
    args: argparse.Namespace,
    config: Any,
    world_size: int,
    rehearsals: list[Any],
    report: dict[str, Any],
    console: Console,
) -> None:
    """What would make the job fit, each thing tried."""
    from torchtitan_npu.planner.advice import advise, print_advice

    tried = advise(config, world_size, rehearsals, args.expert_load, args.device_memory)
    print_advice(console, tried, max(rehearsals, key=lambda one: one.needed), args.device_memory)
    report["advice"] = [vars(one) for one in tried]


def look_for_layouts(
    args: argparse.Namespace, config: Any, rates: Any, world_size: int, report: dict[str, Any], console: Console
) -> int:
    """Every layout that divides the ranks: estimated, and the best rehearsed."""
    from torchtitan_npu.config.preflight import build_on_meta, check_job
    from torchtitan_npu.planner.job import stated_load
    from torchtitan_npu.planner.layout import degrees
    from torchtitan_npu.planner.parameters import Size, arithmetic, print_arithmetic, sizes
    from torchtitan_npu.planner.search import own_layout, print_layouts, search

    own = own_layout(config, world_size)
    check_job(own, world_size)  # a mistake in the file is no reason to leave out layouts
    stated_load(args.expert_load, own)
    size = sum(sizes(build_on_meta(config)).values(), Size(0, 0))
    numbers = report["arithmetic"] = arithmetic(
        size, config.training.dtype, degrees(config), world_size, args.device_memory
    )
    print_arithmetic(console, numbers, degrees(config), world_size, args.device_memory)
    if world_size < numbers["devices_at_least"]:
        report["layouts"] = []
        return 1
    found = search(config, world_size, args.device_memory, args.expert_load, rates, args.top, console)
    print_layouts(console, found, args.device_memory, rates)
    report["layouts"] = [one.as_json(args.device_memory, rates) for one in found]
    return int(not any(one.fits(args.device_memory) and one.rehearsals for one in found))


BACKENDS = {
    "npu": "rehearsed against torch_npu: its operators, shape functions and autograd, on fake npu tensors",
    "cuda": "rehearsed with the project's stand-ins for torch_npu's operators, on fake CUDA tensors",
    "cpu": "rehearsed with the project's stand-ins for torch_npu's operators, on fake CPU tensors "
    "(source tools/rehearsal_env.sh for torch_npu's own)",
}
