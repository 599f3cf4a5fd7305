"""Recognize typical differences between two loss curves, and say what to check next."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from .curves import name_steps
from .metrics import MetricComparison

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
class Pattern:
    """Describe a difference of one metric: ``what`` was seen, what it usually ``means``, what to ``check`` next."""

    name: str
    metric: str
    step: int
    what: str
    means: str
    check: str


def find_patterns(metric: MetricComparison) -> list[Pattern]:
    """Find the patterns in one metric.

    NaN and a first step over 1% are always reported, the other patterns only out of tolerance.
    """
    finite = ~np.isnan(metric.relative)
    end = len(finite) if finite.all() else int(np.argmin(finite))
    # No difference is defined after the first NaN.
    steps, relative, within = metric.steps[:end], metric.relative[:end], metric.within[:end]
    found = []
    if end < len(finite):
        found.append(_pattern(NAN, metric, int(metric.steps[end]), _describe_nan(metric, end)))
    starts_off = end > 0 and relative[0] > FIRST_STEP_LIMIT
    if starts_off:
        what = f"relative difference {relative[0]:.1%} at step {steps[0]}, over {FIRST_STEP_LIMIT:.0%}"
        found.append(_pattern(FIRST_STEP, metric, int(steps[0]), what))
    if growth := _drift(relative, within):
        first_out = int(steps[np.argmin(within)])
        what = (
            f"median relative difference {growth[0]:.1e} in the first quarter of the steps, {growth[1]:.1e} in the last"
        )
        found.append(_pattern(LATE_DRIFT, metric, first_out, what))
    spikes = [int(steps[index]) for index in _spikes(relative, within) if index > 0 or not starts_off]
    if spikes:
        what = f"out of tolerance at {name_steps(spikes)}, within it before and after"
        found.append(_pattern(SPIKE, metric, spikes[0], what))
    if not found and not within.all():
        out = steps[~within]
        what = f"out of tolerance at {len(out)} of {len(steps)} steps, first at {out[0]}"
        found.append(_pattern(OTHER, metric, int(out[0]), what))
    return found


def _pattern(name: str, metric: MetricComparison, step: int, what: str) -> Pattern:
    means, check = _ADVICE[name]
    return Pattern(name, metric.name, step, what, means, check)


def _describe_nan(metric: MetricComparison, index: int) -> str:
    values = {"baseline": metric.baseline[index], "candidate": metric.candidate[index]}
    bad = [f"{value:g} in the {side}" for side, value in values.items() if not np.isfinite(value)]
    return f"first at step {metric.steps[index]}: {' and '.join(bad)}"


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
    start = 0
    while start < len(within):
        if within[start]:
            start += 1
            continue
        stop = start
        while stop < len(within) and not within[stop]:
            stop += 1
        if stop < len(within) and stop - start <= SPIKE_LENGTH:
            before, after = relative[max(0, start - SPIKE_WINDOW) : start], relative[stop : stop + SPIKE_WINDOW]
            if max(relative[start:stop]) >= SPIKE_FACTOR * np.median([*before, *after]):
                spikes.extend(range(start, stop))
        start = stop
    return spikes
