"""The records that the processes of a run write (``runtime/recorder.c``): joined, and divided into training steps."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TextIO


def join_calls(folder: Path, path: Path) -> None:
    """Write a JSON list of all launches, one per line: process by process, each in the order in which they ended."""
    with path.open("w") as file:
        file.write("[")
        _write_lines(file, _lines(folder, "calls"))
        file.write("\n]\n")


def join_trace(folder: Path, path: Path) -> None:
    """Write a trace for chrome://tracing or Perfetto: a process is a rank, a row is a stream."""
    with path.open("w") as file:
        file.write('{"displayTimeUnit": "ms", "traceEvents": [')
        _write_lines(file, _lines(folder, "trace"))
        file.write("\n]}\n")


def launch_table(folder: Path) -> str:
    """Return launches and bytes by operator, of the rank that has launched the most.

    A step is the last complete one; it ends when an optimizer has stepped.
    """
    runs = [json.loads(path.read_text()) for path in sorted(folder.glob("launches.*"))]
    runs = [run for run in runs if run["operators"]]
    if not runs:
        return "launches: no operator was launched"
    run = max(runs, key=lambda run: sum(amounts["total"][0] for amounts in run["operators"].values()))
    rank = "" if run["rank"] is None else f" of rank {run['rank']} ({len(runs)} processes)"
    has_steps = run["steps"] > 0
    when = f"step {run['steps']}" if has_steps else "the whole run"
    which = "step" if has_steps else "total"
    rows = sorted(
        ((*amounts[which], amounts["total"][0], name) for name, amounts in run["operators"].items()), reverse=True
    )
    lines = [f"launches{rank} in {when}:", f"{'launches':>9} {'MB':>11} {'in the run':>11}  operator"]
    lines += [f"{launches:9} {bytes_ / 1e6:11.3f} {total:11}  {name}" for launches, bytes_, total, name in rows]
    launches, bytes_, total = (sum(row[column] for row in rows) for column in range(3))
    return "\n".join([*lines, f"{launches:9} {bytes_ / 1e6:11.3f} {total:11}  in all"])


def _lines(folder: Path, what: str) -> Iterator[str]:
    for path in sorted(folder.glob(f"{what}.*")):
        with path.open() as file:
            # a process that was killed may leave half a line
            yield from (line.rstrip("\n") for line in file if line.endswith("\n"))


def _write_lines(file: TextIO, lines: Iterator[str]) -> None:
    separator = "\n"
    for line in lines:
        file.write(separator + line)
        separator = ",\n"


def mark_training_steps(mark: Callable[[], None]) -> None:
    """Call ``mark`` once per training step, also if a step calls several optimizers (one per pipeline stage)."""
    from torch.optim.optimizer import register_optimizer_step_post_hook  # not in the process that starts the run

    steps: Counter[int] = Counter()
    marked = 0

    def stepped(optimizer: Any, args: Any, kwargs: Any) -> None:
        nonlocal marked
        steps[id(optimizer)] += 1
        if steps[id(optimizer)] > marked:
            marked += 1
            mark()

    register_optimizer_step_post_hook(stepped)
