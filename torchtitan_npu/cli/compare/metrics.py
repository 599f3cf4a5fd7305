"""Compare one metric of two curves at their common steps."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from .curves import Curve

Floats = NDArray[np.float64]
Bools = NDArray[np.bool_]
Steps = NDArray[np.int64]


@dataclass(frozen=True)
class Tolerance:
    """Accept a step if ``|baseline - candidate| <= atol + rtol * |baseline|``.

    With ``assert_equal`` the values must be bit-identical.
    """

    rtol: float = 1e-3
    atol: float = 1e-6
    assert_equal: bool = False


@dataclass(frozen=True)
class MetricComparison:
    """Hold one metric at the common steps. Every array has shape (n_steps,).

    ``limit`` is the largest difference that passes. ``same`` is True for bit-identical values, and for printed values
    that agree in every digit. ``relative`` is |baseline - candidate| / |baseline|; NaN if either side is not finite.
    """

    name: str
    steps: Steps
    baseline: Floats
    candidate: Floats
    limit: Floats
    relative: Floats
    same: Bools
    within: Bools

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


def compare_metric(
    name: str, steps: Steps, baseline: Curve, candidate: Curve, tolerance: Tolerance
) -> MetricComparison:
    """Compare the metric ``name`` at ``steps`` (n_steps,)."""
    pairs = [(baseline.metrics[name][int(step)], candidate.metrics[name][int(step)]) for step in steps]
    ours = np.array([point.value for point, _ in pairs], dtype=np.float64)
    theirs = np.array([point.value for _, point in pairs], dtype=np.float64)
    # The maximum, not the sum. Rounding is monotonic, so equal values print equal digits. A value printed with more and
    # with fewer digits is within half a unit of the coarser one.
    resolution = np.array([max(point.resolution for point in pair) for pair in pairs], dtype=np.float64)

    finite = np.isfinite(ours) & np.isfinite(theirs)
    with np.errstate(invalid="ignore", divide="ignore", over="ignore"):
        difference = np.abs(ours - theirs)
        relative = np.where(difference == 0, 0.0, difference / np.abs(ours))
        relative[~finite] = np.nan
        allowed = np.zeros_like(ours) if tolerance.assert_equal else tolerance.atol + tolerance.rtol * np.abs(ours)
    same = np.where(resolution > 0, difference <= resolution, ours.view(np.int64) == theirs.view(np.int64))
    # NaN and infinity are never within tolerance, not even of themselves: their difference is not defined.
    within = finite & (same if tolerance.assert_equal else same | (difference <= allowed))
    return MetricComparison(name, steps, ours, theirs, np.maximum(allowed, resolution), relative, same, within)
