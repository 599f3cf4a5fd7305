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
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path

from torchtitan_npu.cli.arguments import OneLineParser, without_log
from torchtitan_npu.cli.compare.comparison import Tolerance, compare
from torchtitan_npu.cli.compare.report import REPORT_FILES, summary_lines, write_report
from torchtitan_npu.cli.compare.sources import (
    CONFIGURATION_FILE,
    LOSS,
    InputError,
    StepLineParser,
    is_placeholder,
    parse_columns,
    read_curve,
)
from torchtitan_npu.errors import UsageError, one_line
from torchtitan_npu.progress import Progress

BASELINE = "baseline"
# Marks run folders that this command created: --force removes no other folder.
MARKER = ".made_by_compare"
TRAINER = "torchtitan_npu.train"

_ERROR_LINE = re.compile(r"(?:^|[\s.:])\w*(?:Error|Exception|error): ")
# torchrun's report of a failed rank follows the rank's error and does not contain it.
_TORCHRUN = re.compile(r"ChildFailedError|torch/distributed/elastic/|error_file:|traceback :")


class TrainingError(RuntimeError):
    """A run failed while it trained. The user sees the message as one line (exit code 1)."""


@dataclass(frozen=True)
class Runs:
    """Hold the options of ``compare run``. All runs get the ``extra`` arguments."""

    config: Path
    candidates: list[list[str]]
    """The converters of each candidate. The baseline has none."""
    out: Path
    nproc: int
    steps: int
    seed: int = 42
    extra: tuple[str, ...] = ()
    replay: bool = False
    """Train the candidates with the experts and keys that the baseline chooses."""

    @property
    def converters(self) -> dict[str, list[str]]:
        """Return the converters of each run by the name of its folder, the baseline first."""
        several = len(self.candidates) > 1
        numbered = enumerate(self.candidates, start=1)
        return {BASELINE: [], **{f"candidate_{n}" if several else "candidate": names for n, names in numbered}}


def train_command(runs: Runs, name: str) -> list[str]:
    """Return the command line of the run ``name``."""
    torchrun = (sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={runs.nproc}")
    return [*torchrun, "-m", TRAINER, *train_arguments(runs, name)]


def train_arguments(runs: Runs, name: str) -> list[str]:
    """Return the arguments of the training entry for the run ``name``."""
    option = "--replay.record" if name == BASELINE else "--replay.replay"
    return [
        *("--job.config_file", str(runs.config), "--job.dump_folder", str(runs.out / name)),
        *("--job.save_config_file", CONFIGURATION_FILE),
        # With "=": a shell would drop a separate empty argument if the line is copied.
        f"--model.converters={','.join(runs.converters[name])}",
        *("--training.steps", str(runs.steps), "--debug.seed", str(runs.seed), "--debug.deterministic"),
        # Set explicitly: an absolute folder in the TOML file would be outside the dump folder.
        *("--metrics.enable_tensorboard", "--metrics.save_tb_folder", "tb", "--metrics.log_freq", "1"),
        *((option, str(runs.out / BASELINE / "choices")) if runs.replay else ()),
        *runs.extra,
    ]


def train_all(runs: Runs, force: bool = False) -> list[Path]:
    """Check every run, then train the baseline and the candidates, each with its progress.

    Return their run folders, the baseline first.
    """
    # The training entry looks up train_configs/... and torchtitan_npu/... in the installed package.
    if not runs.config.is_file() and runs.config.parts[0] not in ("train_configs", "torchtitan_npu"):
        raise InputError(f"--config {runs.config}: no such file")
    with without_log(), Progress("compare: checking the settings of every run"):
        check_runs(runs)
    prepare_out(runs, force)
    for name in runs.converters:
        with Progress(f"compare: training {name}") as progress:
            _run(train_command(runs, name), name, runs.out / f"{name}.log", progress, runs.steps)
        print(progress.line(), file=sys.stderr)
    return [runs.out / name for name in runs.converters]


def check_runs(runs: Runs) -> None:
    """Raise for the first run that cannot start, before any of them has trained."""
    # Imported here: this takes seconds, which a comparison of existing runs does not need.
    import torchtitan_npu
    from torchtitan_npu import platform

    platform.prepare()
    torchtitan_npu.register()
    from torchtitan_npu.config.parser import load_job
    from torchtitan_npu.preflight.job import check_job, check_start

    for name in runs.converters:
        # The routing decisions that a candidate replays do not exist yet. The model's are checked with the baseline.
        checked = runs if name == BASELINE else replace(runs, replay=False)
        try:
            config = load_job(train_arguments(checked, name))
            check_start(check_job(config, runs.nproc))
        except UsageError as error:
            raise InputError(f"the {name} run cannot start: {error}") from error


def prepare_out(runs: Runs, force: bool) -> None:
    """Create the run folders. ``force`` removes the files of an earlier run, and nothing else."""
    out = runs.out
    earlier = sorted(path.name for path in out.glob("candidate*") if re.fullmatch(r"candidate(_\d+)?", path.name))
    names = dict.fromkeys([*runs.converters, *earlier])
    folders = [out / name for name in names]
    files = [out / name for name in (*(f"{name}.log" for name in names), *REPORT_FILES)]
    present = [path for path in (*folders, *files) if os.path.lexists(path)]
    if present and not force:
        raise InputError(
            f"{out} contains an earlier run ({present[0].name}); choose another --out, or replace it with --force"
        )
    for folder in folders:
        if os.path.lexists(folder) and not (folder / MARKER).is_file():
            raise InputError(f"{folder} was not created by this command and is kept; choose another --out")
    for path in present:
        if path in folders:
            shutil.rmtree(path)
        else:
            path.unlink()
    for name in runs.converters:
        (out / name).mkdir(parents=True)
        (out / name / MARKER).touch()


def _run(command: list[str], name: str, log: Path, progress: Progress, steps: int) -> None:
    """Run ``command`` to its end. Copy its output to ``log`` and its steps to the progress."""
    tail: deque[str] = deque(maxlen=2000)
    parser = StepLineParser()
    environment = os.environ | {"PYTHONUNBUFFERED": "1"}
    with (
        log.open("w", encoding="utf-8") as log_file,
        subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace", env=environment
        ) as process,
    ):
        assert process.stdout is not None
        try:
            for line in process.stdout:
                log_file.write(line)
                log_file.flush()
                tail.append(line)
                step = parser.parse(line)
                if step is not None and LOSS in step.metrics and not is_placeholder(step.metrics[LOSS].value):
                    text = f"step {step.step} of {steps}, loss {step.metrics[LOSS].value:.5f}"
                    progress.update(f"compare: training {name}, {text}", step.step / steps)
        except (KeyboardInterrupt, OSError):  # OSError: the log cannot be written
            process.terminate()  # never leave a training process behind
            process.wait()
            raise
    if process.returncode != 0:
        raise TrainingError(
            f"the {name} run failed (exit code {process.returncode}): {last_error_line(tail)}; see {log}"
        )


def last_error_line(lines: Iterable[str]) -> str:
    """Return the last line that names an error of the training itself."""
    errors = [line.strip() for line in lines if _ERROR_LINE.search(line) and not _TORCHRUN.search(line)]
    return errors[-1] if errors else "no error found in its log"


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
            import matplotlib.figure  # noqa: F401  before training: without it there is no report

            sizes = {"nproc": args.nproc, "steps": args.steps, "seed": args.seed}
            runs = Runs(
                args.config, args.candidate_converters, args.out, **sizes, extra=tuple(extra), replay=args.replay
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
