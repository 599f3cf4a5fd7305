"""Align a candidate with the baseline by step, compare every metric, decide the verdict, name typical differences."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from torchtitan_npu.cli.compare.sources import AUXILIARY, METRICS, REPLAY, Curve, InputError, name_steps

IDENTICAL = "identical"
IDENTICAL_PRINTED = "identical in the printed digits"
WITHIN = "within tolerance"
DIVERGED = "diverged"
UNPROVEN = "not proven identical"

NAN = "NaN"
FIRST_STEP = "off at the first step"
LATE_DRIFT = "late drift"
SPIKE = "spike"
OTHER = "no named pattern"

# Above this relative difference at the first step, the two runs did not start from the same state.
FIRST_STEP_LIMIT = 0.01
# Rounding errors that accumulate like a random walk grow with sqrt(step). The median then grows by 2.6 from the first
# to the last quarter. A constant difference gives 1.
DRIFT_FACTOR = 2.0
# A drift whose difference changes sign also leaves single steps out of tolerance. If differences are normally
# distributed, ten times their median is seven standard deviations: a spike, not such a crossing.
SPIKE_FACTOR = 10.0
SPIKE_WINDOW = 4
SPIKE_LENGTH = 2

_ADVICE = {
    NAN: (
        "A NaN or infinity in one run only is a numerical fault of that run. In both, the fault is in shared code.",
        "Which metric has it first? A gradient norm before the loss points at a backward. Look for a mask, a softmax "
        "or a division in the converted modules, and for an overflow of the dtype.",
    ),
    FIRST_STEP: (
        "The forward, the initial weights, the data or the configuration differ before any update.",
        "Seed, checkpoint, dataset and batch size of both runs, then the converters one at a time. If only the "
        "gradient norm is off, the forward agrees and a backward does not.",
    ),
    LATE_DRIFT: (
        "The runs start equal and diverge slowly: accumulated rounding, or a gradient that is slightly wrong.",
        "Repeat in float32: accumulated rounding shrinks to 1e-5 or less, a wrong gradient does not. Compare the "
        "gradient norm of the first steps. With experts or sparse attention, `compare run --replay` shows what remains "
        "without flipped choices.",
    ),
    SPIKE: (
        "Single steps differ and the curves agree again: one batch is processed differently, not every batch.",
        "Data order and the batch of that step (very long, empty or padded sequences, an expert without tokens). With "
        "experts or sparse attention, `compare run --replay` rules out flipped choices.",
    ),
    OTHER: (
        "The curves differ, but without a NaN, over 1% at the first step, a late drift or spikes.",
        "Where does it begin? First step: the forward differs a little (dtype, an epsilon), or a backward if the loss "
        "agrees there. Second step: the optimizer. Later: a schedule, a resume or the data.",
    ),
}


@dataclass(frozen=True)
class Tolerance:
    """Accept a step if ``|baseline - candidate| <= atol + rtol * |baseline|``, or with ``assert_equal`` if the bits are
    identical."""

    rtol: float = 1e-3
    atol: float = 1e-6
    assert_equal: bool = False


@dataclass(frozen=True)
class Pattern:
    """A typical difference of one metric: ``what`` was seen, what it usually ``means``, what to ``check`` next."""

    name: str
    metric: str
    step: int
    what: str
    means: str
    check: str


@dataclass(frozen=True)
class MetricComparison:
    """One metric at the common steps. Every array has shape (n_steps,)."""

    name: str
    steps: NDArray[np.int64]
    baseline: NDArray[np.float64]
    candidate: NDArray[np.float64]
    limit: NDArray[np.float64]
    """The largest difference that passes."""
    relative: NDArray[np.float64]
    """``|baseline - candidate| / |baseline|``; NaN if either side is not finite."""
    same: NDArray[np.bool_]
    """Bit-identical values, or printed values that agree in every digit."""
    within: NDArray[np.bool_]

    @property
    def first_diverging_step(self) -> int | None:
        """Return the first step out of tolerance, or None."""
        return None if self.within.all() else int(self.steps[int(np.argmin(self.within))])

    @property
    def largest(self) -> tuple[float, int] | None:
        """Return the largest relative difference and its step, or None if no step has two finite values."""
        if np.isnan(self.relative).all():
            return None
        index = int(np.nanargmax(self.relative))
        return float(self.relative[index]), int(self.steps[index])


@dataclass(frozen=True)
class Comparison:
    """The verdict and everything it is derived from."""

    baseline: Curve
    candidate: Curve
    tolerance: Tolerance
    metrics: list[MetricComparison]
    patterns: list[Pattern]
    verdict: str
    notes: list[str] = field(default_factory=list)

    @property
    def passed(self) -> bool:
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

    @property
    def patterns_by_name(self) -> list[list[Pattern]]:
        """Group the patterns by name, in order of appearance. Patterns of one name share their advice."""
        names = dict.fromkeys(pattern.name for pattern in self.patterns)
        return [[pattern for pattern in self.patterns if pattern.name == name] for name in names]


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
    notes = [*baseline.notes, *candidate.notes, *_changed_decisions(candidate)]
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
        metrics.append(_compare_metric(name, steps, baseline, candidate, tolerance))
    if printed := baseline.printed or candidate.printed:
        notes.append("printed digits were compared: values within half a unit of the last printed digit count as equal")
    if not all(metric.within.all() for metric in metrics):
        verdict = DIVERGED
    elif not all(metric.same.all() for metric in metrics):
        verdict = WITHIN
    elif printed:
        verdict = UNPROVEN if tolerance.assert_equal else IDENTICAL_PRINTED
    else:
        verdict = IDENTICAL
    patterns = [pattern for metric in metrics for pattern in find_patterns(metric)]
    return Comparison(baseline, candidate, tolerance, metrics, patterns, verdict, notes)


def _common_steps(
    name: str, baseline: Curve, candidate: Curve, allow_partial: bool, notes: list[str]
) -> NDArray[np.int64]:
    """Return the steps at which both sides have ``name``. Steps of one side only need ``allow_partial``."""
    left, right = baseline.metrics[name].keys(), candidate.metrics[name].keys()
    common = sorted(left & right)
    only = [
        f"{name_steps(steps)} only in the {side} ({curve.source})"
        for steps, side, curve in ((left - right, "baseline", baseline), (right - left, "candidate", candidate))
        if steps
    ]
    if only and not allow_partial:
        raise InputError(f"{name}: steps {'; '.join(only)}; --allow-partial compares the common steps")
    if not common:
        raise InputError(f"{name}: the two sides have no common step: {'; '.join(only)}")
    if only:
        notes.append(f"{name}: steps {'; '.join(only)}; {len(common)} common steps were compared")
    return np.array(common, dtype=np.int64)


def _compare_metric(
    name: str, steps: NDArray[np.int64], baseline: Curve, candidate: Curve, tolerance: Tolerance
) -> MetricComparison:
    """Compare the metric ``name`` at ``steps`` (n_steps,)."""
    pairs = [(baseline.metrics[name][int(step)], candidate.metrics[name][int(step)]) for step in steps]
    left, right = (np.array([pair[side].value for pair in pairs], dtype=np.float64) for side in (0, 1))
    # The maximum, not the sum. Rounding is monotonic, so equal values print equal digits. A value printed with more and
    # with fewer digits is within half a unit of the coarser one.
    resolution = np.array([max(point.resolution for point in pair) for pair in pairs], dtype=np.float64)
    finite = np.isfinite(left) & np.isfinite(right)
    with np.errstate(invalid="ignore", divide="ignore", over="ignore"):
        difference = np.abs(left - right)
        relative = np.where(difference == 0, 0.0, difference / np.abs(left))
        relative[~finite] = np.nan
        allowed = np.zeros_like(left) if tolerance.assert_equal else tolerance.atol + tolerance.rtol * np.abs(left)
    same = np.where(resolution > 0, difference <= resolution, left.view(np.int64) == right.view(np.int64))
    # NaN and infinity are never within tolerance, not even of themselves: their difference is not defined.
    within = finite & (same if tolerance.assert_equal else same | (difference <= allowed))
    return MetricComparison(name, steps, left, right, np.maximum(allowed, resolution), relative, same, within)


def _changed_decisions(candidate: Curve) -> list[str]:
    """Return how many experts and keys a replayed ``candidate`` would have chosen differently, a line each."""
    lines = []
    for kind in ("experts", "keys"):
        name = f"{REPLAY}flipped_{kind}"
        if not (changed := candidate.sums(name)):
            continue
        total = sum(candidate.sums(f"{REPLAY}{kind}").values())
        line = f"replay: of {total:.0f} {kind} the candidate would have chosen {sum(changed.values()):.0f} differently"
        if any(changed.values()):
            prefix = f"{name}/layer_"
            layers = {
                int(metric.removeprefix(prefix)): sum(candidate.sums(metric).values())
                for metric in candidate.metrics
                if metric.startswith(prefix)
            }
            by_layer = ", ".join(f"layer {layer}: {count:.0f}" for layer, count in sorted(layers.items()) if count)
            line += f", first in step {min(step for step, count in changed.items() if count)} ({by_layer})"
        lines.append(line)
    return lines


def find_patterns(metric: MetricComparison) -> list[Pattern]:
    """Find the patterns in one metric.

    NaN and a first step over 1% are always reported, the other patterns only out of tolerance.
    """
    finite = ~np.isnan(metric.relative)
    end = len(finite) if finite.all() else int(np.argmin(finite))
    # No difference is defined after the first NaN.
    steps, relative, within = metric.steps[:end], metric.relative[:end], metric.within[:end]
    found: list[tuple[str, int, str]] = []
    if end < len(finite):
        values = {"baseline": metric.baseline[end], "candidate": metric.candidate[end]}
        bad = [f"{value:g} in the {side}" for side, value in values.items() if not np.isfinite(value)]
        found.append((NAN, int(metric.steps[end]), f"first at step {metric.steps[end]}: {' and '.join(bad)}"))
    starts_off = end > 0 and relative[0] > FIRST_STEP_LIMIT
    if starts_off:
        what = f"relative difference {relative[0]:.1%} at step {steps[0]}, over {FIRST_STEP_LIMIT:.0%}"
        found.append((FIRST_STEP, int(steps[0]), what))
    if growth := _drift(relative, within):
        what = (
            f"median relative difference {growth[0]:.1e} in the first quarter of the steps, {growth[1]:.1e} in the last"
        )
        found.append((LATE_DRIFT, int(steps[np.argmin(within)]), what))
    spikes = [int(steps[index]) for index in _spikes(relative, within) if index > 0 or not starts_off]
    if spikes:
        found.append((SPIKE, spikes[0], f"out of tolerance at {name_steps(spikes)}, within it before and after"))
    if not found and not within.all():
        out = steps[~within]
        found.append((OTHER, int(out[0]), f"out of tolerance at {len(out)} of {len(steps)} steps, first at {out[0]}"))
    return [Pattern(name, metric.name, step, what, *_ADVICE[name]) for name, step, what in found]


def _drift(relative: np.ndarray, within: np.ndarray) -> tuple[float, float] | None:
    """Return the median relative difference of the first and of the last quarter if this is a drift, else None.

    In a drift the first step is within tolerance, most of the last quarter is not, and the median has grown by
    :data:`DRIFT_FACTOR`. A drift needs at least four steps.
    """
    quarter = len(relative) // 4
    if quarter == 0 or not within[0] or np.mean(within[-quarter:]) >= 0.5:
        return None
    first, last = float(np.median(relative[:quarter])), float(np.median(relative[-quarter:]))
    return (first, last) if last >= DRIFT_FACTOR * first else None


def _spikes(relative: np.ndarray, within: np.ndarray) -> list[int]:
    """Return the indices of spikes.

    A spike is at most :data:`SPIKE_LENGTH` consecutive steps out of tolerance, with steps within tolerance before and
    after. It differs :data:`SPIKE_FACTOR` times more than the median of the :data:`SPIKE_WINDOW` steps on each side.
    The last step is never a spike: nothing shows that the curves agree again.
    """
    spikes: list[int] = []
    edges = np.flatnonzero(np.diff(np.concatenate([[0], ~within, [0]]).astype(np.int8)))
    for start, stop in edges.reshape(-1, 2):  # each run of steps out of tolerance
        if stop < len(within) and stop - start <= SPIKE_LENGTH:
            around = [*relative[max(0, start - SPIKE_WINDOW) : start], *relative[stop : stop + SPIKE_WINDOW]]
            if max(relative[start:stop]) >= SPIKE_FACTOR * np.median(around):
                spikes.extend(range(start, stop))
    return spikes
