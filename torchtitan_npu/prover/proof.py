"""Compare draws with one rank, keep the outcomes in a file from which a run continues, and summarize them."""

from __future__ import annotations

import hashlib
import json
import math
import os
import re
import threading
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from typing import Any, Literal, get_args

import tomli_w
import torch

import torchtitan_npu
from torchtitan_npu.config.shipped_files import shipped
from torchtitan_npu.errors import UsageError
from torchtitan_npu.preflight.job import check_job
from torchtitan_npu.prover.draws import PARTS, VALUES, Draw, DrawnModel, Draws, pairs, ranks_of
from torchtitan_npu.prover.job import Subject, parse, with_settings
from torchtitan_npu.prover.training import RankError, RankTimeout, Run, run_on_ranks, train, train_reference

EPS = torch.finfo(torch.float32).eps
FACTOR = 4.0
"""A difference may be this many times the largest one that random rounding makes on one rank. Two runs with errors of
the same size differ by √2 of it, and the largest of a few random errors is below their bound."""
FEW, MANY = 1, 10
"""Runs with random rounding: at first, and before a difference is reported. Rounding can change which experts or keys
are selected where two scores are almost equal. That is rare, so one run may not show it."""
NORM_TOLERANCE = 1e-3
"""Of the reported gradient norm: torch adds the squares of a tensor in float32, one after another on a CPU, so that the
sum depends on the shards. 2e-4 was seen with equal gradients."""
BIAS_TOLERANCE = 1e-3
"""Of an expert's bias, relative to the largest. A bias is the sum of a few equal steps up or down, less their mean. An
expert with another load has another step, of the size of the largest bias divided by the number of steps."""
OPERATORS = 4
"""Operators per parameter that round, in the forward and the backward pass."""
TIMEOUT_S = 300.0

SEEDS = (7, 8, 9, 10)
"""Seeds of the weights. The next one is used if rounding changes what is selected with the last."""

RunOnRanks = Callable[..., list[Any]]
"""A function as :func:`run_on_ranks`."""
Status = Literal["equal", "refused", "unstable", "differs", "fails", "timeout"]
STATUSES: tuple[Status, ...] = get_args(Status)


@dataclass
class Outcome:
    """The result of one draw."""

    status: Status
    reason: str = ""
    part_of_tolerance: float = 0.0
    """The largest difference of a loss or gradient, as a part of what is allowed."""
    kind: str = ""
    """What differs, or the error without its numbers. Shrinking keeps it."""
    seed: int = SEEDS[0]
    """Seed of the weights."""
    seconds: float = 0.0

    @property
    def is_fault(self) -> bool:
        return self.status in ("differs", "fails", "timeout")


@dataclass
class Reference:
    """The run on one rank, and runs with random rounding."""

    job: Path
    gradients: Path
    masked_labels: bool
    runs: list[Run] = field(default_factory=list)
    lock: threading.Lock = field(default_factory=threading.Lock)

    def sample(self, samples: int, run: RunOnRanks) -> None:
        """Run the reference until ``samples`` randomly rounded runs exist."""
        with self.lock:
            more = samples - max(0, len(self.runs) - 1)
            if more > 0:
                arguments = (str(self.job), self.masked_labels, str(self.gradients), more, len(self.runs))
                ((first, *rounded),) = run(1, TIMEOUT_S, train_reference, *arguments)
                self.runs = [*(self.runs or [first]), *rounded]

    def spread(self, step: int) -> dict[str, float]:
        """Return by how much rounding changes each parameter's gradient and the loss, by name."""
        exact, *rounded = self.runs
        spread = largest(run.differences[step] for run in rounded)
        return spread | {"loss": farthest([run.losses[step] for run in rounded], exact.losses[step])}

    def tolerances(self, step: int) -> dict[str, float]:
        """Return the allowed differences: of each parameter's gradient, the loss and the norm, by name."""
        allowed = {name: FACTOR * max(value, EPS) for name, value in self.spread(step).items()}
        return allowed | {"gradient norm": NORM_TOLERANCE}

    def largest_spread(self) -> float:
        """Return a bound of the spread. If rounding changes a run by more, it selects other experts or keys.

        An operator that sums n terms has a relative error of about eps·√n. The errors of a chain of operators are
        independent, so their squares add up.
        """
        exact = self.runs[0]
        return EPS * math.sqrt(OPERATORS * len(exact.differences[0]) * exact.longest_sum)

    def instability(self) -> str:
        """Return what rounding alone changes by too much for a comparison, if anything."""
        exact, *rounded = self.runs
        bound = self.largest_spread()
        for step in range(len(exact.losses)):
            spread = self.spread(step)
            name = max(spread, key=lambda name: spread[name])
            if not spread[name] <= bound:
                return f"step {step + 1}: rounding alone changes {name} by {spread[name]:.1e}, above {bound:.1e}"
            if reason := wrong_biases([run.biases[step] for run in rounded], exact.biases[step]):
                return f"step {step + 1}: with other rounding alone, {reason}"
        return ""


class Prover:
    """Proves draws in ``folder``, where it keeps the jobs and the references. Threads may share it."""

    def __init__(self, subjects: Sequence[Subject], folder: Path, run: RunOnRanks = run_on_ranks) -> None:
        self.subjects = {subject.model.name: subject for subject in subjects}
        self.folder, self.run = folder, run
        self.references: dict[str, Reference] = {}
        self.lock = threading.Lock()
        self.files = count()

    def table(self, draw: Draw, seed: int = SEEDS[0]) -> dict[str, Any]:
        """Return the TOML table of ``draw`` with this seed of the weights."""
        subject = self.subjects[draw["model"]]
        return with_settings(subject.table, subject.settings(draw, seed))

    def prove(self, draw: Draw) -> Outcome:
        started = time.monotonic()
        for seed in SEEDS:
            outcome = self._prove(draw, seed)
            if outcome.status != "unstable":
                break
        outcome.seed, outcome.seconds = seed, time.monotonic() - started
        return outcome

    def _prove(self, draw: Draw, seed: int) -> Outcome:
        try:
            with self.lock:  # the parser and the checks are not for threads
                path = self._write_checked(tomli_w.dumps(self.table(draw, seed)), ranks_of(draw))
                reference = self.reference(draw, seed)
        except UsageError as error:
            return Outcome("refused", str(error))
        try:
            reference.sample(FEW, self.run)
            if reason := reference.instability():
                return Outcome("unstable", reason)
            arguments = (str(path), draw["masked labels"], str(reference.gradients))
            runs = self.run(ranks_of(draw), TIMEOUT_S, train, *arguments)
            outcome = compare(runs, reference)
            if outcome.is_fault:
                reference.sample(MANY, self.run)
                if reason := reference.instability():
                    return Outcome("unstable", reason)
                outcome = compare(runs, reference)
        except RankTimeout as error:
            return Outcome("timeout", str(error))
        except RankError as error:
            return Outcome("fails", str(error), kind=kind_of_error(str(error)))
        return outcome

    def reference(self, draw: Draw, seed: int) -> Reference:
        """Return the reference of ``draw``, which may not have run yet."""
        subject = self.subjects[draw["model"]]
        masked = draw["masked labels"]
        job = tomli_w.dumps(with_settings(subject.table, subject.reference(draw, seed)))
        key = f"{masked}\n{job}"
        if key not in self.references:
            path = self._write_checked(job, 1)
            self.references[key] = Reference(path, path.with_suffix(".pt"), masked)
        return self.references[key]

    def _write_checked(self, job: str, ranks: int) -> Path:
        """Write a TOML file and check its job as the entry does."""
        path = self.folder / f"job{next(self.files)}.toml"
        path.write_text(job)
        check_job(parse(str(path)), ranks)
        return path


def compare(runs: Sequence[Run], reference: Reference) -> Outcome:
    """Return whether ``runs`` are equal to the reference, the largest difference, and what differs first."""
    exact = reference.runs[0]
    worst = 0.0
    for step in range(len(exact.losses)):
        allowed = reference.tolerances(step)
        found = largest(run.differences[step] for run in runs)
        losses = [run.losses[step] for run in runs if not run.losses[step] < 0]  # only a pipeline's last stage has it
        found["loss"] = farthest(losses, exact.losses[step])
        found["gradient norm"] = farthest([run.norms[step] for run in runs], exact.norms[step])
        parts = {name: value / allowed.get(name, EPS) for name, value in found.items()}
        name = max(parts, key=lambda name: parts[name])
        worst = max(worst, parts[name])
        wrong = {name for name, part in parts.items() if part > 1}
        biases = wrong_biases([run.biases[step] for run in runs], exact.biases[step])
        if missing := sorted(allowed.keys() - found.keys()):
            kind, reason = "no gradient", f"no gradient of {', '.join(missing)}"
        elif wrong:
            kind = next((kind for kind in ("loss", "gradient norm") if wrong == {kind}), "gradient")
            reason = (
                f"{len(wrong)} of {len(parts)} values differ, most of all {name}: "
                f"relative difference {found[name]:.1e}, allowed {allowed.get(name, 0):.1e}"
            )
        elif biases:
            kind, reason = "expert bias", biases
        else:
            continue
        return Outcome("differs", f"step {step + 1}: {reason}", worst, kind)
    return Outcome("equal", "", worst)


def wrong_biases(ranks: Sequence[dict[str, list[float]]], exact: dict[str, list[float]]) -> str:
    """Return which expert biases no rank has, or a rank has with another value."""
    if missing := sorted(exact.keys() - set().union(*ranks)):
        return f"no {', '.join(missing)}"
    found = {name for biases in ranks for name, bias in biases.items() if not close(bias, exact.get(name, []))}
    return f"{', '.join(sorted(found))} differs" if found else ""


def close(bias: list[float], exact: list[float]) -> bool:
    """Return whether the experts have the same biases. Subtracting their mean rounds."""
    allowed = BIAS_TOLERANCE * max(map(abs, exact), default=0.0)
    return len(bias) == len(exact) and all(abs(a - b) <= allowed for a, b in zip(bias, exact, strict=True))


def kind_of_error(text: str) -> str:
    """Return the line of the first exception in the traceback of a rank, without numbers."""
    found = re.search(r"^[\w.]+(Error|Exception)\b.*$", text, re.MULTILINE)
    return re.sub(r"\d+", "N", found[0] if found else text.partition("\n")[0])


def farthest(values: Iterable[float], reference: float) -> float:
    """Return the largest relative difference of ``values``; infinity if there are none or one is NaN."""
    if reference == 0:
        found = [0.0 if value == 0 else math.inf for value in values]
    else:
        found = [abs(value / reference - 1) for value in values]
    return max(found) if found and not any(map(math.isnan, found)) else math.inf


def largest(differences: Iterable[dict[str, float]]) -> dict[str, float]:
    """Return the largest difference of each parameter over the ranks; infinity for NaN."""
    found: dict[str, float] = {}
    for one in differences:
        for name, value in one.items():
            found[name] = math.inf if math.isnan(value) else max(value, found.get(name, 0.0))
    return found


def identity(
    config: str | None,
    flavor: str | None,
    models: list[str] | None,
    ranks: int,
    seed: int,
    converters: list[str] | None = None,
) -> dict[str, Any]:
    """Return the arguments and the program whose results can be in one file."""
    arguments = {"config": config, "flavor": flavor, "models": models, "ranks": ranks, "seed": seed}
    if converters is not None:
        arguments["converters"] = converters
    folder = Path(torchtitan_npu.__file__).parent
    files = sorted(folder.rglob("*.py"))
    program = hashlib.sha256(b"".join(path.read_bytes() for path in files))
    if config:
        program.update(Path(shipped(config)).read_bytes())
    return {**arguments, "torch": torch.__version__, "program": program.hexdigest()[:12]}


class Results:
    """The draws that ended and their outcomes, by number. A ``path`` keeps them; it is replaced after each draw."""

    def __init__(self, path: Path | None, run: dict[str, Any]) -> None:
        self.path, self.run = path, run
        self.draws: dict[int, tuple[Draw, Outcome]] = {}
        if path is not None and path.exists():
            stored = self.load(path)
            if changed := [name for name, value in run.items() if stored.run.get(name) != value]:
                before, now = ({name: values.get(name) for name in changed} for values in (stored.run, run))
                raise UsageError(f"--json {path}: has the results of another run: {before}, not {now}")
            self.draws = stored.draws

    @classmethod
    def load(cls, path: Path) -> Results:
        """Read the results of any run."""
        if not path.exists():
            raise UsageError(f"--json {path}: no such file")
        stored = json.loads(path.read_text())
        results = cls(None, stored["run"])
        for number, entry in stored["draws"].items():
            results.draws[int(number)] = entry["draw"], Outcome(**entry["outcome"])
        return results

    def caption(self) -> str:
        """Return what a reader needs to repeat the run, in one line."""
        run, seconds = self.run, sum(outcome.seconds for _, outcome in self.draws.values())
        models = f" of {run['config'] or ' '.join(run['models'])}" if run["config"] or run["models"] else ""
        return (
            f"Draws{models} with seed {run['seed']}, up to {run['ranks']} ranks, torch {run['torch']}, program "
            f"{run['program']}, {seconds / 60:.0f} minutes in all."
        )

    def add(self, number: int, draw: Draw, outcome: Outcome) -> None:
        self.draws[number] = draw, outcome
        if self.path is not None:
            draws = {n: {"draw": draw, "outcome": vars(outcome)} for n, (draw, outcome) in sorted(self.draws.items())}
            part = self.path.with_name(f"{self.path.name}.part")
            part.write_text(json.dumps({"run": self.run, "draws": draws}, indent=1) + "\n")
            os.replace(part, self.path)


SAMPLES = 4000
"""Random draws from which the possible pairs are collected."""


def summary(results: Collection[tuple[Draw, Outcome]], ranks: int) -> str:
    """Return Markdown: the values that were covered, why draws were refused, and the number of draws by status."""
    ran, possible = pair_coverage(results, ranks)
    lines = [coverage_table(results), "", f"{ran} of {possible} pairs of values ran.", ""]
    if reasons := refusals(results):
        lines += [reasons, ""]
    return "\n".join([*lines, count_by_status(results)])


def count_by_status(results: Collection[tuple[Draw, Outcome]]) -> str:
    """Return the number of draws by status in one line."""
    counts = [f"{sum(outcome.status == status for _, outcome in results)} {status}" for status in STATUSES]
    return f"{len(results)} draws: {', '.join(counts)}"


def refusals(results: Iterable[tuple[Draw, Outcome]]) -> str:
    """Return a Markdown table of the reasons of refused draws, without names and numbers of one draw."""
    reasons = Counter(
        re.sub(r"\d+", "N", re.sub(r"'[^']*'", "…", outcome.reason.partition("\n")[0])).replace("|", "\\|")
        for _, outcome in results
        if outcome.status == "refused"
    )
    rows = [f"| {reason} | {count} |" for reason, count in reasons.most_common()]
    return "\n".join(["| refused because | draws |", "|---|---|", *rows]) if rows else ""


def coverage_table(results: Iterable[tuple[Draw, Outcome]]) -> str:
    """Return a Markdown table: for each value, how many draws ran, and in parentheses how many were refused."""
    ran: Counter[tuple[str, object]] = Counter()
    refused: Counter[tuple[str, object]] = Counter()
    for draw, outcome in results:
        (refused if outcome.status == "refused" else ran).update(draw.items())
    lines = ["| part | draws that ran (refused) |", "|---|---|"]
    for part in PARTS:
        values = [value for name, value in {**ran, **refused} if name == part and value is not None]
        order = VALUES.get(part, tuple(sorted(map(str, values))))
        cells = []
        for value in order:
            key = (part, value)
            if ran[key] or refused[key]:
                cells.append(f"{label(value)}: {ran[key]}" + (f" ({refused[key]})" if refused[key] else ""))
        lines.append(f"| {part} | {', '.join(cells)} |")
    return "\n".join(lines)


def label(value: object) -> str:
    names = {"": "contiguous", True: "on", False: "off"}
    return names[value] if isinstance(value, (bool, str)) and value in names else str(value)


def pair_coverage(results: Collection[tuple[Draw, Outcome]], ranks: int) -> tuple[int, int]:
    """Return how many pairs of values ran, and how many are possible: a sample of random draws has them."""
    if not results:
        return 0, 0
    models = []
    for name in {draw["model"]: None for draw, _ in results}:
        drawn = [draw for draw, _ in results if draw["model"] == name]
        # a value is None if it does not apply to the model
        has_experts, has_documents = (drawn[0][part] is not None for part in ("ep", "documents"))
        models.append(DrawnModel(name, has_experts, has_documents, min(draw["length"] for draw in drawn)))
    draws = Draws(models, ranks, 0)
    ran = {pair for draw, outcome in results if outcome.status != "refused" for pair in pairs(draw)}
    possible = {pair for _ in range(SAMPLES) for pair in pairs(draws.candidate())}
    return len(ran), len(possible | ran)
