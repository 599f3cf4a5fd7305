"""Write the comparison as report.html, report.md, report.json and comparison.png."""

from __future__ import annotations

import json
import math
import os
from pathlib import Path
from typing import Any

import numpy as np

from torchtitan_npu.errors import one_line

from .comparison import Comparison, candidate_names, headline
from .configuration import differing_keys
from .diagnosis import Pattern
from .document import Block, Cell, Code, Heading, Items, Paragraph, Picture, Table, to_html, to_markdown
from .environment import describe_environment
from .metrics import MetricComparison
from .plot import draw

PICTURE = "comparison.png"
REPORT_FILES = ("report.json", "report.md", "report.html", PICTURE)
# Rows before and after the first diverging step in the tables. report.json has all steps.
CONTEXT = 3


def write_report(comparisons: list[Comparison], out: Path, command: str = "") -> None:
    """Write the files to ``out``. All are complete before the first one gets its final name.

    All ``comparisons`` have the same baseline. ``command`` is the command line that made them.
    """
    environment = describe_environment() | ({"command": command} if command else {})
    picture = draw(comparisons)
    title = f"Loss comparison: {headline(comparisons)}"
    passed = all(comparison.passed for comparison in comparisons)
    blocks = _blocks(comparisons, picture, environment)
    contents = (
        _as_json(comparisons, environment).encode(),
        to_markdown(title, blocks).encode(),
        to_html(title, passed, blocks).encode(),
        picture,
    )
    out.mkdir(parents=True, exist_ok=True)
    finished = []
    for name, content in zip(REPORT_FILES, contents, strict=True):
        temporary = out / f".{name}.part"
        temporary.write_bytes(content)
        finished.append((temporary, out / name))
    for temporary, final in finished:
        os.replace(temporary, final)


def summary_lines(comparisons: list[Comparison]) -> list[str]:
    """Return the console summary: the verdict, the metrics, the patterns and the notes of each candidate."""
    lines = [headline(comparisons)]
    for name, comparison in zip(candidate_names(comparisons), comparisons, strict=True):
        if len(comparisons) > 1:
            lines.append(f"{name} ({comparison.candidate.source}): {comparison.headline}")
        lines += _summary(comparison)
    return lines


def _summary(comparison: Comparison) -> list[str]:
    lines = []
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


def _as_json(comparisons: list[Comparison], environment: dict[str, str]) -> str:
    baseline, tolerance = comparisons[0].baseline, comparisons[0].tolerance
    content = {
        "passed": all(comparison.passed for comparison in comparisons),
        "baseline": {"source": baseline.source, "kind": baseline.kind},
        "rtol": None if tolerance.assert_equal else tolerance.rtol,
        "atol": None if tolerance.assert_equal else tolerance.atol,
        "assert_equal": tolerance.assert_equal,
        "candidates": [
            {
                "source": comparison.candidate.source,
                "kind": comparison.candidate.kind,
                "verdict": comparison.verdict,
                "passed": comparison.passed,
                "first_diverging_step": comparison.first_diverging_step,
                "patterns": [vars(pattern) for pattern in comparison.patterns],
                "notes": [one_line(note) for note in comparison.notes],
                "metrics": {metric.name: _metric_as_json(metric) for metric in comparison.metrics},
            }
            for comparison in comparisons
        ],
        "differing_configuration": _differing_configuration(comparisons),
        "environment": {name: one_line(value) for name, value in environment.items()},
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


def _differing_configuration(comparisons: list[Comparison]) -> dict[str, list[str]] | None:
    """Return the values of the baseline and of each candidate by key, or None if a configuration is not known."""
    sides = [comparisons[0].baseline, *(comparison.candidate for comparison in comparisons)]
    known = [side.configuration for side in sides if side.configuration is not None]
    return differing_keys(known) if len(known) == len(sides) else None


def _blocks(comparisons: list[Comparison], picture: bytes, environment: dict[str, str]) -> list[Block]:
    baseline, tolerance = comparisons[0].baseline, comparisons[0].tolerance
    names = candidate_names(comparisons)
    pairs = list(zip(names, comparisons, strict=True))
    rule = "bit-identical values"
    if not tolerance.assert_equal:
        rule = f"a difference of at most {tolerance.atol:g} + {tolerance.rtol:g} × |baseline|"
    runs: list[list[Cell]] = [["baseline", Code(baseline.source), baseline.kind, None]]
    runs += [[name, Code(each.candidate.source), each.candidate.kind, each.headline] for name, each in pairs]
    blocks: list[Block] = [
        Table(["run", "source", "read as", "verdict"], runs),
        Paragraph(f"Required at each step: {rule}."),
        Picture(PICTURE, "the curves of all runs and their relative difference from the baseline", picture),
        Table(
            ["run", "metric", "steps", "largest relative difference", "at step", "first diverging step"],
            [_metric_row(name, metric) for name, each in pairs for metric in each.metrics],
        ),
    ]
    if notes := list(dict.fromkeys(note for each in comparisons for note in each.notes)):
        blocks += [Heading("Notes"), Items(notes)]
    for name, each in pairs:
        blocks += _findings(name.capitalize(), each)
    blocks += [Heading("Configuration"), _configuration(comparisons, names)]
    rows: list[list[Cell]] = [[key, Code(value)] for key, value in environment.items()]
    return [*blocks, Heading("Environment of this comparison"), Table(["name", "value"], rows)]


def _metric_row(name: str, metric: MetricComparison) -> list[Cell]:
    relative, step = metric.largest or (math.nan, None)
    where = step if relative else None
    return [name, metric.name, len(metric.steps), f"{relative:.2e}", where, metric.first_diverging_step]


def _findings(name: str, comparison: Comparison) -> list[Block]:
    """Return the patterns of one candidate and its values around the first diverging step."""
    blocks: list[Block] = []
    for patterns in _by_name(comparison.patterns):
        blocks += [
            Heading(f"{name}: {patterns[0].name}"),
            Items([f"{pattern.metric}: {pattern.what}" for pattern in patterns]),
            Paragraph(patterns[0].means),
            Paragraph(f"Check next: {patterns[0].check}"),
        ]
    if comparison.first_diverging_step is not None:
        blocks.append(Heading(f"{name}: around step {comparison.first_diverging_step}"))
        blocks += [_table_around(metric, comparison.first_diverging_step) for metric in comparison.metrics]
    return blocks


def _table_around(metric: MetricComparison, step: int) -> Table:
    """Return the values of one metric near ``step``."""
    middle = int(np.searchsorted(metric.steps, step))
    rows: list[list[Cell]] = []
    for index in range(max(0, middle - CONTEXT), min(len(metric.steps), middle + CONTEXT + 1)):
        values = [f"{metric.baseline[index]:.9g}", f"{metric.candidate[index]:.9g}", f"{metric.relative[index]:.2e}"]
        rows.append([int(metric.steps[index]), *values, "" if metric.within[index] else "out"])
    return Table(["step", f"{metric.name}, baseline", f"{metric.name}, candidate", "relative difference", ""], rows)


def _configuration(comparisons: list[Comparison], names: list[str]) -> Block:
    differing = _differing_configuration(comparisons)
    if differing is None:
        return Paragraph(
            "Not known for every run. TorchTitan saves it in the run folder if `job.save_config_file` names a file."
        )
    if not differing:
        return Paragraph("The runs have the same configuration.")
    rows: list[list[Cell]] = [[Code(key), *map(Code, values)] for key, values in differing.items()]
    return Table(["differing key", "baseline", *names], rows)
