"""Write the comparison as report.html, report.md, report.json and comparison.png."""

from __future__ import annotations

import base64
import importlib.metadata
import json
import math
import os
import platform
import re
from pathlib import Path
from typing import Any

import numpy as np

from torchtitan_npu.cli.compare.comparison import Comparison, MetricComparison, candidate_names, headline
from torchtitan_npu.cli.compare.plot import draw
from torchtitan_npu.errors import one_line

PICTURE = "comparison.png"
REPORT_FILES = ("report.json", "report.md", "report.html", PICTURE)
PACKAGES = ("torchtitan-npu", "torchtitan", "torch", "torch-npu", "torchao", "triton", "numpy")
CONTEXT = 3
"""Rows before and after the first diverging step in the tables. report.json has all steps."""


def write_report(comparisons: list[Comparison], out: Path, command: str = "") -> None:
    """Write the files to ``out``. All are complete before the first one gets its final name.

    All ``comparisons`` have the same baseline. ``command`` is the command line that made them.
    """
    from jinja2 import Environment, FileSystemLoader, StrictUndefined

    environment = describe_environment() | ({"command": command} if command else {})
    configuration = _differing_configuration(comparisons)
    picture = draw(comparisons)
    templates = Environment(
        loader=FileSystemLoader(Path(__file__).parent),
        autoescape=lambda name: name is not None and name.startswith("report.html"),
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    templates.filters |= {"one_line": one_line, "markdown": markdown, "markdown_code": markdown_code}
    content = {
        "headline": headline(comparisons),
        "passed": all(comparison.passed for comparison in comparisons),
        "named": list(zip(candidate_names(comparisons), comparisons, strict=True)),
        "baseline": comparisons[0].baseline,
        "tolerance": comparisons[0].tolerance,
        "picture": base64.b64encode(picture).decode(),
        "notes": list(dict.fromkeys(note for each in comparisons for note in each.notes)),
        "rows_around": rows_around,
        "configuration": configuration,
        "environment": environment,
    }
    contents = (
        _as_json(comparisons, configuration, environment).encode(),
        templates.get_template("report.md.jinja").render(content).encode(),
        templates.get_template("report.html.jinja").render(content).encode(),
        picture,
    )
    out.mkdir(parents=True, exist_ok=True)
    finished = []
    for name, data in zip(REPORT_FILES, contents, strict=True):
        temporary = out / f".{name}.part"
        temporary.write_bytes(data)
        finished.append((temporary, out / name))
    for temporary, final in finished:
        os.replace(temporary, final)


def summary_lines(comparisons: list[Comparison]) -> list[str]:
    """Return the console summary: the verdict, the metrics, the patterns and the notes of each candidate."""
    lines = [headline(comparisons)]
    for name, comparison in zip(candidate_names(comparisons), comparisons, strict=True):
        if len(comparisons) > 1:
            lines.append(f"{name} ({comparison.candidate.source}): {comparison.headline}")
        for metric in comparison.metrics:
            lines.append(f"  {metric.name}: {len(metric.steps)} steps, {_describe_largest(metric)}")
        for patterns in comparison.patterns_by_name:
            lines.extend(f"  {pattern.name} ({pattern.metric}): {pattern.what}" for pattern in patterns)
            lines += [f"    {patterns[0].means}", f"    Check: {patterns[0].check}"]
        lines.extend(f"  note: {one_line(note)}" for note in comparison.notes)
    return lines


def _describe_largest(metric: MetricComparison) -> str:
    if metric.largest is None:
        return "no step with two finite values"
    relative, step = metric.largest
    where = " where both are finite" if np.isnan(metric.relative).any() else ""
    return (f"largest relative difference {relative:.2e} at step {step}" if relative > 0 else "no difference") + where


def rows_around(metric: MetricComparison, step: int) -> list[tuple[int, str, str, str, str]]:
    """Return step, baseline, candidate, relative difference and "out" near ``step``."""
    middle = int(np.searchsorted(metric.steps, step))
    return [
        (
            int(metric.steps[index]),
            f"{metric.baseline[index]:.9g}",
            f"{metric.candidate[index]:.9g}",
            f"{metric.relative[index]:.2e}",
            "" if metric.within[index] else "out",
        )
        for index in range(max(0, middle - CONTEXT), min(len(metric.steps), middle + CONTEXT + 1))
    ]


def markdown(text: object) -> str:
    """Return ``text`` for a line or a table cell of Markdown. None is a dash."""
    return "-" if text is None else one_line(text).replace("<", "&lt;").replace("|", "\\|")


def markdown_code(text: object) -> str:
    """Return ``text`` as code in Markdown, with more backticks around it than it contains."""
    content = one_line(text).replace("|", "\\|")
    fence = "`" * (1 + max((len(run) for run in re.findall("`+", content)), default=0))
    return f"{fence} {content} {fence}" if len(fence) > 1 else f"`{content}`"


def describe_environment() -> dict[str, str]:
    """Return the machine and the installed versions, without importing torch."""
    versions = {}
    for package in PACKAGES:
        try:
            versions[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            versions[package] = "not installed"
    machine = f"{platform.machine()}, {os.cpu_count()} CPU cores"
    return {"system": platform.platform(), "machine": machine, "python": platform.python_version(), **versions}


def _differing_configuration(comparisons: list[Comparison]) -> dict[str, list[str]] | None:
    """Return the values of the baseline and of each candidate by key, or None if a configuration is not known."""
    sides = [comparisons[0].baseline, *(comparison.candidate for comparison in comparisons)]
    known = [side.configuration for side in sides if side.configuration is not None]
    if len(known) < len(sides):
        return None
    keys = dict.fromkeys(key for configuration in known for key in configuration)
    values = {key: [configuration.get(key, "(absent)") for configuration in known] for key in keys}
    return {key: each for key, each in values.items() if len(set(each)) > 1}


def _as_json(
    comparisons: list[Comparison], configuration: dict[str, list[str]] | None, environment: dict[str, str]
) -> str:
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
        "differing_configuration": configuration,
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
