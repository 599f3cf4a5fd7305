"""Compares two loss curves and gives a verdict: identical, within tolerance, or the first diverging step.

    python tools/compare_loss.py BASELINE CANDIDATE [--rtol R] [--atol A] [--assert-equal] [--allow-partial] [--out DIR]
    python tools/compare_loss.py run --config X.toml --candidate-converters a,b [--nproc N] [--steps N] [-- EXTRA ...]

Each side is a run folder (TensorBoard events), a console log, or JSON/CSV. Exit code 0: within tolerance, 1: not,
2: the input is unusable. See docs/how-to/compare-loss-curves.md.
"""

from __future__ import annotations

import argparse
import math
import sys
from pathlib import Path

from torchtitan_npu.cli.arguments import OneLineParser
from torchtitan_npu.cli.compare.compare import Tolerance, compare
from torchtitan_npu.cli.compare.curves import Unusable
from torchtitan_npu.cli.compare.launch import RunPair, launch_both
from torchtitan_npu.cli.compare.read import read_curve
from torchtitan_npu.cli.compare.report import summary_lines, write_report

DEFAULTS = Tolerance()


def non_negative(text: str) -> float:
    """A tolerance: finite and not below zero."""
    value = float(text)
    if not (math.isfinite(value) and value >= 0):
        raise argparse.ArgumentTypeError(f"{text} is not a finite number >= 0")
    return value


def positive(text: str) -> int:
    """A count of at least one."""
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{text} is not a whole number >= 1")
    return value


def converter_list(text: str) -> list[str]:
    """``a,b``; an empty name would silently compare the baseline with itself."""
    names = [name.strip() for name in text.split(",")]
    if not all(names):
        raise argparse.ArgumentTypeError(f"{text!r} has an empty name in it")
    return names


def build_parser(run: bool) -> OneLineParser:
    """The arguments of the comparison alone, or of ``run``."""
    prog = "compare_loss.py run" if run else "compare_loss.py"
    parser = OneLineParser(
        prog, description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    if run:
        parser.add_argument("--config", type=Path, required=True, help="the TOML file of both runs")
        parser.add_argument(
            "--candidate-converters", type=converter_list, required=True, help="a,b: the baseline has none"
        )
        parser.add_argument("--nproc", type=positive, default=1, help="ranks on this machine (default 1)")
        parser.add_argument("--steps", type=positive, default=20, help="training steps (default 20)")
        parser.add_argument("--seed", type=int, default=42, help="debug.seed of both runs (default 42)")
        parser.add_argument("--force", action="store_true", help="remove what an earlier 'run' left in --out")
    else:
        parser.add_argument("baseline", type=Path, help="run folder, console log, .json or .csv ('run' as ./run)")
        parser.add_argument("candidate", type=Path, help="the same, of the other run")
    parser.add_argument("--rtol", type=non_negative, help=f"relative tolerance a step (default {DEFAULTS.rtol:g})")
    parser.add_argument("--atol", type=non_negative, help=f"absolute tolerance a step (default {DEFAULTS.atol:g})")
    parser.add_argument("--assert-equal", action="store_true", help="bit-identical or exit code 1")
    parser.add_argument("--allow-partial", action="store_true", help="compare the common steps when the sides differ")
    parser.add_argument("--out", type=Path, default=Path("outputs/compare"), help="folder of the report (%(default)s)")
    return parser


def tolerance_of(parser: OneLineParser, args: argparse.Namespace) -> Tolerance:
    """The tolerance asked for; an exact comparison has none, so naming one beside it is a mistake."""
    if args.assert_equal and (args.rtol is not None or args.atol is not None):
        parser.error("--assert-equal leaves no room for --rtol or --atol")
    rtol = DEFAULTS.rtol if args.rtol is None else args.rtol
    atol = DEFAULTS.atol if args.atol is None else args.atol
    return Tolerance(rtol, atol, args.assert_equal)


def main(argv: list[str]) -> int:
    """Runs the command line and returns its exit code."""
    run = argv[:1] == ["run"]
    parser = build_parser(run)
    extra: list[str] = []
    if run:
        argv = argv[1:]
        if "--" in argv:
            cut = argv.index("--")
            argv, extra = argv[:cut], argv[cut + 1 :]
    args = parser.parse_args(argv)
    tolerance = tolerance_of(parser, args)
    try:
        if run:
            pair = RunPair(
                args.config, args.candidate_converters, args.out, args.nproc, args.steps, args.seed, tuple(extra)
            )
            baseline, candidate = launch_both(pair, force=args.force)
        else:
            baseline, candidate = args.baseline, args.candidate
        comparison = compare(read_curve(baseline), read_curve(candidate), tolerance, args.allow_partial)
        write_report(comparison, args.out)
    except (Unusable, OSError) as error:
        print(f"compare_loss: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("compare_loss: interrupted", file=sys.stderr)
        return 130
    print("\n".join(summary_lines(comparison)))
    print(f"  report: {args.out / 'report.md'}")
    return 0 if comparison.passed else 1
