"""Compare two loss curves. The verdict is: identical, within tolerance, or the first diverging step.

    torchtitan-npu compare BASELINE CANDIDATE [--rtol R] [--atol A] [--assert-equal] [--allow-partial] [--out DIR]
    torchtitan-npu compare run --config X.toml --candidate-converters a,b [--nproc N] [--steps N] [--replay]
                               [-- EXTRA ...]

Each side is a run folder (TensorBoard events), a console log, or JSON/CSV. ``run`` trains both sides first.
Exit code 0: within tolerance, 1: not, 2: invalid input. See docs/how-to/compare-loss-curves.md.
"""

from __future__ import annotations

import argparse
import math
import sys
from pathlib import Path

from torchtitan_npu.cli.arguments import OneLineParser
from torchtitan_npu.cli.compare.comparison import compare
from torchtitan_npu.cli.compare.curves import InputError
from torchtitan_npu.cli.compare.metrics import Tolerance
from torchtitan_npu.cli.compare.report import summary_lines, write_report
from torchtitan_npu.cli.compare.sources import read_curve
from torchtitan_npu.cli.compare.train_pair import RunPair, train_both
from torchtitan_npu.errors import one_line

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
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    if run:
        parser.add_argument("--config", type=Path, required=True, help="TOML file of both runs")
        parser.add_argument(
            "--candidate-converters",
            type=converter_list,
            required=True,
            help="converters of the candidate, as a,b; the baseline has none",
        )
        parser.add_argument("--nproc", type=positive, default=1, help="ranks on this machine (default 1)")
        parser.add_argument("--steps", type=positive, default=20, help="training steps (default 20)")
        parser.add_argument("--seed", type=int, default=42, help="debug.seed of both runs (default 42)")
        parser.add_argument(
            "--replay", action="store_true", help="train the candidate with the experts and keys of the baseline"
        )
        parser.add_argument("--force", action="store_true", help="replace the files of an earlier 'run' in --out")
    else:
        parser.add_argument(
            "baseline", type=Path, help="run folder, console log, .json or .csv (a folder named run: ./run)"
        )
        parser.add_argument("candidate", type=Path, help="the same for the other run")
    parser.add_argument("--rtol", type=non_negative, help=f"relative tolerance per step (default {DEFAULTS.rtol:g})")
    parser.add_argument("--atol", type=non_negative, help=f"absolute tolerance per step (default {DEFAULTS.atol:g})")
    parser.add_argument("--assert-equal", action="store_true", help="require bit-identical values")
    parser.add_argument(
        "--allow-partial", action="store_true", help="compare only the steps and metrics that both sides have"
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
                args.config,
                args.candidate_converters,
                args.out,
                args.nproc,
                args.steps,
                args.seed,
                tuple(extra),
                args.replay,
            )
            baseline, candidate = train_both(pair, force=args.force)
        else:
            baseline, candidate = args.baseline, args.candidate
        comparison = compare(read_curve(baseline), read_curve(candidate), tolerance, args.allow_partial)
        write_report(comparison, args.out)
    except (InputError, OSError) as error:
        print(f"{PROG}: {one_line(error)}", file=sys.stderr)
        return 2
    print("\n".join(summary_lines(comparison)))
    print(f"  report: {one_line(args.out / 'report.md')}")
    return 0 if comparison.passed else 1
