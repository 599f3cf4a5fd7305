"""Train a model on random layouts with random options, and compare losses and gradients with one rank.

    torchtitan-npu prove --config X.toml [--flavor debugmodel] [--draws 20] [--ranks 8] [--seed 0]
    torchtitan-npu prove [--models llama3 deepseek_v3 ...] --draws 300 [--json results.json]
    torchtitan-npu prove ... --only 17

A draw is a layout on up to --ranks gloo ranks on the CPU, with activation checkpointing, converters, compilation,
gradient accumulation, a pipeline schedule, documents, masked labels and sizes. Pairs of values that no earlier draw had
come first. Each draw trains three steps in float32. The loss and every gradient of each step may differ from one rank
as much as rounding explains, which runs with random rounding measure. A draw that the checks before the start refuse
counts as refused. One that differs or fails is shrunk to the simplest TOML file that still does.

Without --config the models are tiny versions of this package's. With --json an interrupted run continues.
Exit code 0: all equal. 1: some differ or fail. 2: invalid arguments or an invalid job.
"""

from __future__ import annotations

import argparse
import json
import logging
import sys
import tempfile
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING

from torchtitan_npu import platform
from torchtitan_npu.cli.arguments import OneLineParser
from torchtitan_npu.errors import UsageError

if TYPE_CHECKING:
    from torchtitan_npu.prover.draws import Draw
    from torchtitan_npu.prover.proof import Outcome, Prover, RunOnRanks

PROG = "torchtitan-npu prove"


def parse_args(argv: list[str]) -> argparse.Namespace:
    parser = OneLineParser(PROG, description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", help="the job's TOML file (default: this package's models)")
    parser.add_argument("--flavor", help="with --config: another flavor of the model, small enough for CPU ranks")
    parser.add_argument("--models", nargs="+", help="without --config: some of this package's models (default: all)")
    parser.add_argument("--draws", type=int, default=20, help="number of draws (default %(default)s)")
    parser.add_argument("--ranks", type=int, default=8, choices=range(2, 9), help="most ranks (default %(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="another seed makes other draws (default %(default)s)")
    parser.add_argument("--only", type=int, metavar="DRAW", help="run one draw, by its number")
    parser.add_argument("--no-shrink", action="store_true", help="write the TOML file of a fault as it was drawn")
    parser.add_argument("--json", type=Path, help="write the results; draws that the file has are not repeated")
    parser.add_argument(
        "--out", type=Path, default=Path("outputs/prove"), help="folder for TOML files of faults (default %(default)s)"
    )
    args = parser.parse_args(argv)
    if args.draws < 1:
        parser.error("--draws must be at least 1")
    if args.only is not None and args.only < 0:
        parser.error("--only must be at least 0")
    if args.config and args.models:
        parser.error("--models is for runs without --config")
    if args.flavor and not args.config:
        parser.error("--flavor needs --config")
    return args


def main(argv: list[str], run_on_ranks: RunOnRanks | None = None) -> int:
    """Run the command. ``run_on_ranks`` replaces :func:`torchtitan_npu.prover.ranks.run_on_ranks`."""
    args = parse_args(argv)
    platform.prepare()
    logging.disable(logging.WARNING)  # TorchTitan logs the start of every job
    try:
        with tempfile.TemporaryDirectory() as folder:
            return run(args, Path(folder), run_on_ranks)
    except UsageError as error:
        print(f"torchtitan_npu: error: {error}", file=sys.stderr)
        return 2
    finally:
        logging.disable(logging.NOTSET)


def run(args: argparse.Namespace, folder: Path, run_on_ranks: RunOnRanks | None) -> int:
    from torchtitan_npu.config.check_helpers import check_known
    from torchtitan_npu.prover import ranks
    from torchtitan_npu.prover.coverage import coverage_table, pair_coverage
    from torchtitan_npu.prover.draws import Draws, describe, ranks_of
    from torchtitan_npu.prover.job import own_subject, tiny_subjects
    from torchtitan_npu.prover.proof import Prover
    from torchtitan_npu.prover.tiny_models import TINY

    for name in args.models or ():
        check_known("--models", name, TINY)
    subjects = [own_subject(args.config, args.flavor)] if args.config else tiny_subjects(args.models or TINY)
    draws = Draws([subject.model for subject in subjects], args.ranks, args.seed)
    prover = Prover(subjects, folder, run_on_ranks or ranks.run_on_ranks)
    identity = {"config": args.config, "models": args.models, "ranks": args.ranks, "seed": args.seed}
    results = load(args.json, identity)
    count = args.draws if args.only is None else args.only + 1
    selected: list[tuple[Draw, Outcome]] = []
    for number, draw in enumerate(islice(draws, count)):
        if args.only not in (None, number):
            continue
        known = results.get(number)
        outcome = known or prover.prove(draw)
        selected.append((draw, outcome))
        if known:
            continue
        text = describe(draw)
        if outcome.status == "equal":
            status = f"equal ({outcome.part_of_tolerance:.2f} of the tolerance), {outcome.seconds:.0f} s"
        else:
            status = outcome.status
        print(f"draw {number}: {status}: {ranks_of(draw)} ranks, {text}", flush=True)
        if outcome.reason:
            print(f"  {outcome.reason}", flush=True)
        if outcome.is_fault:
            report_fault(args, prover, number, draw, outcome)
        results[number] = outcome
        save(args.json, identity, results)
    if args.only is None:
        ran, possible = pair_coverage(draws, selected)
        print(f"\n{coverage_table(selected)}\n\n{ran} of {possible} pairs of values ran.")
    counts = [f"{sum(o.status == s for _, o in selected)} {s}" for s in ("equal", "refused", "differs", "fails")]
    print(f"{len(selected)} draws: {', '.join(counts)}")
    return int(any(outcome.is_fault for _, outcome in selected))


def report_fault(args: argparse.Namespace, prover: Prover, number: int, draw: Draw, outcome: Outcome) -> None:
    """Shrink a fault, and print and write its TOML file."""
    from torchtitan_npu.prover.draws import describe, ranks_of, shrink
    from torchtitan_npu.prover.job import to_toml

    def still_fails(candidate: Draw) -> bool:
        found = prover.prove(candidate)
        print(f"  shrinking: {found.status}: {describe(candidate)}", flush=True)
        return found.status == outcome.status

    if not args.no_shrink:
        draw = shrink(draw, prover.subjects[draw["model"]].model, still_fails)
    args.out.mkdir(parents=True, exist_ok=True)
    path = args.out / f"draw{number}.toml"
    lines = [f"# {describe(draw)}: {outcome.status}"]
    if draw["masked labels"]:
        lines.append("# the labels at the start of each row are masked, see with_masked_labels in prover/training.py")
    lines.append(f"# torchrun --nproc_per_node={ranks_of(draw)} -m torchtitan_npu.train --job.config_file {path}")
    text = "\n".join(lines) + "\n\n" + to_toml(prover.table(draw))
    path.write_text(text)
    print(f"  written to {path}:\n\n{text}", flush=True)


def load(path: Path | None, identity: dict[str, object]) -> dict[int, Outcome]:
    """Return the results in ``path`` by number of the draw, if there is a file."""
    from torchtitan_npu.prover.proof import Outcome

    if path is None or not path.exists():
        return {}
    stored = json.loads(path.read_text())
    if stored["run"] != identity:
        raise UsageError(f"--json {path}: has the results of another run: {stored['run']}")
    return {int(number): Outcome(**values) for number, values in stored["draws"].items()}


def save(path: Path | None, identity: dict[str, object], results: dict[int, Outcome]) -> None:
    if path is not None:
        draws = {number: vars(outcome) for number, outcome in results.items()}
        path.write_text(json.dumps({"run": identity, "draws": draws}, indent=1) + "\n")
