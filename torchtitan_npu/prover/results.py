"""The file with the results of a run, from which it continues."""

from __future__ import annotations

import hashlib
import json
import os
from pathlib import Path
from typing import Any

import torch

import torchtitan_npu
from torchtitan_npu.config.shipped_files import shipped
from torchtitan_npu.errors import UsageError
from torchtitan_npu.prover.draws import Draw
from torchtitan_npu.prover.proof import Outcome


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
