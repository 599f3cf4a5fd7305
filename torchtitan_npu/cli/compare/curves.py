"""What every source is read into: for each metric, one point a step."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field

LOSS = "loss"
GRAD_NORM = "grad_norm"
AUXILIARY = ("indexer_loss", "mtp_loss")
"""Losses that only some models have beside the one above."""
METRICS = (LOSS, GRAD_NORM, *AUXILIARY)


class Unusable(ValueError):
    """The input cannot be compared; the message is the one line the user sees (exit code 2)."""


@dataclass(frozen=True)
class Point:
    """A value as the source gives it. ``resolution`` is how far the true value may lie from it: 0 for a recorded
    value, half a unit of the last digit for a printed one."""

    value: float
    resolution: float = 0.0

    def same_as(self, other: Point) -> bool:
        """Equal, where NaN equals NaN: the question is whether a source says the same thing twice."""
        return self.value == other.value or (math.isnan(self.value) and math.isnan(other.value))


@dataclass
class Curve:
    """One side of the comparison: ``metrics[name][step]``, steps ascending; ``notes`` go into the report."""

    source: str
    kind: str
    metrics: dict[str, dict[int, Point]]
    notes: list[str] = field(default_factory=list)

    @property
    def printed(self) -> bool:
        """Whether any value was read from printed digits, which cannot show bit equality."""
        return any(point.resolution > 0 for points in self.metrics.values() for point in points.values())


def build_curve(source: str, kind: str, rows: Iterable[tuple[int, str, Point]]) -> Curve:
    """A curve from (step, metric, point) rows in any order.

    A step that occurs twice must say the same thing twice: which of two different values was meant, only the user
    knows.
    """
    metrics: dict[str, dict[int, Point]] = {}
    for step, metric, point in rows:
        known = metrics.setdefault(metric, {}).setdefault(step, point)
        if not known.same_as(point):
            values = f"{known.value:.9g} and {point.value:.9g}"
            raise Unusable(f"{source}: step {step} occurs twice with different values of {metric}: {values}")
    if not metrics.get(LOSS):
        raise Unusable(f"{source}: no loss found (read as {kind})")
    return Curve(source, kind, {metric: dict(sorted(points.items())) for metric, points in metrics.items()})


def is_placeholder(loss: float) -> bool:
    """Whether this is what a pipeline stage without the loss logs: -1.0 a microbatch, summed over gradient
    accumulation and data-parallel ranks, hence any negative whole number."""
    return loss < 0 and loss.is_integer()


def name_steps(steps: Iterable[int], most: int = 6) -> str:
    """``"3, 7-9"``: the steps with ranges folded, cut after ``most`` parts."""
    parts: list[list[int]] = []
    for step in sorted(steps):
        if parts and step == parts[-1][1] + 1:
            parts[-1][1] = step
        else:
            parts.append([step, step])
    shown = [f"{first}" if first == last else f"{first}-{last}" for first, last in parts[:most]]
    return ", ".join(shown) + (", ..." if len(parts) > most else "")
