"""Describe the choices that a replayed candidate would have made differently."""

from __future__ import annotations

from .curves import Curve
from .tensorboard_events import REPLAY

KINDS = ("experts", "keys")


def flipped_choices(candidate: Curve) -> list[str]:
    """Return how many choices of each kind a replayed ``candidate`` would have made differently, a line each."""
    lines = []
    for kind in KINDS:
        steps = candidate.metrics.get(f"{REPLAY}flipped_{kind}")
        if not steps:
            continue
        total = sum(point.value for point in candidate.metrics[f"{REPLAY}{kind}"].values())
        flipped = sum(point.value for point in steps.values())
        line = f"replay: of {total:.0f} {kind} the candidate would have chosen {flipped:.0f} differently"
        if flipped:
            first = min(step for step, point in steps.items() if point.value)
            line += f", first in step {first} ({_by_layer(candidate, kind)})"
        lines.append(line)
    return lines


def _by_layer(candidate: Curve, kind: str) -> str:
    prefix = f"{REPLAY}flipped_{kind}/layer_"
    sums = {
        int(name.removeprefix(prefix)): sum(point.value for point in points.values())
        for name, points in candidate.metrics.items()
        if name.startswith(prefix)
    }
    return ", ".join(f"layer {layer}: {flipped:.0f}" for layer, flipped in sorted(sums.items()) if flipped)
