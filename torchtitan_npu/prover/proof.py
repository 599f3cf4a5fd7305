"""Compare a draw with one rank."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch

from torchtitan_npu.config.preflight import check_job
from torchtitan_npu.errors import UsageError
from torchtitan_npu.prover.draws import Draw, ranks_of
from torchtitan_npu.prover.job import Subject, parse, to_toml, with_settings
from torchtitan_npu.prover.ranks import RankError, run_on_ranks
from torchtitan_npu.prover.training import Run, train, train_reference

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
TIMEOUT_S = 300.0

RunOnRanks = Callable[..., list[Any]]
"""A function as :func:`run_on_ranks`."""
Status = Literal["equal", "refused", "differs", "fails"]


@dataclass
class Outcome:
    """The result of one draw."""

    status: Status
    reason: str = ""
    part_of_tolerance: float = 0.0
    """The largest difference of a loss or gradient, as a part of what is allowed."""
    seconds: float = 0.0

    @property
    def is_fault(self) -> bool:
        return self.status in ("differs", "fails")


@dataclass
class Reference:
    """The run on one rank, and runs with random rounding."""

    job: Path
    gradients: Path
    masked_labels: bool
    runs: list[Run] = field(default_factory=list)

    def sample(self, samples: int, run: RunOnRanks) -> None:
        """Train until there are so many runs with random rounding."""
        more = samples - max(0, len(self.runs) - 1)
        arguments = (str(self.job), self.masked_labels, str(self.gradients), more, len(self.runs))
        ((first, *others),) = run(1, TIMEOUT_S, train_reference, *arguments)
        self.runs += others if self.runs else [first, *others]

    def tolerances(self) -> list[dict[str, float]]:
        """Return the allowed differences of each step: of each parameter's gradient, the loss and the norm, by name."""
        exact, *others = self.runs
        allowed = []
        for step, loss in enumerate(exact.losses):
            spread = {name: max(run.differences[step][name] for run in others) for name in exact.differences[step]}
            spread["loss"] = max(abs(run.losses[step] / loss - 1) for run in others)
            tolerances = {name: FACTOR * max(value, EPS) for name, value in spread.items()}
            allowed.append({**tolerances, "gradient norm": NORM_TOLERANCE})
        return allowed

    def rounding_changes_balance(self, step: int, name: str) -> bool:
        exact, *others = self.runs
        return any(run.biases[step][name] != exact.biases[step][name] for run in others)


class Prover:
    """Proves draws in ``folder``, where it keeps the jobs and the references."""

    def __init__(self, subjects: Sequence[Subject], folder: Path, run: RunOnRanks = run_on_ranks) -> None:
        self.subjects = {subject.model.name: subject for subject in subjects}
        self.folder, self.run = folder, run
        self.references: dict[str, Reference] = {}

    def table(self, draw: Draw) -> dict[str, Any]:
        """Return the TOML table of ``draw``."""
        subject = self.subjects[draw["model"]]
        return with_settings(subject.table, subject.settings(draw))

    def prove(self, draw: Draw) -> Outcome:
        started = time.monotonic()
        outcome = self._prove(draw)
        outcome.seconds = time.monotonic() - started
        return outcome

    def _prove(self, draw: Draw) -> Outcome:
        path = self.folder / "draw.toml"
        path.write_text(to_toml(self.table(draw)))
        try:
            check_job(parse(str(path)), ranks_of(draw))
            reference = self.reference(draw)
            arguments = (str(path), draw["masked labels"], str(reference.gradients))
            runs = self.run(ranks_of(draw), TIMEOUT_S, train, *arguments)
        except UsageError as error:
            return Outcome("refused", str(error))
        except RankError as error:
            return Outcome("fails", str(error))
        part, reason = compare(runs, reference)
        if reason and len(reference.runs) <= MANY:
            reference.sample(MANY, self.run)
            part, reason = compare(runs, reference)
        return Outcome("differs" if reason else "equal", reason, part)

    def reference(self, draw: Draw) -> Reference:
        subject = self.subjects[draw["model"]]
        masked = draw["masked labels"]
        job = to_toml(with_settings(subject.table, subject.reference(draw)))
        key = f"{masked}\n{job}"
        if key not in self.references:
            number = len(self.references)
            path = self.folder / f"reference{number}.toml"
            path.write_text(job)
            reference = Reference(path, self.folder / f"reference{number}.pt", masked)
            reference.sample(FEW, self.run)
            self.references[key] = reference
        return self.references[key]


def compare(runs: Sequence[Run], reference: Reference) -> tuple[float, str]:
    """Return the largest difference as a part of the tolerance, and what differs, if anything."""
    exact, tolerances = reference.runs[0], reference.tolerances()
    worst, reasons = 0.0, []
    for step, allowed in enumerate(tolerances):
        found = largest(run.differences[step] for run in runs)
        losses = [run.losses[step] for run in runs if not run.losses[step] < 0]  # only a pipeline's last stage has it
        found["loss"] = farthest(losses, exact.losses[step])
        found["gradient norm"] = farthest([run.norms[step] for run in runs], exact.norms[step])
        if missing := sorted(allowed.keys() - found.keys()):
            reasons.append(f"step {step + 1}: no gradient of {', '.join(missing)}")
        parts = {name: value / allowed.get(name, EPS) for name, value in found.items()}
        name = max(parts, key=lambda name: parts[name])
        worst = max(worst, parts[name])
        wrong = sum(part > 1 for part in parts.values())
        if wrong:
            reasons.append(
                f"step {step + 1}: {wrong} of {len(parts)} values differ, most of all {name}: "
                f"relative difference {found[name]:.1e}, allowed {allowed.get(name, 0):.1e}"
            )
        reasons += [
            f"step {step + 1}: {name} differs"
            for run in runs
            for name, bias in run.biases[step].items()
            if bias != exact.biases[step][name] and not reference.rounding_changes_balance(step, name)
        ]
        if reasons:
            return worst, reasons[0]
    return worst, ""


def farthest(values: Iterable[float], reference: float) -> float:
    """Return the largest relative difference of ``values``; infinity if there are none or one is NaN."""
    found = [abs(value / reference - 1) for value in values]
    return max(found) if found and not any(map(math.isnan, found)) else math.inf


def largest(differences: Iterable[dict[str, float]]) -> dict[str, float]:
    """Return the largest difference of each parameter over the ranks; infinity for NaN."""
    found: dict[str, float] = {}
    for one in differences:
        for name, value in one.items():
            found[name] = math.inf if math.isnan(value) else max(value, found.get(name, 0.0))
    return found
