"""Inject faults into small jobs, resume them, and compare their curves with uninterrupted runs, bit for bit.

    python tools/chaos.py --cases 200 --json outcomes.json    # the same command continues an interrupted campaign
    python tools/chaos.py --seed 0 --case 17                  # one case again, whose output is kept in --work

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

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from tools.fault_injection.cases import FAULTS, PHASES, Case, Outcome, draw, run
from tools.fault_injection.jobs import JOBS, reference


def main(arguments: Sequence[str] | None = None) -> int:
    options = parse(arguments)
    numbers = range(options.first, options.first + options.cases)
    if options.case is not None:
        numbers = range(options.case, options.case + 1)
    outcomes = read(options.json, options.seed) if options.case is None else {}
    jobs = [JOBS[job] for job in options.jobs]
    cases = [draw(options.seed, number, jobs) for number in numbers if number not in outcomes]
    for outcome in run_all(cases, options.work, options.parallel, options.seconds):
        outcomes[outcome.number] = outcome
        print(line(outcome), flush=True)
        if options.json:
            content = {"seed": options.seed, "outcomes": [asdict(o) for _, o in sorted(outcomes.items())]}
            options.json.write_text(json.dumps(content, indent=1) + "\n")
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
    options = parser.parse_args(arguments)
    options.work = options.work.resolve()
    return options


def read(file: Path | None, seed: int) -> dict[int, Outcome]:
    if not file or not file.exists():
        return {}
    content = json.loads(file.read_text())
    if content["seed"] != seed:
        sys.exit(f"chaos.py: {file} has the outcomes of --seed {content['seed']}")
    return {fields["number"]: Outcome(**fields) for fields in content["outcomes"]}


def run_all(cases: list[Case], work: Path, parallel: int, seconds: float) -> Iterator[Outcome]:
    """Yield the outcomes as the cases end. After ``seconds``, no further case starts."""
    deadline = time.monotonic() + seconds
    waiting = list(cases)
    with ThreadPoolExecutor(parallel) as pool:
        running: set[Future[Outcome]] = set()
        while running or (waiting and time.monotonic() < deadline):
            while waiting and len(running) < parallel and time.monotonic() < deadline:
                case = waiting.pop(0)
                reference(case.job, work)  # in this thread: two cases may need the same one
                running.add(pool.submit(run, case, work))
            done, running = wait(running, return_when=FIRST_COMPLETED)
            yield from (future.result() for future in done)


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


def interrupt(number: int, frame: FrameType | None) -> None:
    """End the ranks and this process. If it is killed, the ranks end with the fork server that started them."""
    for process in multiprocessing.active_children():
        process.kill()
    os._exit(128 + number)


if __name__ == "__main__":
    for stop in (signal.SIGINT, signal.SIGTERM):
        signal.signal(stop, interrupt)
    sys.exit(main())
