"""The file with the results of a run, from which it continues, and how many values and pairs of values they cover."""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections import Counter
from collections.abc import Collection, Iterable
from pathlib import Path
from typing import Any

import torch

import torchtitan_npu
from torchtitan_npu.config.shipped_files import shipped
from torchtitan_npu.errors import UsageError
from torchtitan_npu.prover.draws import PARTS, VALUES, Draw, Draws, Model, pairs
from torchtitan_npu.prover.proof import STATUSES, Outcome


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
        models.append(Model(name, has_experts, has_documents, min(draw["length"] for draw in drawn)))
    draws = Draws(models, ranks, 0)
    ran = {pair for draw, outcome in results if outcome.status != "refused" for pair in pairs(draw)}
    possible = {pair for _ in range(SAMPLES) for pair in pairs(draws.candidate())}
    return len(ran), len(possible | ran)
