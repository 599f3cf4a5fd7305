"""Write the comparison as report.json, report.md and comparison.png."""

from __future__ import annotations

import json
import math
import os
from pathlib import Path
from typing import Any

import numpy as np

from torchtitan_npu.errors import one_line

from .comparison import Comparison
from .diagnosis import Pattern
from .metrics import MetricComparison
from .plot import draw

REPORT_FILES = ("report.json", "report.md", "comparison.png")
# Rows before and after the first diverging step in report.md. report.json has all steps.
CONTEXT = 3


def write_report(comparison: Comparison, out: Path) -> None:
    """Write the three files to ``out``. All are complete before the first one gets its final name."""
    contents = (_as_json(comparison).encode(), _as_markdown(comparison).encode(), draw(comparison))
    out.mkdir(parents=True, exist_ok=True)
    finished = []
    for name, content in zip(REPORT_FILES, contents, strict=True):
        temporary = out / f".{name}.part"
        temporary.write_bytes(content)
        finished.append((temporary, out / name))
    for temporary, final in finished:
        os.replace(temporary, final)


def summary_lines(comparison: Comparison) -> list[str]:
    """Return the console summary: the verdict, the metrics, the patterns and the notes."""
    lines = [comparison.headline]
    for metric in comparison.metrics:
        lines.append(f"  {metric.name}: {len(metric.steps)} steps, {_describe_largest(metric)}")
    for patterns in _by_name(comparison.patterns):
        lines.extend(f"  {pattern.name} ({pattern.metric}): {pattern.what}" for pattern in patterns)
        lines.append(f"    {patterns[0].means}")
        lines.append(f"    Check: {patterns[0].check}")
    lines.extend(f"  note: {one_line(note)}" for note in comparison.notes)
    return lines


def _describe_largest(metric: MetricComparison) -> str:
    if metric.largest is None:
        return "no step with two finite values"
    relative, step = metric.largest
    where = " where both are finite" if np.isnan(metric.relative).any() else ""
    return (f"largest relative difference {relative:.2e} at step {step}" if relative > 0 else "no difference") + where


def _by_name(patterns: list[Pattern]) -> list[list[Pattern]]:
    """Group patterns by name, in order of appearance. Patterns of one name share their advice."""
    grouped: dict[str, list[Pattern]] = {}
    for pattern in patterns:
        grouped.setdefault(pattern.name, []).append(pattern)
    return list(grouped.values())


def _as_json(comparison: Comparison) -> str:
    tolerance = comparison.tolerance
    content = {
        "verdict": comparison.verdict,
        "passed": comparison.passed,
        "first_diverging_step": comparison.first_diverging_step,
        "baseline": {"source": comparison.baseline.source, "kind": comparison.baseline.kind},
        "candidate": {"source": comparison.candidate.source, "kind": comparison.candidate.kind},
        "rtol": None if tolerance.assert_equal else tolerance.rtol,
        "atol": None if tolerance.assert_equal else tolerance.atol,
        "assert_equal": tolerance.assert_equal,
        "patterns": [vars(pattern) for pattern in comparison.patterns],
        "notes": [one_line(note) for note in comparison.notes],
        "metrics": {metric.name: _metric_as_json(metric) for metric in comparison.metrics},
    }
    return json.dumps(content, indent=1, allow_nan=False) + "\n"


def _metric_as_json(metric: MetricComparison) -> dict[str, Any]:
    relative, step = metric.largest or (math.nan, None)
    return {
        "first_diverging_step": metric.first_diverging_step,
        "largest_relative_difference": _json_number(relative),
        "largest_relative_difference_step": step,
        "step": metric.steps.tolist(),
        "baseline": [_json_number(value) for value in metric.baseline],
        "candidate": [_json_number(value) for value in metric.candidate],
        "relative_difference": [_json_number(value) for value in metric.relative],
        "within_tolerance": metric.within.tolist(),
    }


def _json_number(value: float) -> float | str:
    """Write NaN and infinity as strings, which JSON lacks and ``sources`` reads back."""
    return float(value) if math.isfinite(value) else str(float(value))


def _as_markdown(comparison: Comparison) -> str:
    tolerance = comparison.tolerance
    rule = (
        "bit-identical"
        if tolerance.assert_equal
        else f"|baseline - candidate| <= {tolerance.atol:g} + {tolerance.rtol:g} * |baseline|"
    )
    lines = [
        f"# Loss comparison: {comparison.headline}",
        "",
        f"- baseline: `{comparison.baseline.source}` ({comparison.baseline.kind})",
        f"- candidate: `{comparison.candidate.source}` ({comparison.candidate.kind})",
        f"- required at each step: `{rule}`",
        *(f"- {one_line(note)}" for note in comparison.notes),
        "",
        "![both curves and their relative difference](comparison.png)",
        "",
        "| metric | steps | largest relative difference | at step | first diverging step |",
        "|---|---|---|---|---|",
    ]
    for metric in comparison.metrics:
        relative, step = metric.largest or (math.nan, None)
        first = metric.first_diverging_step
        cells = [metric.name, len(metric.steps), f"{relative:.2e}", _or_dash(step), _or_dash(first)]
        lines.append(_row(cells))
    for patterns in _by_name(comparison.patterns):
        lines += ["", f"## Pattern: {patterns[0].name}", ""]
        lines += [f"- {pattern.metric}: {pattern.what}" for pattern in patterns]
        lines += ["", patterns[0].means, "", f"Check next: {patterns[0].check}"]
    if comparison.first_diverging_step is not None:
        lines += ["", f"## Around step {comparison.first_diverging_step}"]
        for metric in comparison.metrics:
            lines += ["", *_table_around(metric, comparison.first_diverging_step)]
    return "\n".join(lines) + "\n"


def _table_around(metric: MetricComparison, step: int) -> list[str]:
    """Return table rows of one metric near ``step``."""
    lines = [
        f"| step | {metric.name}, baseline | {metric.name}, candidate | relative difference | |",
        "|---|---|---|---|---|",
    ]
    middle = int(np.searchsorted(metric.steps, step))
    for index in range(max(0, middle - CONTEXT), min(len(metric.steps), middle + CONTEXT + 1)):
        values = [f"{metric.baseline[index]:.9g}", f"{metric.candidate[index]:.9g}", f"{metric.relative[index]:.2e}"]
        lines.append(_row([metric.steps[index], *values, "" if metric.within[index] else "out"]))
    return lines


def _row(cells: list[Any]) -> str:
    return "| " + " | ".join(str(cell) for cell in cells) + " |"


def _or_dash(step: int | None) -> str:
    return "-" if step is None else str(step)
