"""The cases of a campaign: draw a job and a fault, run them, resume, and compare with the uninterrupted run."""

from __future__ import annotations

import json
import os
import random
import re
import shutil
import signal
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from tests._helpers.entry_ranks import EntryRanks
from tools.fault_injection.jobs import INTERVAL, STEPS, VALIDATION, Job, Plan, Reference, curve, reference

PHASES = ("load", "step", "save", "validation")
FAULTS = {
    "kill one rank": PHASES,
    "kill all ranks": PHASES,
    "full disk, new file": ("load", "save"),
    "full disk, growing file": ("save",),
    "flipped bit": ("load",),
    "SIGSTOP": PHASES,
    "hang": ("step",),
    "slow rank": PHASES,
    "SIGTERM to one rank": PHASES,
    "SIGTERM to all ranks": PHASES,
    "NaN in a gradient": ("step",),
}
"""Phases by kind of fault."""
ACTIONS = {
    "kill one rank": "kill",
    "kill all ranks": "kill",
    "full disk, new file": "fill the disk",
    "full disk, growing file": "fill the disk",
    "SIGSTOP": "stop",
    "hang": "hang",
    "slow rank": "slow",
    "SIGTERM to one rank": "terminate",
    "SIGTERM to all ranks": "terminate",
    "NaN in a gradient": "NaN",
}
STOPPED = "stopped after a saved step (75)"
ERROR = "error"
"""The ending of a case that could not be run to its end."""
LIMIT_S = 300
"""Seconds in which a job must end, on a loaded machine too."""
LOAD_EVENTS = (14, 6)
"""File operations of a load on the first rank and on another one. With fewer, the fault is injected after the last."""
SMALLEST_LIMIT = 64 << 10
"""Bytes. The logs of the ranks are smaller, so they can be written to a full disk."""


@dataclass(frozen=True)
class Case:
    """A job and a fault, drawn from the seed and the number."""

    seed: int
    number: int
    job: Job
    kind: str
    phase: str
    step: int
    """0 for ``load``."""
    rank: int
    moment: float
    """Position in the phase, or in the damaged checkpoint, from 0 to 1."""
    resumes_from: int
    """The checkpoint that ``load`` reads."""

    def __str__(self) -> str:
        where = f"{self.phase} of step {self.step or self.resumes_from}"
        rank = "" if "all" in self.kind or self.kind == "flipped bit" else f", rank {self.rank}"
        return f"{self.job}: {self.kind}{rank}, {where} at {self.moment:.2f}"

    @property
    def is_last(self) -> bool:
        return self.step == STEPS

    def outcome(self, ending: str = "", *problems: str) -> Outcome:
        return Outcome(str(self), self.number, self.kind, self.phase, str(self.job), ending, problems=list(problems))


@dataclass
class Outcome:
    """The ending of a case, and its problems."""

    case: str
    number: int
    kind: str
    phase: str
    job: str
    ending: str = ""
    resumed_at: int = 0
    """The first step after the resumption; after the last one if the job had finished."""
    problems: list[str] = field(default_factory=list)
    seconds: float = 0.0


def draw(seed: int, number: int, jobs: Sequence[tuple[str, str]]) -> Case:
    """Return a case of these models and layouts. Every kind of fault comes once before one comes again."""
    turn, position = divmod(number, len(FAULTS))
    kind = random.Random(f"{seed} turn {turn}").sample(list(FAULTS), len(FAULTS))[position]
    source = random.Random(f"{seed} {number}")
    phase = source.choice(FAULTS[kind])
    job = Job(*source.choice(jobs), source.random() < 0.5, source.random() < 0.5)
    steps = {
        "load": [0],
        "step": range(1, STEPS + 1),
        "save": range(INTERVAL, STEPS + 1, INTERVAL),
        "validation": [1, *range(VALIDATION, STEPS + 1, VALIDATION)],
    }
    return Case(
        seed,
        number,
        job,
        kind,
        phase,
        step=source.choice(steps[phase]),
        rank=source.randrange(job.world_size),
        moment=source.random(),
        resumes_from=source.choice([2, 4]) if kind != "flipped bit" else 4,  # one before it is needed
    )


def run(case: Case, work: Path, timeout: int) -> Outcome:
    """Run ``case`` in a folder of ``work``, which is left there if it has problems.

    ``timeout`` is ``comm.train_timeout_seconds`` of a job with a rank that hangs.
    """
    began = time.monotonic()
    folder = work / f"case{case.number}"
    shutil.rmtree(folder, ignore_errors=True)
    outcome = case.outcome()
    expected = reference(case.job, work)
    dump_folder = folder / "job"
    if case.phase == "load":
        copy_checkpoints(expected.folder, dump_folder, up_to=case.resumes_from)
    if case.kind == "flipped bit":
        _start_with_damage(case, folder, dump_folder, outcome)
    else:
        _start_with_fault(case, expected, folder, dump_folder, outcome, timeout)
        _resume(case, folder, dump_folder, outcome)
    compare(expected, dump_folder, outcome)
    if not outcome.problems:
        shutil.rmtree(folder)
    outcome.seconds = round(time.monotonic() - began, 1)
    return outcome


def copy_checkpoints(source: Path, target: Path, up_to: int) -> None:
    """Give the job in ``target`` the checkpoints of the uninterrupted run, and the curve that leads to them."""
    for checkpoint in sorted((source / "checkpoint").glob("step-*")):
        if int(checkpoint.name.removeprefix("step-")) <= up_to:
            shutil.copytree(checkpoint, target / "checkpoint" / checkpoint.name)
    for file in source.glob("curve*"):
        entries = [(json.loads(line), line) for line in file.read_text().splitlines()]
        lines = [line for entry, line in entries if entry.get("step", entry.get("validation")) <= up_to]
        (target / file.name).write_text("".join(f"{line}\n" for line in lines))


def plan(case: Case, expected: Reference, dump_folder: Path) -> Plan:
    largest_file = 0
    if case.kind == "full disk, growing file":
        files = (expected.folder / f"checkpoint/step-{INTERVAL}").glob(f"__{case.rank}_*")
        size = max(file.stat().st_size for file in files)
        largest_file = int(SMALLEST_LIMIT + case.moment * (size - SMALLEST_LIMIT))
    if case.phase == "load":
        events = LOAD_EVENTS[case.rank > 0]
    else:
        events = expected.events[case.rank][f"{case.phase} {case.step}"]
    return Plan(
        str(dump_folder),
        ACTIONS[case.kind],
        case.rank,
        "all" in case.kind,
        case.phase,
        case.step,
        event=0 if largest_file else int(case.moment * events),
        largest_file=largest_file,
        moment=case.moment,
    )


def _start_with_fault(
    case: Case, expected: Reference, folder: Path, dump_folder: Path, outcome: Outcome, timeout: int
) -> None:
    hangs = case.kind in ("SIGSTOP", "hang")
    limits = {
        # the start of a job takes longer than a step
        "comm__init_timeout_seconds": str(3 * timeout if hangs and case.phase == "load" else 120),
        "comm__train_timeout_seconds": str(timeout if hangs else 120),
    }
    with case.job.start(folder / "fault", dump_folder, plan(case, expected, dump_folder), **limits) as ranks:
        codes = ends(ranks)
        if "injected fault" not in ranks.log(case.rank):
            outcome.problems.append("the fault was not injected")
        outcome.ending = ending(case, ranks, codes)
        if not outcome.ending:
            outcome.problems.append(f"unexpected ending: exit codes {codes}")


def ends(ranks: EntryRanks, seconds: float = LIMIT_S) -> list[int | None]:
    """Wait for all ranks. As torchrun does, end the others if one refuses the job before it starts."""
    deadline = time.monotonic() + seconds
    while None in (codes := ranks.codes()) and time.monotonic() < deadline:
        if codes[0] == 2 and "first failure" not in ranks.log(0):
            for pid in (ranks.pid(rank) for rank, code in enumerate(codes) if code is None):
                with suppress(ProcessLookupError):  # it has just ended itself
                    os.kill(pid, signal.SIGTERM)
        time.sleep(0.05)
    return codes


KILLED = (1, -6, -9, -11)
"""Exit codes of a rank that hangs. It is killed with SIGABRT, and faulthandler then reads the stacks of all threads
while some of them run, which may be a segmentation fault. Python prints the main thread's stack last."""


def ending(case: Case, ranks: EntryRanks, codes: list[int | None]) -> str:
    """Return the name of the ending, or an empty string if it is not one that the documentation promises."""
    others = [code for rank, code in enumerate(codes) if rank != case.rank]
    own = codes[case.rank]
    named = f"torchtitan_npu: first failure: rank {case.rank} ({os.uname().nodename}, pid {ranks.pid(case.rank)}) "
    lines = [ranks.last_line(rank) for rank in range(len(codes)) if rank != case.rank]
    logs = "".join(ranks.log(rank) for rank in range(len(codes)))
    all_named = set(others) == {1} and all(line.startswith(named) for line in lines)
    finished = set(codes) == {0} and "Training completed" in ranks.log(0)
    stopped = set(codes) == {75} and "Stopped by SIGTERM to rank" in logs
    match case.kind:
        case "kill one rank":
            if own == -9 and all_named:
                return "killed; the others name the rank"
            if own == -9 and set(others) == {0} and case.is_last:
                return "killed after the others had finished"
        case "kill all ranks":
            return "all killed" if set(codes) == {-9} else ""
        case "SIGSTOP":
            shows_stack = "Fatal Python error: Aborted" in ranks.log(case.rank)
            if own in KILLED and all_named and "has not responded for" in lines[0] and shows_stack:
                return "the others name and kill the rank, which shows its stack"
        case "hang":
            if all_named and own in KILLED and "time.sleep(1000)" in logs:
                return "the others name the rank and show its stack"
        case "slow rank":
            return "finished" if finished else ""
        case "SIGTERM to one rank" | "SIGTERM to all ranks":
            if stopped:
                return STOPPED
            # an asynchronous save may end just before the next one
            latest = case.step + INTERVAL * (case.phase == "save" and case.job.asynchronous)
            if case.phase == "load":
                latest = case.resumes_from + 1
            if finished and latest >= STEPS - 1:
                return "finished"
            if case.phase == "load" and own == -15 and (all_named or set(codes) == {-15}):
                return "ended before training; the others name the rank" if all_named else "ended before training"
        case "NaN in a gradient":
            weight = re.search("injected fault: NaN in the gradient of (.*)", ranks.log(case.rank))
            first = f"the gradient of the weight {weight[1] if weight else '?'}, on rank {case.rank}"
            step, checkpoints = f"Step {case.step} is not finite", f"{ranks.folder.parent}/job/checkpoint/step-"
            saved = (
                f"The last checkpoint before step {case.step} is {checkpoints}{(case.step - 1) // INTERVAL * INTERVAL}"
            )
            before = saved if case.step > INTERVAL else f"No checkpoint of this job was written before step {case.step}"
            if set(codes) == {3} and all(text in ranks.log(0) for text in (step, first, before)):
                return "the report names step, weight and checkpoint (3)"
        case _:  # full disk
            refused = re.search(rf"error: (rank \d+: )?{re.escape(str(ranks.folder.parent))}/job/checkpoint", logs)
            full = "No space left" in logs or "File too large" in logs
            if codes[0] == 2 and set(codes) <= {2, -15} and refused and full:
                return "one line names the file (2)"
            if finished and case.is_last:
                return "finished: nothing was left to write"
    return ""


def _start_with_damage(case: Case, folder: Path, dump_folder: Path, outcome: Outcome) -> None:
    """Flip a bit of the newest checkpoint. Loading must name the file, and ``checkpoint.fallback`` must get past it."""
    newest = dump_folder / f"checkpoint/step-{case.resumes_from}"
    source = random.Random(case.moment)
    damaged = source.choice(sorted(file for file in newest.rglob("*") if file.is_file()))
    content = bytearray(damaged.read_bytes())
    content[source.randrange(len(content))] ^= 1 << source.randrange(8)
    times = damaged.stat()
    damaged.write_bytes(content)
    os.utime(damaged, ns=(times.st_atime_ns, times.st_mtime_ns))
    with case.job.start(folder / "damaged", dump_folder) as ranks:
        codes = ends(ranks)
        if codes[0] == 2 and f"error: {damaged} is damaged" in ranks.log(0):
            outcome.ending = "one line names the file (2)"
        else:
            outcome.problems.append(f"{damaged} is damaged: exit codes {codes}, {ranks.last_line(0)}")
    _resume(case, folder, dump_folder, outcome, checkpoint__fallback="True")


def _resume(case: Case, folder: Path, dump_folder: Path, outcome: Outcome, **options: str) -> None:
    """Start the job again. It must continue from the newest checkpoint that was complete."""
    manifests = (dump_folder / "checkpoint").glob("*/manifest.json")
    names = [re.match(r"(?:step|\.incomplete)-(\d+)", file.parent.name) for file in manifests]
    complete = [int(name[1]) for name in names if name]
    from_step = max(complete, default=0)
    if case.kind == "flipped bit":
        from_step = max((step for step in complete if step < case.resumes_from), default=0)
    if from_step < (least := least_step(case, outcome.ending)):
        outcome.problems.append(f"step {least} was saved, and {from_step or 'nothing'} is left")
    with case.job.start(folder / "resumed", dump_folder, None, **options) as ranks:
        codes = ends(ranks)
        if set(codes) != {0}:
            outcome.problems.append(f"not resumed: exit codes {codes}, {ranks.last_line(0)}")
        starts = f"Training starts at step {from_step + 1}\n"
        if starts not in ranks.log(0):
            outcome.problems.append(f"not resumed from step {from_step}")
    outcome.resumed_at = from_step + 1


def least_step(case: Case, ending: str) -> int:
    """Return the last step whose checkpoint must be there: written before the fault, or by a job that ended well."""
    if "finished" in ending:
        return STEPS
    if case.kind == "flipped bit":
        return case.resumes_from - INTERVAL
    if case.phase == "load":
        return case.resumes_from
    if ending == STOPPED:
        return case.step
    saved = (case.step - 1) // INTERVAL * INTERVAL
    return max(0, saved - INTERVAL * case.job.asynchronous)


def compare(expected: Reference, dump_folder: Path, outcome: Outcome) -> None:
    """Compare every step, and the files of the last checkpoint, bit for bit. Nothing else may be left."""
    try:
        actual = curve(dump_folder)
    except ValueError as error:
        outcome.problems.append(f"another number after the resumption: {error}")
        return
    for name, numbers in expected.curve.items():
        if name not in actual:
            # a job that resumes after a step does not repeat its validation
            is_last = name.endswith(f"validation {outcome.resumed_at - 1}")
            if outcome.ending.startswith("finished") or not is_last:
                outcome.problems.append(f"no {name}")
        elif actual[name] != numbers:
            outcome.problems.append(f"{name}: {actual[name]}, not {numbers}")
    names = {path.name for path in (dump_folder / "checkpoint").iterdir()}
    if left := {name for name in names if not name.startswith("step-")}:
        outcome.problems.append(f"left in the checkpoint folder: {', '.join(sorted(left))}")
    if f"step-{STEPS}" not in names:
        outcome.problems.append(f"no checkpoint of step {STEPS}")
    elif final_state(dump_folder) != final_state(expected.folder):
        outcome.problems.append("the last checkpoint differs")


def final_state(dump_folder: Path) -> dict[str, str]:
    """Return the checksums of the files with the state after the last step."""
    manifest = json.loads((dump_folder / f"checkpoint/step-{STEPS}/manifest.json").read_text())
    files = json.loads(manifest["manifest"])["files"]
    return {name: record["checksum"] for name, record in files.items() if name.endswith(".distcp")}
