"""Compare loss curves with a baseline. The verdict is: identical, within tolerance, or the first diverging step.

    torchtitan-npu compare BASELINE CANDIDATE [CANDIDATE ...] [--column METRIC=NAME ...] [--rtol R] [--atol A]
                           [--assert-equal] [--allow-partial] [--out DIR]
    torchtitan-npu compare run --config X.toml --candidate-converters a,b [--candidate-converters c ...] [--nproc N]
                               [--steps N] [--replay] [-- EXTRA ...]

Each run is a run folder (TensorBoard events), a .json, .jsonl or .csv file, or a console log. ``run`` trains them.
Exit code 0: all candidates are within tolerance, 1: one is not, or a training failed, 2: invalid input.
See docs/how-to/compare-loss-curves.md.
"""

from __future__ import annotations

import argparse
import math
import shlex
import sys
from pathlib import Path

from torchtitan_npu.cli.arguments import OneLineParser
from torchtitan_npu.cli.compare.comparison import Tolerance, compare
from torchtitan_npu.cli.compare.report import summary_lines, write_report
from torchtitan_npu.cli.compare.sources import InputError, parse_columns, read_curve
from torchtitan_npu.cli.compare.train_runs import Runs, TrainingError, train_all
from torchtitan_npu.errors import one_line
from torchtitan_npu.progress import Progress

DEFAULTS = Tolerance()
PROG = "torchtitan-npu compare"


def non_negative(text: str) -> float:
    """Parse a tolerance."""
    value = float(text)
    if not (math.isfinite(value) and value >= 0):
        raise argparse.ArgumentTypeError(f"{text} is not a finite number >= 0")
    return value


def positive(text: str) -> int:
    """Parse a count."""
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{text} is not an integer >= 1")
    return value


def converter_list(text: str) -> list[str]:
    """Parse ``a,b``. An empty name would silently compare the baseline with itself."""
    names = [name.strip() for name in text.split(",")]
    if not all(names):
        raise argparse.ArgumentTypeError(f"{text!r} contains an empty name")
    return names


def build_parser(run: bool = False) -> OneLineParser:
    """Build the parser of the comparison, or of ``run``."""
    parser = OneLineParser(
        f"{PROG} run" if run else PROG,
        description=__doc__,
        allow_abbrev=False,
    )
    if run:
        parser.add_argument("--config", type=Path, required=True, help="TOML file of all runs")
        parser.add_argument(
            "--candidate-converters",
            type=converter_list,
            action="append",
            required=True,
            help="converters of a candidate, as a,b; the baseline has none. Repeat it for several candidates",
        )
        parser.add_argument("--nproc", type=positive, default=1, help="ranks on this machine (default 1)")
        parser.add_argument("--steps", type=positive, default=20, help="training steps (default 20)")
        parser.add_argument("--seed", type=int, default=42, help="debug.seed of all runs (default 42)")
        parser.add_argument(
            "--replay", action="store_true", help="train the candidates with the experts and keys of the baseline"
        )
        parser.add_argument("--force", action="store_true", help="replace the files of an earlier 'run' in --out")
    else:
        parser.add_argument(
            "baseline", type=Path, help="run folder, .json, .jsonl, .csv or console log (a folder named run: ./run)"
        )
        parser.add_argument("candidate", type=Path, nargs="+", help="the same for each other run")
        parser.add_argument(
            "--column",
            action="append",
            default=[],
            metavar="METRIC=NAME",
            help="read step, loss or grad_norm from this column, tag or key; may be repeated",
        )
    parser.add_argument("--rtol", type=non_negative, help=f"relative tolerance per step (default {DEFAULTS.rtol:g})")
    parser.add_argument("--atol", type=non_negative, help=f"absolute tolerance per step (default {DEFAULTS.atol:g})")
    parser.add_argument("--assert-equal", action="store_true", help="require bit-identical values")
    parser.add_argument(
        "--allow-partial", action="store_true", help="compare only the steps and metrics that both runs have"
    )
    parser.add_argument(
        "--out", type=Path, default=Path("outputs/compare"), help="folder of the report (default %(default)s)"
    )
    return parser


def tolerance_of(parser: OneLineParser, args: argparse.Namespace) -> Tolerance:
    """Return the tolerance of the arguments. An exact comparison takes no tolerance."""
    if args.assert_equal and (args.rtol is not None or args.atol is not None):
        parser.error("--assert-equal excludes --rtol and --atol")
    rtol = DEFAULTS.rtol if args.rtol is None else args.rtol
    atol = DEFAULTS.atol if args.atol is None else args.atol
    return Tolerance(rtol, atol, args.assert_equal)


def main(argv: list[str]) -> int:
    """Run the command and return its exit code."""
    command = shlex.join([*PROG.split(), *argv])
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
        columns = parse_columns([] if run else args.column)
        if run:
            runs = Runs(
                args.config,
                args.candidate_converters,
                args.out,
                args.nproc,
                args.steps,
                args.seed,
                tuple(extra),
                args.replay,
            )
            paths = train_all(runs, force=args.force)
        else:
            paths = [args.baseline, *args.candidate]
        with Progress("compare: reading the runs") as progress:
            baseline, *candidates = (read_curve(path, columns) for path in paths)
            comparisons = [compare(baseline, candidate, tolerance, args.allow_partial) for candidate in candidates]
            progress.update("compare: writing the report")
            write_report(comparisons, args.out, command)
    except (InputError, OSError, TrainingError) as error:
        print(f"{PROG}: {one_line(error)}", file=sys.stderr)
        return 1 if isinstance(error, TrainingError) else 2
    print("\n".join(summary_lines(comparisons)))
    print(f"  report: {one_line(args.out / 'report.html')}")
    return 0 if all(comparison.passed for comparison in comparisons) else 1
