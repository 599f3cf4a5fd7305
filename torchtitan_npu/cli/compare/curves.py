"""The common form of every source: one point per step for each metric."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field

from torchtitan_npu.errors import one_line, shown

LOSS = "loss"
GRAD_NORM = "grad_norm"
AUXILIARY = ("indexer_loss", "mtp_loss")
"""Additional losses that only some models have."""
METRICS = (LOSS, GRAD_NORM, *AUXILIARY)
LARGEST_STEP = 2**53
"""JSON and CSV numbers are exact up to here."""


class InputError(ValueError):
    """The input cannot be compared. The user sees the message as one line (exit code 2)."""


@dataclass(frozen=True)
class Point:
    """Hold a value as the source gives it.

    ``resolution`` is the largest distance to the true value: 0 for a recorded value, half a unit of the last digit for
    a printed one.
    """

    value: float
    resolution: float = 0.0

    def same_as(self, other: Point) -> bool:
        """Compare the values; NaN equals NaN, because this detects contradictions within one source."""
        return self.value == other.value or (math.isnan(self.value) and math.isnan(other.value))


@dataclass
class Curve:
    """Hold one side of the comparison: ``metrics[name][step]``, steps ascending. ``notes`` go into the report.

    In ``source``, control characters of a file name are escaped.
    """

    source: str
    kind: str
    metrics: dict[str, dict[int, Point]]
    notes: list[str] = field(default_factory=list)
    configuration: dict[str, str] | None = None
    """``section.key`` and value, if the source has them."""

    def __post_init__(self) -> None:
        self.source = one_line(self.source)

    @property
    def printed(self) -> bool:
        """Return whether any value was read from printed digits, which cannot show bit equality."""
        return any(point.resolution > 0 for points in self.metrics.values() for point in points.values())


def build_curve(source: str, kind: str, rows: Iterable[tuple[int, str, Point]]) -> Curve:
    """Build a curve from (step, metric, point) rows in any order.

    A step may occur twice only with equal values: of two different values, only the user knows which one is right.
    """
    metrics: dict[str, dict[int, Point]] = {}
    for step, metric, point in rows:
        check_step(source, step)
        known = metrics.setdefault(metric, {}).setdefault(step, point)
        if not known.same_as(point):
            values = f"{known.value:.9g} and {point.value:.9g}"
            raise InputError(f"{source}: step {step} occurs twice with different values of {metric}: {values}")
    if not metrics.get(LOSS):
        raise InputError(f"{source}: no loss found (read as {kind})")
    return Curve(source, kind, {metric: dict(sorted(points.items())) for metric, points in metrics.items()})


def check_step(source: str, step: int) -> None:
    """Raise for a step that no job reaches, and that arrays and plots cannot hold."""
    if not 0 <= step <= LARGEST_STEP:
        raise InputError(f"{source}: step {shown(step)} is not between 0 and {LARGEST_STEP}")


def is_placeholder(loss: float) -> bool:
    """Return whether a pipeline stage without the loss logged this value.

    Such a stage logs -1.0 per microbatch, summed over gradient accumulation and data-parallel ranks: a negative
    integer.
    """
    return loss < 0 and loss.is_integer()


def name_steps(steps: Iterable[int], most: int = 6) -> str:
    """Format steps with ranges folded (``"3, 7-9"``), truncated after ``most`` parts."""
    parts: list[list[int]] = []
    for step in sorted(steps):
        if parts and step == parts[-1][1] + 1:
            parts[-1][1] = step
        else:
            parts.append([step, step])
    shown = [f"{first}" if first == last else f"{first}-{last}" for first, last in parts[:most]]
    return ", ".join(shown) + (", ..." if len(parts) > most else "")
