"""Train a model on random layouts with random options or converters, and compare losses and gradients with one rank.

    torchtitan-npu prove --config X.toml [--flavor debugmodel] [--draws 20] [--ranks 8] [--seed 0]
    torchtitan-npu prove [--models llama3 deepseek_v3 ...] --draws 300 [--json results.json] [--parallel 4]
    torchtitan-npu prove ... --converters [npu_rms_norm ...]
    torchtitan-npu prove ... --only 17
    torchtitan-npu prove --json results.json --table

A draw is a layout on up to --ranks gloo ranks, with activation checkpointing, converters, compilation, gradient
accumulation, a pipeline schedule, documents, masked labels and sizes. Pairs of values that no earlier draw had come
first. With --converters there is instead a draw on one rank for each named converter, by default for each that applies
to the model and for all of them together.

Each draw trains three steps in float32 on the CPU, also on a machine with GPUs or NPUs. The loss and every gradient of
each step may differ from the eager model on one rank as much as rounding explains, which runs with random rounding
measure.

Each draw has a status:
  equal     within the tolerance
  refused   the checks before the job report an error
  unstable  rounding alone changes the run on one rank too much for a comparison, with several seeds of the weights
  differs   a loss, a gradient or an expert's bias differs, or a gradient is missing
  fails     a rank raises or dies
  timeout   a rank does not finish within 300 s

One that differs or fails is shrunk to the simplest TOML file that does so in the same way.

Without --config the models are tiny versions of this package's. With --json an interrupted run continues.
Exit code 0: some draws are equal, and none differs, fails or times out. 1: otherwise. 2: invalid arguments or job.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor, as_completed
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING

from torchtitan_npu.cli.arguments import OneLineParser, without_log
from torchtitan_npu.errors import UsageError
from torchtitan_npu.progress import Progress, waiting_for

if TYPE_CHECKING:
    from torchtitan_npu.prover.draws import Draw
    from torchtitan_npu.prover.job import Subject
    from torchtitan_npu.prover.proof import Outcome, Prover, RunOnRanks

PROG = "torchtitan-npu prove"


def build_parser() -> OneLineParser:
    parser = OneLineParser(PROG, description=__doc__)
    parser.add_argument("--config", help="the job's TOML file (default: this package's models)")
    parser.add_argument("--flavor", help="with --config: another flavor of the model, small enough for CPU ranks")
    parser.add_argument("--models", nargs="+", help="without --config: some of this package's models (default: all)")
    parser.add_argument(
        "--converters", nargs="*", metavar="NAME", help="compare each of these converters (default: all) on one rank"
    )
    parser.add_argument("--draws", type=int, default=20, help="number of draws (default %(default)s)")
    parser.add_argument("--ranks", type=int, default=8, choices=range(2, 9), help="most ranks (default %(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="another seed makes other draws (default %(default)s)")
    parser.add_argument("--only", type=int, metavar="DRAW", help="run one draw, by its number")
    parser.add_argument("--no-shrink", action="store_true", help="write the TOML file of a fault as it was drawn")
    parser.add_argument("--json", type=Path, help="write the results; draws that the file has are not repeated")
    parser.add_argument(
        "--table", action="store_true", help="with --json: print the tables of its results, run nothing"
    )
    parser.add_argument("--parallel", type=int, default=1, help="draws at the same time (default %(default)s)")
    parser.add_argument("--seconds", type=float, help="start no draw after so many seconds; shrinking takes longer")
    parser.add_argument(
        "--out", type=Path, default=Path("outputs/prove"), help="folder for TOML files of faults (default %(default)s)"
    )
    return parser


def parse_args(argv: list[str]) -> argparse.Namespace:
    """Parse and check the arguments."""
    parser = build_parser()
    args = parser.parse_args(argv)
    for name in ("draws", "parallel"):
        if getattr(args, name) < 1:
            parser.error(f"--{name} must be at least 1")
    if args.table and not args.json:
        parser.error("--table needs --json")
    if args.converters is not None and args.only is not None:
        parser.error("--only is for random draws, without --converters")
    if args.only is not None and args.only < 0:
        parser.error("--only must be at least 0")
    if args.config and args.models:
        parser.error("--models is for runs without --config")
    if args.flavor and not args.config:
        parser.error("--flavor needs --config")
    return args


def main(argv: list[str], run_on_ranks: RunOnRanks | None = None) -> int:
    """Run the command. ``run_on_ranks`` replaces :func:`torchtitan_npu.prover.training.run_on_ranks`."""
    args = parse_args(argv)
    from torchtitan_npu import platform

    platform.use_cpu()
    platform.prepare()
    try:
        with without_log(), tempfile.TemporaryDirectory() as folder:
            return run(args, Path(folder), run_on_ranks)
    except UsageError as error:
        print(f"torchtitan_npu: error: {error}", file=sys.stderr)
        return 2


def run(args: argparse.Namespace, folder: Path, run_on_ranks: RunOnRanks | None) -> int:
    from torchtitan_npu.prover import training
    from torchtitan_npu.prover.draws import Draws, describe, ranks_of
    from torchtitan_npu.prover.job import subject_of_job, tiny_subjects
    from torchtitan_npu.prover.proof import Prover, Results, count_by_status, identity, summary

    if args.table:
        results = Results.load(args.json)
        print(f"{summary(results.draws.values(), results.run['ranks'])}\n\n{results.caption()}")
        return 0
    subjects = [subject_of_job(args.config, args.flavor)] if args.config else tiny_subjects(args.models)
    prover = Prover(subjects, folder, run_on_ranks or training.run_on_ranks)
    results = Results(
        args.json, identity(args.config, args.flavor, args.models, args.ranks, args.seed, args.converters)
    )
    if args.converters is not None:
        draws = dict(enumerate(converter_draws(subjects, args.converters)))
    else:
        count = args.draws if args.only is None else args.only + 1
        draws = dict(enumerate(islice(Draws([subject.model for subject in subjects], args.ranks, args.seed), count)))
    if args.only is not None:
        draws = {args.only: draws[args.only]}
    for number, outcome in prove_all(args, prover, {n: draw for n, draw in draws.items() if n not in results.draws}):
        draw = draws[number]
        status: str = outcome.status
        if outcome.status == "equal":
            status = f"equal ({outcome.part_of_tolerance:.2f} of the tolerance), {outcome.seconds:.0f} s"
        text = f"draw {number}: {status}: {ranks_of(draw)} ranks, {describe(draw)}"
        say(prover, f"{text}\n  {outcome.reason}" if outcome.reason else text)
        if outcome.is_fault:
            report_fault(args, prover, number, draw, outcome)
        results.add(number, draw, outcome)
    selected = [results.draws[number] for number in draws if number in results.draws]
    if args.converters is not None:
        print(count_by_status(selected))
    elif args.only is None:
        print(f"\n{summary(selected, args.ranks)}")
    if left := len(draws) - len(selected):
        print(f"{left} draws are left: repeat the command" + ("" if args.json else " with --json"))
    if not any(outcome.status == "equal" for _, outcome in selected):
        print("torchtitan_npu: error: no draw was compared", file=sys.stderr)
        return 1
    return int(any(outcome.is_fault for _, outcome in selected))


def converter_draws(subjects: list[Subject], names: list[str]) -> Iterator[Draw]:
    """Yield a draw on one rank for each model and each of the converters ``names`` with a target in it.

    Without names, for each that has a target, and for all of them together.
    """
    from torchtitan_npu.config.allowed import check_known
    from torchtitan_npu.prover.draws import on_one_rank

    for name in names:
        check_known(
            "--converters", name, list(dict.fromkeys(one for subject in subjects for one in subject.converters))
        )
    for subject in subjects:
        selected = [name for name in subject.converters if not names or name in names]
        for name in selected if names else [*selected, "all"]:
            yield on_one_rank(subject.model, name)


def prove_all(args: argparse.Namespace, prover: Prover, draws: Mapping[int, Draw]) -> Iterator[tuple[int, Outcome]]:
    """Yield the number and the outcome of each draw that starts within ``--seconds``, as they end."""
    started = time.monotonic()

    def prove(draw: Draw) -> Outcome | None:
        late = args.seconds is not None and time.monotonic() - started > args.seconds
        return None if late else prover.prove(draw)

    pool = ThreadPoolExecutor(args.parallel)
    try:
        numbers = {pool.submit(prove, draw): number for number, draw in draws.items()}
        for future in waiting_for(as_completed(numbers), "prove: running draws", len(numbers)):
            if (outcome := future.result()) is not None:
                yield numbers[future], outcome
    finally:
        pool.shutdown(cancel_futures=True)


def report_fault(args: argparse.Namespace, prover: Prover, number: int, draw: Draw, outcome: Outcome) -> None:
    """Shrink a fault, and print and write its TOML file."""
    import tomli_w

    from torchtitan_npu.prover.draws import ATTEMPTS, describe, ranks_of, shrink

    def still_fails(candidate: Draw) -> bool:
        nonlocal outcome
        found = prover.prove(candidate)
        with progress.hidden():
            say(prover, f"  shrinking: {found.status}: {describe(candidate)}")
        if same := (found.status, found.kind) == (outcome.status, outcome.kind):
            outcome = found
        return same

    complete = True
    if not args.no_shrink:
        with Progress("prove: shrinking the draw") as progress:
            draw, complete = shrink(draw, prover.subjects[draw["model"]].model, still_fails)
    args.out.mkdir(parents=True, exist_ok=True)
    path = args.out / f"draw{number}.toml"
    lines = [f"# {describe(draw)}: {outcome.status}"]
    if not complete:
        lines.append(f"# shrinking stopped after {ATTEMPTS} draws: a simpler job may fail in the same way")
    if draw["masked labels"]:
        lines.append("# the labels at the start of each row are masked, see with_masked_labels in prover/training.py")
    lines.append(f"# torchrun --nproc_per_node={ranks_of(draw)} -m torchtitan_npu.train --job.config_file {path}")
    text = "\n".join(lines) + "\n\n" + tomli_w.dumps(prover.table(draw, outcome.seed))
    path.write_text(text)
    say(prover, f"  written to {path}:\n\n{text}")


def say(prover: Prover, text: str) -> None:
    """Print while other draws run: their parser redirects the standard output of the process."""
    with prover.lock:
        print(text, flush=True)
