"""Predict memory, traffic and time of a training job without its devices, or search for a layout that fits.

    torchtitan-npu plan --config X.toml [--world-size 64] [--rank representative|N]
        [--chip Ascend910B3] [--device-memory 60.9GiB]
        [--expert-load balanced|1.5|worst] [--tflops 100] [--bandwidth 100,tp=200] [--no-advice]
        [--backend npu|cuda|cpu] [--json FILE] [--picture FILE] [--section.key value ...]
    torchtitan-npu plan --config X.toml --world-size 64 --search [--top 3]

The command dry-runs the second training step of each representative rank: the real Trainer on fake tensors, over a fake
process group. Options of the job (``--training.seq_len 4096``) are those of training. See docs/how-to/plan-a-job.md.
Exit code 0: the job starts and fits. 1: it does not fit, or a parameter gets no gradient. 2: the error of a real start,
or the reason why a dry run is not possible.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import warnings
from pathlib import Path
from typing import Any

from rich.console import Console

from torchtitan_npu.chips import DEFAULT_CHIP, find_chip
from torchtitan_npu.cli.arguments import OneLineParser, memory_size, without_log
from torchtitan_npu.errors import UsageError
from torchtitan_npu.progress import Progress


def build_parser() -> OneLineParser:
    parser = OneLineParser("torchtitan-npu plan", description=__doc__)
    parser.add_argument("--config", required=True, help="the job's TOML file")
    parser.add_argument("--world-size", type=int, help="number of ranks; by default that of the file's layout")
    parser.add_argument("--rank", default="representative", help="representative, or the number of one rank")
    parser.add_argument("--chip", default=DEFAULT_CHIP, help="chip that the job is for (default: %(default)s)")
    parser.add_argument(
        "--device-memory", type=memory_size, metavar="60.9GiB", help="by default what torch reports on the chip"
    )
    parser.add_argument("--expert-load", default="balanced", help="balanced, worst, or a factor such as 1.5")
    parser.add_argument("--tflops", type=float, default=100.0, help="assumed TFLOP/s of a device")
    parser.add_argument("--bandwidth", default="100", help="assumed GB/s that a device sends; by group: 100,tp=200")
    parser.add_argument("--no-advice", action="store_true", help="if the job does not fit, try no changes")
    parser.add_argument("--search", action="store_true", help="search for the layouts that fit")
    parser.add_argument("--top", type=int, default=3, help="with --search: stop after so many layouts that fit")
    parser.add_argument(
        "--backend", "--home", choices=("npu", "cuda", "cpu"), default="npu", help="backend that the job is for"
    )
    parser.add_argument("--json", type=Path)
    parser.add_argument("--picture", type=Path)
    return parser


def main(argv: list[str]) -> int:
    args, options = build_parser().parse_known_args(argv)
    console = Console(width=max(100, Console().width))
    from torchtitan_npu import platform

    platform.prepare()
    try:
        with without_log(), warnings.catch_warnings(action="ignore"), platform.job_for(args.backend):
            return run(args, options, console)
    except UsageError as error:
        print(f"torchtitan_npu: error: {error}", file=sys.stderr)  # the same line as in training
        if args.json and not unwritable(args.json):
            args.json.write_text(json.dumps({"error": str(error)}) + "\n")
        return 2


def check_options(args: argparse.Namespace) -> None:
    """Raise :class:`UsageError` for the first invalid option, before a dry run takes its time."""
    if args.world_size is not None and args.world_size < 1:
        raise UsageError(f"--world-size {args.world_size}: must be at least 1")
    chip = find_chip(args.chip)
    if args.device_memory is None and chip.memory is None:
        raise UsageError(f"--chip {args.chip}: its memory is not known; set --device-memory")
    if args.device_memory is not None and args.device_memory < 1:
        raise UsageError("--device-memory: must be more than 0")
    args.device_memory = args.device_memory or chip.memory
    if args.top < 1:
        raise UsageError(f"--top {args.top}: must be at least 1")
    for name, path in (("--json", args.json), ("--picture", args.picture)):
        if path and (why := unwritable(path)):
            raise UsageError(f"{name} {path}: {why}")
    if args.search:
        from torchtitan_npu.planner.dry_run_ranks import REPRESENTATIVE

        excluded = {"--picture": args.picture, "--rank": args.rank not in REPRESENTATIVE, "--no-advice": args.no_advice}
        for name, is_set in excluded.items():
            if is_set:
                raise UsageError(f"{name} cannot be combined with --search")
    if args.picture:
        from matplotlib.figure import Figure

        suffixes = Figure().canvas.get_supported_filetypes()
        if args.picture.suffix[1:].lower() not in suffixes:
            raise UsageError(f"--picture {args.picture}: must end in one of .{', .'.join(sorted(suffixes))}")


def unwritable(path: Path) -> str:
    """Return why ``path`` cannot be written, or an empty string. The file is not changed."""
    if not path.parent.is_dir():
        return f"there is no folder {path.parent}"
    existed = os.path.lexists(path)
    try:
        path.open("a").close()
    except OSError as error:
        return f"cannot be written: {error.strerror}"
    if not existed:
        path.unlink()
    return ""


def run(args: argparse.Namespace, options: list[str], console: Console) -> int:
    from torchtitan_npu import platform
    from torchtitan_npu.config.parser import load_job
    from torchtitan_npu.planner.layout import with_all_degrees, world_size_of
    from torchtitan_npu.planner.work import Rates

    check_options(args)
    rates = Rates.parse(args.tflops, args.bandwidth)
    config = load_job(["--job.config_file", args.config, *options])
    world_size = args.world_size or world_size_of(config)
    config = with_all_degrees(config, world_size)
    console.print(f"{BACKENDS[platform.backend()]}; defaults and limits of a job on {args.backend}")
    if config.compile.enable:
        console.print("compile.enable: the dry run does not compile, it runs eager operators")
    report: dict[str, Any] = {"config": args.config, "options": options, "world_size": world_size}
    report |= {"operators": platform.backend(), "backend": args.backend}
    report |= {"expert_load": args.expert_load, "device_memory": args.device_memory}
    code = (search_layouts if args.search else dry_run)(args, config, rates, world_size, report, console)
    if args.json:
        args.json.write_text(json.dumps(report, indent=1) + "\n")
    return code


def dry_run(
    args: argparse.Namespace, config: Any, rates: Any, world_size: int, report: dict[str, Any], console: Console
) -> int:
    """Dry-run the job, and if it does not fit, try changes that may make it fit."""
    from torchtitan_npu.planner.dry_run_ranks import StartFailure, dry_run_ranks, selected_ranks, step_seconds
    from torchtitan_npu.planner.layout import layout_name
    from torchtitan_npu.planner.report import as_json, draw, print_advice, print_memory, print_work
    from torchtitan_npu.planner.search import advise
    from torchtitan_npu.preflight.job import check_job

    with Progress("plan: checking the job"):
        check_job(config, world_size)
    names = selected_ranks(args.rank, config, world_size)
    results = dict(zip(names.values(), dry_run_ranks(config, world_size, list(names), args.expert_load), strict=True))
    failures = {name: one for name, one in results.items() if isinstance(one, StartFailure)}
    runs = {name: one for name, one in results.items() if not isinstance(one, StartFailure)}
    report["layout"] = layout_name(config)
    title = f"{config.model.name} {config.model.flavor}, {config.training.seq_len} tokens, {layout_name(config)}"
    title += f", {world_size} ranks, expert load {args.expert_load}"
    console.print(f"\n{title}")
    for name, failure in failures.items():
        console.print(f"rank {failure.rank} ({name}): {failure}", style="red", markup=False)
    report["failures"] = [{"name": name, **vars(one)} for name, one in failures.items()]
    found = list(runs.values())
    if found:
        print_memory(console, runs, args.device_memory)
        print_work(console, runs, rates)
        report["step_seconds"] = step_seconds(found, config, rates)
        console.print(f"a step takes {report['step_seconds']:.4g} s at these rates, with the pipeline's idle time")
        report["ranks"] = [as_json(name, one, rates, args.device_memory) for name, one in runs.items()]
        if args.picture:
            draw(args.picture, runs, args.device_memory, title)
    if failures:
        return 2
    fits = all(one.needed <= args.device_memory for one in found)
    if not fits and not args.no_advice:
        tried = advise(config, world_size, found, args.expert_load, args.device_memory)
        print_advice(console, tried, max(found, key=lambda one: one.needed), args.device_memory)
        report["advice"] = [vars(one) for one in tried]
    return int(not fits or any(one.without_gradient for one in found))


def search_layouts(
    args: argparse.Namespace, config: Any, rates: Any, world_size: int, report: dict[str, Any], console: Console
) -> int:
    """Estimate every layout that divides the ranks, and dry-run the best."""
    from torchtitan_npu.planner.dry_run_ranks import assumed_load
    from torchtitan_npu.planner.layout import Size, degrees, sizes
    from torchtitan_npu.planner.report import print_layouts, print_weights_and_gradients
    from torchtitan_npu.planner.search import job_layout, search, weights_and_gradients
    from torchtitan_npu.preflight.job import check_job
    from torchtitan_npu.preflight.job_context import build_on_meta

    job = job_layout(config, world_size)
    with Progress("plan: checking the job"):
        check_job(job, world_size)  # a mistake in the file would only exclude layouts
    assumed_load(args.expert_load, job)
    with Progress("plan: counting parameters"):
        size = sum(sizes(build_on_meta(config)).values(), Size(0, 0))
    layout, memory = degrees(config), args.device_memory
    numbers = weights_and_gradients(size, config.training.dtype, layout, world_size, memory)
    report["arithmetic"] = numbers
    print_weights_and_gradients(console, numbers, layout, world_size, memory)
    if world_size < numbers["min_devices"]:
        report["layouts"] = []
        return 1
    found = search(config, world_size, memory, args.expert_load, rates, args.top, console)
    print_layouts(console, found, memory, rates)
    report["layouts"] = [one.as_json(memory, rates) for one in found]
    return int(not any(one.fits(memory) and one.dry_runs for one in found))


BACKENDS = {
    "npu": "dry run with torch_npu's operators, meta kernels and autograd, on fake npu tensors",
    "cuda": "dry run with this project's kernels for torch_npu's operators, on fake CUDA tensors",
    "cpu": "dry run with this project's reference kernels for torch_npu's operators, on fake CPU tensors "
    "(source tools/contract_env.sh to use torch_npu's own)",
}
