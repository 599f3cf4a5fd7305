"""Align a candidate and the baseline by step, compare every metric and decide the verdict."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from .curves import AUXILIARY, METRICS, Curve, InputError, name_steps
from .diagnosis import Pattern, find_patterns
from .flipped_choices import flipped_choices
from .metrics import MetricComparison, Steps, Tolerance, compare_metric

IDENTICAL = "identical"
IDENTICAL_PRINTED = "identical in the printed digits"
WITHIN = "within tolerance"
DIVERGED = "diverged"
UNPROVEN = "not proven identical"


@dataclass(frozen=True)
class Comparison:
    """Hold the verdict and everything it is derived from."""

    baseline: Curve
    candidate: Curve
    tolerance: Tolerance
    metrics: list[MetricComparison]
    patterns: list[Pattern]
    verdict: str
    notes: list[str] = field(default_factory=list)

    @property
    def passed(self) -> bool:
        """Return whether the exit code is 0."""
        return self.verdict in (IDENTICAL, IDENTICAL_PRINTED, WITHIN)

    @property
    def first_diverging_step(self) -> int | None:
        """Return the first step at which any metric is out of tolerance, or None."""
        firsts = [metric.first_diverging_step for metric in self.metrics]
        return min((step for step in firsts if step is not None), default=None)

    @property
    def headline(self) -> str:
        """Return the verdict as a phrase."""
        if self.verdict == UNPROVEN:
            return "not proven identical: the digits agree, but printed or rounded values cannot show bit equality"
        if self.verdict != DIVERGED:
            return self.verdict
        step = self.first_diverging_step
        names = " and ".join(metric.name for metric in self.metrics if metric.first_diverging_step == step)
        return f"first diverging step {step} ({names})"


def headline(comparisons: list[Comparison]) -> str:
    """Return the verdict of all candidates as a phrase."""
    if len(comparisons) == 1:
        return comparisons[0].headline
    passed = sum(comparison.passed for comparison in comparisons)
    return f"{passed} of {len(comparisons)} candidates passed"


def candidate_names(comparisons: list[Comparison]) -> list[str]:
    """Return "candidate", or with several "candidate 1" and so on."""
    several = len(comparisons) > 1
    return [f"candidate {number}" if several else "candidate" for number in range(1, len(comparisons) + 1)]


def compare(baseline: Curve, candidate: Curve, tolerance: Tolerance, allow_partial: bool = False) -> Comparison:
    """Compare every metric that both sides have. The loss is always one of them."""
    notes = [*baseline.notes, *candidate.notes, *flipped_choices(candidate)]
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
            raise InputError(f"{lacking[0]} has no {name}; --allow-partial compares the metrics that both sides have")
        if lacking:
            notes.append(f"{name} was not compared: it is missing in {' and '.join(lacking)}")
            continue
        steps = _common_steps(name, baseline, candidate, allow_partial, notes)
        metrics.append(compare_metric(name, steps, baseline, candidate, tolerance))
    printed = baseline.printed or candidate.printed
    if printed:
        notes.append("printed digits were compared: values within half a unit of the last printed digit count as equal")
    patterns = [pattern for metric in metrics for pattern in find_patterns(metric)]
    return Comparison(baseline, candidate, tolerance, metrics, patterns, _verdict(metrics, tolerance, printed), notes)


def _common_steps(name: str, baseline: Curve, candidate: Curve, allow_partial: bool, notes: list[str]) -> Steps:
    """Return the steps at which both sides have ``name``. Steps of one side only need ``allow_partial``."""
    ours, theirs = baseline.metrics[name].keys(), candidate.metrics[name].keys()
    common = sorted(ours & theirs)
    only = [
        f"{name_steps(steps)} only in the {side} ({curve.source})"
        for steps, side, curve in ((ours - theirs, "baseline", baseline), (theirs - ours, "candidate", candidate))
        if steps
    ]
    if only and not allow_partial:
        raise InputError(f"{name}: steps {'; '.join(only)}; --allow-partial compares the common steps")
    if not common:
        raise InputError(f"{name}: the two sides have no common step: {'; '.join(only)}")
    if only:
        notes.append(f"{name}: steps {'; '.join(only)}; {len(common)} common steps were compared")
    return np.array(common, dtype=np.int64)


def _verdict(metrics: list[MetricComparison], tolerance: Tolerance, printed: bool) -> str:
    if not all(metric.within.all() for metric in metrics):
        return DIVERGED
    if not all(metric.same.all() for metric in metrics):
        return WITHIN
    if not printed:
        return IDENTICAL
    return UNPROVEN if tolerance.assert_equal else IDENTICAL_PRINTED
