"""The largest allowed differences, and which rows of a table exceed them."""

from __future__ import annotations

import math
from typing import Any

THRESHOLDS = {"loss": 1e-5, "gradient norm": 1e-4}
"""Relative differences in float32. Layouts use the norm computed in float64, see ``Curve``."""
PERTURBED = "none, weights off by one in the last place"
"""The row without converters whose initial weights differ by one ulp: it shows how far rounding errors grow."""


def find_failures(rows: list[dict[str, Any]], dtype: str = "float32") -> list[str]:
    """Return a line for each value above its threshold (float32 only) and each value that is not finite."""
    failures = []
    for row in rows:
        where = f"{row['model']}, {row.get('layout') or row['converters']}"
        thresholds = THRESHOLDS if dtype == "float32" and row.get("converters") != PERTURBED else {}
        for what, value in row.items():
            if not isinstance(value, float):
                continue
            threshold = next(
                (threshold for metric, threshold in thresholds.items() if what.startswith(metric)), math.inf
            )
            if not math.isfinite(value):
                failures.append(f"{where}: {what} {value} is not finite")
            elif value > threshold:
                failures.append(f"{where}: {what} {value:.1e} is above {threshold:g}")
    return failures
