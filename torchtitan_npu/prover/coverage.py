"""Count which values and pairs of values the draws had."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from torchtitan_npu.prover.draws import VALUES, Draw, Draws, pairs
from torchtitan_npu.prover.proof import Outcome

SAMPLES = 4000
"""Random draws from which the possible pairs are collected."""


def coverage_table(results: Iterable[tuple[Draw, Outcome]]) -> str:
    """Return a Markdown table: for each value, how many draws ran, and in parentheses how many were refused."""
    ran: Counter[tuple[str, object]] = Counter()
    refused: Counter[tuple[str, object]] = Counter()
    for draw, outcome in results:
        (refused if outcome.status == "refused" else ran).update(draw.items())
    lines = ["| part | draws that ran (refused) |", "|---|---|"]
    for part in ("model", *VALUES):
        values = [value for name, value in {**ran, **refused} if name == part and value is not None]
        order = VALUES.get(part, tuple(sorted(map(str, values))))
        cells = []
        for value in order:
            key = (part, value)
            if ran[key] or refused[key]:
                cells.append(f"{label(value)}: {ran[key]}" + (f" ({refused[key]})" if refused[key] else ""))
        lines.append(f"| {part} | {', '.join(cells)} |")
    return "\n".join(lines)


def label(value: object) -> str:
    names = {"": "contiguous", True: "on", False: "off"}
    return names[value] if isinstance(value, (bool, str)) and value in names else str(value)


def pair_coverage(draws: Draws, results: Iterable[tuple[Draw, Outcome]]) -> tuple[int, int]:
    """Return how many pairs of values ran, and how many are possible: a sample of random draws has them."""
    ran = {pair for draw, outcome in results if outcome.status != "refused" for pair in pairs(draw)}
    possible = {pair for _ in range(SAMPLES) for pair in pairs(draws.candidate())}
    return len(ran), len(possible | ran)
