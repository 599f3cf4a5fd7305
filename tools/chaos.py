"""Inject faults into small jobs, resume them, and compare their curves with uninterrupted runs, bit for bit.

    python tools/chaos.py --cases 200 --json outcomes.json    # the same command continues an interrupted campaign
    python tools/chaos.py --seed 0 --case 17                  # one case again, whose output is kept in --work
    python tools/chaos.py --table outcomes.json               # print the tables of the documentation

Exit code 0: every job ended as documented and lost nothing, 1: one did not. The cases follow from the seed.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import signal
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import asdict
from pathlib import Path
from types import FrameType
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from tools.campaign import code_checksum, read_outcomes, write_outcomes
from tools.fault_injection.cases import ERROR, FAULTS, PHASES, Case, Outcome, draw, run
from tools.fault_injection.jobs import FLAVOR, JOBS


def main(arguments: Sequence[str] | None = None) -> int:
    options = parse(arguments)
    if options.table:
        print(*tables([json.loads(file.read_text()) for file in options.table]), sep="\n")
        return 0
    numbers = range(options.first, options.first + options.cases)
    if options.case is not None:
        numbers = range(options.case, options.case + 1)
    file = options.json if options.case is None else None
    identity = {"seed": options.seed, "jobs": options.jobs, "flavor": FLAVOR, "code": code_checksum()}
    identity |= {"torch": torch.__version__}
    try:
        known = [Outcome(**fields) for fields in read_outcomes(file, identity)] if file else []
    except ValueError as error:
        print(f"chaos.py: {error}", file=sys.stderr)
        return 2
    outcomes = {outcome.number: outcome for outcome in known}
    jobs = [JOBS[job] for job in options.jobs]
    cases = [draw(options.seed, number, jobs) for number in numbers if number not in outcomes]
    for outcome in run_all(cases, options.work, options.parallel, options.seconds, options.timeout):
        outcomes[outcome.number] = outcome
        print(line(outcome), flush=True)
        if file:
            write_outcomes(file, identity, [asdict(o) for _, o in sorted(outcomes.items())])
    print(*table(list(outcomes.values())), sep="\n")
    failed = [outcome for outcome in outcomes.values() if outcome.problems]
    for outcome in failed:
        print(f"\n{line(outcome)}\n  again: python tools/chaos.py --seed {options.seed} --case {outcome.number}")
    left = len(set(numbers) - outcomes.keys())
    print(f"\n{len(outcomes)} faults, {len(failed)} with problems" + (f", {left} cases are left" if left else ""))
    return bool(failed)


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--cases", type=int, default=10, help="number of faults")
    parser.add_argument("--first", type=int, default=0, help="number of the first case")
    parser.add_argument("--case", type=int, help="run only this one")
    parser.add_argument("--jobs", nargs="+", choices=JOBS, default=list(JOBS), metavar="MODEL:LAYOUT")
    parser.add_argument("--parallel", type=int, default=1, help="cases at the same time")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="start no case after this time")
    parser.add_argument("--work", type=Path, default=Path("outputs/chaos"), help="folder of the jobs")
    parser.add_argument("--json", type=Path, help="file of the outcomes; cases in it are not run again")
    parser.add_argument("--timeout", type=int, default=15, help="comm.train_timeout_seconds of a job that hangs")
    parser.add_argument(
        "--table", type=Path, nargs="+", help="print the tables of these files of outcomes, in Markdown"
    )
    options = parser.parse_args(arguments)
    options.work = options.work.resolve()
    return options


def run_all(cases: list[Case], work: Path, parallel: int, seconds: float, timeout: int) -> Iterator[Outcome]:
    """Yield the outcomes as the cases end. After ``seconds``, no further case starts."""
    deadline = time.monotonic() + seconds
    waiting = list(cases)
    with ThreadPoolExecutor(parallel) as pool:
        running: dict[Future[Outcome], Case] = {}
        while running or (waiting and time.monotonic() < deadline):
            while waiting and len(running) < parallel and time.monotonic() < deadline:
                case = waiting.pop(0)
                running[pool.submit(run, case, work, timeout)] = case
            for future in wait(running, return_when=FIRST_COMPLETED).done:
                case, error = running.pop(future), future.exception()
                yield case.outcome(ERROR, f"{type(error).__name__}: {error}") if error else future.result()


def line(outcome: Outcome) -> str:
    problems = outcome.problems[:3] + [f"{len(outcome.problems) - 3} more problems"] * (len(outcome.problems) > 3)
    result = "; ".join(problems) or f"{outcome.ending}; resumed at step {outcome.resumed_at}, identical"
    verdict = "PROBLEM" if problems else "ok"
    return f"{outcome.number:4} {verdict} {outcome.case}: {result} ({outcome.seconds} s)"


def table(outcomes: list[Outcome]) -> list[str]:
    """Return a table of the faults by kind and phase with their endings, in Markdown."""
    rows = [f"| fault | {' | '.join(PHASES)} | endings |", "|---" * (2 + len(PHASES)) + "|"]
    for kind in (kind for kind in FAULTS if any(outcome.kind == kind for outcome in outcomes)):
        own = [outcome for outcome in outcomes if outcome.kind == kind]
        phases = [sum(outcome.phase == phase for outcome in own) for phase in PHASES]
        endings = Counter("PROBLEM" if outcome.problems else outcome.ending for outcome in own)
        texts = ", ".join(f"{count} × {ending}" for ending, count in endings.most_common())
        rows.append(f"| {kind} | {' | '.join(str(count or '') for count in phases)} | {texts} |")
    return rows


def tables(campaigns: list[dict[str, Any]]) -> list[str]:
    """Return the tables of the faults and of the jobs in these campaigns, and a line with their figures."""
    outcomes = [Outcome(**fields) for campaign in campaigns for fields in campaign["outcomes"]]
    rows = [*table(outcomes), "", "| job | faults | async | swap |", "|---|---|---|---|"]
    for job in JOBS:
        name = job.replace(":", " ")
        own = [o.job for o in outcomes if o.job.removesuffix(" swap").removesuffix(" async") == name]
        counts = len(own), sum(" async" in text for text in own), sum(" swap" in text for text in own)
        rows.append(f"| {name} | {' | '.join(str(count or '') for count in counts)} |")
    failed = sum(bool(outcome.problems) for outcome in outcomes)
    seconds = sum(outcome.seconds for outcome in outcomes)
    figures = f"{len(outcomes)} faults, {failed} with problems, {seconds / 60:.0f} minutes of jobs."
    runs = {f"seed {c['seed']}, torch {c['torch']}, commit {c['commit'] or '?'}, code {c['code']}" for c in campaigns}
    return [*rows, "", f"{figures} {'; '.join(sorted(runs))}"]


def interrupt(number: int, frame: FrameType | None) -> None:
    """End the ranks and this process. If it is killed, the ranks end with the fork server that started them."""
    for process in multiprocessing.active_children():
        process.kill()
    os._exit(128 + number)


if __name__ == "__main__":
    for stop in (signal.SIGINT, signal.SIGTERM):
        signal.signal(stop, interrupt)
    sys.exit(main())
