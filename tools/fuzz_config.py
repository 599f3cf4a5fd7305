#!/usr/bin/env python
"""Run jobs with values inside and outside of what each configuration key allows: see tests/_helpers/config_fuzz.py.

    python tools/fuzz_config.py --cases 500 --seed 0 --json seed0.json   # the same command continues an interrupted run
    python tools/fuzz_config.py --table seed0.json seed1.json            # print the table of the documentation

Print each fault as it is found, and the figures at the end. Exit code 1 if there was a fault.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from tests._helpers.config_fuzz import Figures, Outcome, draw_cases, run_cases
from tools.campaign import code_checksum, read_outcomes, write_outcomes


def main(arguments: Sequence[str] | None = None) -> int:
    options = parse(arguments)
    if options.table:
        print(*table(options.table), sep="\n")
        return 0
    started = time.monotonic()
    drawn = dict(enumerate(draw_cases(options.cases, options.seed)))
    identity = {"seed": options.seed, "cases": options.cases, "code": code_checksum(), "torch": torch.__version__}
    try:
        known = [Outcome(**fields) for fields in read_outcomes(options.json, identity)] if options.json else []
    except ValueError as error:
        print(f"fuzz_config.py: {error}", file=sys.stderr)
        return 2
    outcomes = {outcome.number: outcome for outcome in known}
    if any(str(drawn[number]) != outcome.case for number, outcome in outcomes.items()):
        print(f"fuzz_config.py: {options.json} has the cases of another version of hypothesis", file=sys.stderr)
        return 2
    left = {number: case for number, case in drawn.items() if number not in outcomes}
    for outcome, result in run_cases(left, options.parallel, options.seconds):
        outcomes[outcome.number] = outcome
        if options.verbose:
            print(f"{result.code} {outcome.case}\n    {result.errors.strip()[:300] if result.code else ''}", flush=True)
        if outcome.fault:
            print(f"FAULT {outcome.case}\n  {outcome.fault}", flush=True)
        if options.json:
            write_outcomes(options.json, identity, [asdict(o) for _, o in sorted(outcomes.items())])
    figures = Figures(list(outcomes.values()))
    missing = len(drawn) - len(outcomes)
    print(f"{figures}, {time.monotonic() - started:.0f} s" + (f", {missing} cases are left" if missing else ""))
    return 1 if figures.faults else 0


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", type=int, default=250, help="number of cases (default %(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="seed of the cases (default %(default)s)")
    parser.add_argument("--parallel", type=int, default=1, help="cases at the same time")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="start no case after this time")
    parser.add_argument("--json", type=Path, help="file of the outcomes; cases in it are not run again")
    parser.add_argument("--verbose", action="store_true", help="print every case and its message")
    parser.add_argument("--table", type=Path, nargs="+", help="print the table of these files of outcomes, in Markdown")
    return parser.parse_args(arguments)


def table(files: list[Path]) -> list[str]:
    """Return a table of the figures of each file and of all, in Markdown."""
    rows = ["| seed | cases | keys | accepted | refused | faults |", "|---" * 6 + "|"]
    everything: list[Outcome] = []
    campaigns = [json.loads(file.read_text()) for file in files]
    for campaign in campaigns:
        outcomes = [Outcome(**fields) for fields in campaign["outcomes"]]
        everything += outcomes
        rows.append(_row(str(campaign["seed"]), Figures(outcomes)))
    versions = sorted({f"torch {c['torch']}, commit {c['commit'] or '?'}, code {c['code']}" for c in campaigns})
    return [*rows, _row("all", Figures(everything)), "", "; ".join(versions)]


def _row(name: str, figures: Figures) -> str:
    numbers = figures.cases, len(figures.keys), figures.accepted, figures.refused, len(figures.faults)
    return f"| {name} | {' | '.join(map(str, numbers))} |"


if __name__ == "__main__":  # the fork server imports this file again
    sys.exit(main())
