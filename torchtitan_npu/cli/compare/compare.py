"""Aligns two curves by step, measures them and gives the verdict."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from .curves import AUXILIARY, METRICS, Curve, Unusable, name_steps
from .patterns import Pattern, find_patterns

IDENTICAL = "identical"
IDENTICAL_PRINTED = "identical in the printed digits"
WITHIN = "within tolerance"
DIVERGED = "diverged"
UNPROVEN = "not proven identical"

Floats = NDArray[np.float64]
Bools = NDArray[np.bool_]


@dataclass(frozen=True)
class Tolerance:
    """Per step: ``|baseline - candidate| <= atol + rtol * |baseline|``; ``assert_equal`` leaves no room at all."""

    rtol: float = 1e-3
    atol: float = 1e-6
    assert_equal: bool = False


@dataclass(frozen=True)
class MetricComparison:
    """One metric at the common steps; every array has shape (n_steps,).

    ``limit`` is the largest difference that passes. ``same``: bit-identical, or equal as far as the printed digits
    tell. ``relative`` is |baseline - candidate| / |baseline|, NaN where either side is not finite.
    """

    name: str
    steps: NDArray[np.int64]
    baseline: Floats
    candidate: Floats
    limit: Floats
    relative: Floats
    same: Bools
    within: Bools

    @property
    def first_diverging_step(self) -> int | None:
        """The first step out of tolerance, or None."""
        return None if self.within.all() else int(self.steps[int(np.argmin(self.within))])

    @property
    def largest(self) -> tuple[float, int] | None:
        """The largest relative difference and its step; None when no step has two finite values."""
        if np.isnan(self.relative).all():
            return None
        index = int(np.nanargmax(self.relative))
        return float(self.relative[index]), int(self.steps[index])


@dataclass(frozen=True)
class Comparison:
    """The verdict and all that it rests on."""

    baseline: Curve
    candidate: Curve
    tolerance: Tolerance
    metrics: list[MetricComparison]
    patterns: list[Pattern]
    verdict: str
    notes: list[str] = field(default_factory=list)

    @property
    def passed(self) -> bool:
        """Whether the exit code is 0."""
        return self.verdict in (IDENTICAL, IDENTICAL_PRINTED, WITHIN)

    @property
    def first_diverging_step(self) -> int | None:
        """The first step at which any metric is out of tolerance, or None."""
        firsts = [metric.first_diverging_step for metric in self.metrics]
        return min((step for step in firsts if step is not None), default=None)

    @property
    def headline(self) -> str:
        """The verdict as a phrase."""
        if self.verdict == UNPROVEN:
            return "not proven identical: the printed digits agree, but a console log cannot show bit equality"
        if self.verdict != DIVERGED:
            return self.verdict
        step = self.first_diverging_step
        names = " and ".join(metric.name for metric in self.metrics if metric.first_diverging_step == step)
        return f"first diverging step {step} ({names})"


def compare(baseline: Curve, candidate: Curve, tolerance: Tolerance, allow_partial: bool = False) -> Comparison:
    """Compares every metric that both sides have; the loss is always one of them."""
    notes = [*baseline.notes, *candidate.notes]
    metrics = []
    for name in METRICS:
        lacking = [
            f"the {side} ({curve.source})"
            for side, curve in (("baseline", baseline), ("candidate", candidate))
            if not curve.metrics.get(name)
        ]
        if len(lacking) == 2 and name in AUXILIARY:
            continue
        if len(lacking) == 1 and not allow_partial:
            raise Unusable(f"there is no {name} in {lacking[0]}; --allow-partial compares what both sides have")
        if lacking:
            notes.append(f"{name} was not compared: there is none in {' and '.join(lacking)}")
            continue
        steps = _common_steps(name, baseline, candidate, allow_partial, notes)
        metrics.append(_compare_metric(name, steps, baseline, candidate, tolerance))
    printed = baseline.printed or candidate.printed
    if printed:
        notes.append(
            "compared printed digits: within half a unit of the last digit of a console log, values count as equal"
        )
    patterns = [pattern for metric in metrics for pattern in find_patterns(metric)]
    return Comparison(baseline, candidate, tolerance, metrics, patterns, _verdict(metrics, tolerance, printed), notes)


def _common_steps(
    name: str, baseline: Curve, candidate: Curve, allow_partial: bool, notes: list[str]
) -> NDArray[np.int64]:
    """The steps at which both sides have ``name``: all of them, or ``allow_partial`` was given."""
    ours, theirs = baseline.metrics[name].keys(), candidate.metrics[name].keys()
    common = sorted(ours & theirs)
    only = [
        f"{name_steps(steps)} only in the {side} ({curve.source})"
        for steps, side, curve in ((ours - theirs, "baseline", baseline), (theirs - ours, "candidate", candidate))
        if steps
    ]
    if only and not allow_partial:
        raise Unusable(f"{name}: steps {'; '.join(only)}; --allow-partial compares the common steps")
    if not common:
        raise Unusable(f"{name}: the two sides have no step in common: {'; '.join(only)}")
    if only:
        notes.append(f"{name}: steps {'; '.join(only)}; {len(common)} common steps were compared")
    return np.array(common, dtype=np.int64)


def _compare_metric(
    name: str, steps: NDArray[np.int64], baseline: Curve, candidate: Curve, tolerance: Tolerance
) -> MetricComparison:
    """Measures one metric at ``steps`` (n_steps,)."""
    pairs = [(baseline.metrics[name][int(step)], candidate.metrics[name][int(step)]) for step in steps]
    ours = np.array([point.value for point, _ in pairs], dtype=np.float64)
    theirs = np.array([point.value for _, point in pairs], dtype=np.float64)
    # Not the sum: rounding is monotonic, so equal values print equal digits, and a value printed once with more and
    # once with fewer digits lies within half a unit of the coarser ones.
    resolution = np.array([max(point.resolution for point in pair) for pair in pairs], dtype=np.float64)

    finite = np.isfinite(ours) & np.isfinite(theirs)
    with np.errstate(invalid="ignore", divide="ignore", over="ignore"):
        difference = np.abs(ours - theirs)
        relative = np.where(difference == 0, 0.0, difference / np.abs(ours))
        relative[~finite] = np.nan
        allowed = np.zeros_like(ours) if tolerance.assert_equal else tolerance.atol + tolerance.rtol * np.abs(ours)
    same = np.where(resolution > 0, difference <= resolution, ours.view(np.int64) == theirs.view(np.int64))
    # NaN and infinity have no distance: they are never within tolerance, not even of themselves.
    within = finite & (same if tolerance.assert_equal else same | (difference <= allowed))
    return MetricComparison(name, steps, ours, theirs, np.maximum(allowed, resolution), relative, same, within)


def _verdict(metrics: list[MetricComparison], tolerance: Tolerance, printed: bool) -> str:
    if not all(metric.within.all() for metric in metrics):
        return DIVERGED
    if not all(metric.same.all() for metric in metrics):
        return WITHIN
    if not printed:
        return IDENTICAL
    return UNPROVEN if tolerance.assert_equal else IDENTICAL_PRINTED
