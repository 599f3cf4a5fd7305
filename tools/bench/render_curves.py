"""The loss curves of eager and fused runs in the docs: how far from each other they are, and a picture."""

from __future__ import annotations

import statistics
from itertools import combinations, product
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
from tables import Numbers, not_measured, table

CURVES = {
    "eager": "eager",
    "absorbed": "eager, latent vectors",
    "nudged 1": "eager, nudged",
    "nudged 2": "eager, nudged again",
    "fused": "fused",
    "fused 1": "fused, nudged",
    "fused 2": "fused, nudged again",
    "fused 3": "fused, nudged once more",
}
LINES = {"fused": "-", "fused 1": "--", "fused 2": "-.", "fused 3": ":"}
"""How the fused ones are drawn."""


def losses_of(numbers: Numbers) -> dict[str, list[float]]:
    return {row["variant"]: row["losses"] for row in numbers["rows"] if "losses" in row}


def apart(one: list[float], other: list[float]) -> list[float]:
    """How far two runs are from each other at each step, relative to what is between them."""
    return [2 * abs(a - b) / (a + b) for a, b in zip(one, other, strict=True)]


def comparable(losses: dict[str, list[float]]) -> bool:
    """There is the run that the picture is relative to, and another one."""
    return "eager" in losses and len(losses) > 1


def curves(numbers: Numbers) -> str:
    losses = losses_of(numbers)
    failed = {row["variant"]: f" ({row['failed']})" for row in numbers["rows"] if "failed" in row}
    missing = not_measured([CURVES[name] + failed.get(name, "") for name in CURVES if name not in losses])
    if not comparable(losses):
        return "\n\n".join(missing)
    fused = [name for name in losses if name.startswith("fused")]
    eager = [name for name in losses if name not in fused]
    pairs = {
        "two eager runs": list(combinations(eager, 2)),
        "two fused runs": list(combinations(fused, 2)),
        "an eager run and a fused one": list(product(eager, fused)),
    }
    rows = []
    for what, of_pairs in pairs.items():
        distances = [apart(losses[one], losses[other]) for one, other in of_pairs]
        if distances:
            far = [max(each) for each in distances]
            mean = statistics.mean(map(statistics.mean, distances))
            rows.append([what, str(len(distances)), f"{mean:.1e}", f"{min(far):.1e} to {max(far):.1e}"])
    head = ["", "pairs", "apart in the mean", "farthest over the steps"]
    picture = "![losses of the runs, and how far they are from the first](images/performance_curves.png)"
    return "\n\n".join([table(head, rows), *by_chance(losses, fused), *missing, picture])


def by_chance(losses: dict[str, list[float]], fused: list[str]) -> list[str]:
    """How often runs that are divided into two halves whatever they are would be as far apart as eager and fused."""
    if 2 * len(fused) != len(losses):
        return []
    distance = {
        frozenset(pair): statistics.mean(apart(*(losses[name] for name in pair))) for pair in combinations(losses, 2)
    }

    def across(half: tuple[str, ...]) -> float:
        others = [name for name in losses if name not in half]
        return statistics.mean(distance[frozenset(pair)] for pair in product(half, others))

    halves = [half for half in combinations(losses, len(fused)) if fused[0] in half]
    as_far = sum(across(half) >= across(tuple(fused)) for half in halves)
    ways = f"Of the {len(halves)} ways to divide these runs into two halves, this one among them"
    return [f"{ways}, {as_far} leave them as far apart in the mean as eager and fused ones are, or farther."]


def curves_picture(losses: dict[str, list[float]], file: Path) -> None:
    steps = range(1, len(losses["eager"]) + 1)
    figure, (left, right) = plt.subplots(1, 2, figsize=(11, 4))
    for place, name in enumerate(losses):
        fused = {"color": "black", "linestyle": LINES.get(name)}
        style: Any = fused if name in LINES else {"color": f"C{place}"}  # one colour a run in both
        left.plot(steps, losses[name], label=CURVES[name], **style)
        if name != "eager":
            distances = apart(losses[name], losses["eager"])
            right.semilogy(steps, [max(d, 1e-9) for d in distances], label=CURVES[name], **style)
    left.set(xlabel="step", ylabel="loss")
    right.set(xlabel="step", ylabel="relative distance from eager")
    left.legend()
    figure.tight_layout()
    figure.savefig(file, dpi=110)
    plt.close(figure)
