"""How near two curves should be, and which rows of a table miss it."""

from __future__ import annotations

import math
from typing import Any

GOALS = {"loss": 1e-5, "gradient norm": 1e-4}
"""In float32. For layouts, of the norm in float64: what is reported is rounded by as much on a CPU, see ``Curve``."""
NUDGED = "none, weights off by one in the last place"
"""What the row is called that shows how far a rounding grows: that of a model without converters."""


def missed(rows: list[dict[str, Any]], dtype: str = "float32") -> list[str]:
    """What in ``rows`` is farther off than it should be, in float32, or no finite number, in any dtype."""
    failures = []
    for row in rows:
        where = f"{row['model']}, {row.get('layout') or row['converters']}"
        goals = GOALS if dtype == "float32" and row.get("converters") != NUDGED else {}
        for what, value in row.items():
            if not isinstance(value, float):
                continue
            goal = next((goal for metric, goal in goals.items() if what.startswith(metric)), math.inf)
            if not math.isfinite(value):
                failures.append(f"{where}: {what} {value} is no finite number")
            elif value > goal:
                failures.append(f"{where}: {what} {value:.1e} is above {goal:g}")
    return failures
