"""Read the step lines of a console log: TorchTitan's, or others with ``--column``. Values have the printed digits."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from dataclasses import dataclass
from decimal import Decimal
from pathlib import Path

from .columns import NAMES, STEP, Columns
from .curves import AUXILIARY, GRAD_NORM, LOSS, METRICS, Curve, InputError, Point, build_curve, is_placeholder

_COLOUR = re.compile(r"\x1b\[[0-9;]*m")
# torchrun prefixes each line with "[rank0]:" (or "[default0]:", depending on --role) when it tees several ranks.
_RANK = re.compile(r"^\[[A-Za-z_]*(\d+)\]:")
_NUMBER = r"([-+]?(?:nan|inf|\d+\.?\d*(?:e[-+]?\d+)?))(?=\s|$)"
# "validate step: ..." is excluded: it reports the validation loss.
_STEP_LINE = re.compile(
    rf"(?<!validate )\bstep:\s*(\d+)\s+loss:\s*{_NUMBER}(?:\s+grad_norm:\s*{_NUMBER})?", re.IGNORECASE
)
# Auxiliary losses are on a separate line.
_AUXILIARY_LINE = re.compile(rf"\bstep:\s*(\d+)\s+(?=(?:{'|'.join(AUXILIARY)}):)")
_AUXILIARY = re.compile(rf"\b({'|'.join(AUXILIARY)}):\s*{_NUMBER}", re.IGNORECASE)
# After a name of the user: "iteration 10/ 100", "lm loss: 1.0E+00 |", "'loss': 2.5,".
_AFTER_NAME = r"['\"]?\s*[:=]?\s*([-+]?(?:nan\b|inf\b|\d+\.?\d*(?:e[-+]?\d+)?))"


@dataclass(frozen=True)
class StepLine:
    """Hold one step as a rank printed it. ``rank`` is None for a line without torchrun's prefix."""

    rank: int | None
    step: int
    metrics: dict[str, Point]


def parse_step_line(line: str) -> StepLine | None:
    """Return the step, loss and gradient norm in a console line, or None for any other line."""
    line = _COLOUR.sub("", line)
    match = _STEP_LINE.search(line)
    if match is None:
        return None
    rank = _RANK.match(line)
    step, loss, grad_norm = match.groups()
    metrics = {LOSS: printed_point(loss)}
    if grad_norm is not None:
        metrics[GRAD_NORM] = printed_point(grad_norm)
    return StepLine(_integer(rank.group(1)) if rank else None, _integer(step), metrics)


def parse_auxiliary_line(line: str) -> StepLine | None:
    """Return the step and the auxiliary losses in a console line, or None for any other line."""
    line = _COLOUR.sub("", line)
    match = _AUXILIARY_LINE.search(line)
    if match is None:
        return None
    rank = _RANK.match(line)
    metrics = {name: printed_point(value) for name, value in _AUXILIARY.findall(line, match.end())}
    return StepLine(_integer(rank.group(1)) if rank else None, _integer(match.group(1)), metrics)


def parse_named_line(line: str, columns: Columns) -> StepLine | None:
    """Return the step and the metrics of a console line with the names of ``columns``, or None for any other line."""
    line = _COLOUR.sub("", line)
    found: dict[str, str] = {}
    for metric in (STEP, *METRICS):
        for name in columns[metric]:
            match = re.search(rf"(?<![\w/]){re.escape(name)}{_AFTER_NAME}", line, re.IGNORECASE)
            if match is not None:
                found.setdefault(metric, match.group(1))
    if LOSS not in found or not found.get(STEP, "").isdecimal():
        return None
    rank = _RANK.match(line)
    metrics = {metric: printed_point(found[metric]) for metric in METRICS if metric in found}
    return StepLine(_integer(rank.group(1)) if rank else None, _integer(found[STEP]), metrics)


def _integer(digits: str) -> int:
    """Convert ``digits``, of which Python takes 4,300; with more than 30 the number is refused anyway."""
    return int(digits[:30])


def printed_point(text: str) -> Point:
    """Parse a printed number. Its resolution is half a unit of its last digit."""
    value = float(text)
    if not math.isfinite(value):
        return Point(value)
    exponent = Decimal(text).as_tuple().exponent
    assert isinstance(exponent, int)  # a letter for NaN and infinity
    # The ulp covers the rounding from decimal digits to a binary float.
    return Point(value, 0.5 * 10.0**exponent + math.ulp(value))


def read_console(path: Path, columns: Columns = NAMES) -> Curve:
    """Read the curve from one rank of a console log: like TorchTitan, from the lowest rank that has the loss."""
    with path.open(encoding="utf-8", errors="replace") as lines:
        if columns == NAMES:
            found = [parse_step_line(line) or parse_auxiliary_line(line) for line in lines]
        else:
            found = [parse_named_line(line, columns) for line in lines]
    steps = [step for step in found if step is not None and LOSS in step.metrics]
    auxiliary = [step for step in found if step is not None and LOSS not in step.metrics]
    if not steps:
        names = [columns[name][0] for name in (STEP, LOSS)]
        raise InputError(f"{path}: found no line '{names[0]}: ... {names[1]}: ...' (read as a console log)")
    with_loss = [step for step in steps if not is_placeholder(step.metrics[LOSS].value)]
    if not with_loss:
        raise InputError(
            f"{path}: only pipeline stages without the loss were logged (loss -1); log the last stage's rank too"
        )
    ranks = {step.rank for step in with_loss if step.rank is not None}
    chosen = min(ranks, default=None)
    rows = _rows(step for step in [*with_loss, *auxiliary] if step.rank == chosen)
    curve = build_curve(str(path), "console log", rows)
    if len(ranks) > 1:
        curve.notes.append(f"{path}: several ranks logged; the values are from rank {chosen}")
    return curve


def _rows(steps: Iterator[StepLine]) -> Iterator[tuple[int, str, Point]]:
    for step in steps:
        for metric, point in step.metrics.items():
            yield step.step, metric, point
