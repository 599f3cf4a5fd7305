"""Write the comparison as report.html, report.md, report.json and comparison.png.

The picture has the curves of all runs and, below them, the relative differences from the baseline on a log scale.
"""

from __future__ import annotations

import base64
import importlib.metadata
import io
import itertools
import json
import math
import os
import platform
import re
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from torchtitan_npu.cli.compare.comparison import Comparison, MetricComparison, Tolerance, candidate_names, headline
from torchtitan_npu.cli.compare.sources import GRAD_NORM, LOSS, METRICS
from torchtitan_npu.errors import one_line

if TYPE_CHECKING:
    from matplotlib.axes import Axes

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


WIDTH, DPI = 9.0, 100  # inches, dots per inch
HEIGHTS = {LOSS: 2.5, GRAD_NORM: 1.5, "difference": 1.9}
OTHER_HEIGHT, MARGINS = 1.5, 1.5
LABELS = {LOSS: "loss", GRAD_NORM: "gradient norm", "indexer_loss": "indexer loss", "mtp_loss": "MTP loss"}
BASELINE, PASSED, FAILED, GREY = "#4c78a8", "#2e7d32", "#c62828", "0.35"
METRIC_COLOURS = {LOSS: "#3b3b6d", GRAD_NORM: "#4c9f70", "indexer_loss": "#b07aa1", "mtp_loss": "#c49a3a"}
METRIC_MARKERS = {LOSS: "o", GRAD_NORM: "s", "indexer_loss": "D", "mtp_loss": "^"}
CANDIDATE_COLOURS = ("#e4572e", "#4c9f70", "#8e5ea2", "#c49a3a", "#2a9d9d", "#3b3b6d")
CANDIDATE_MARKERS = ("o", "s", "^", "D", "v")
DOTTED: dict[str, Any] = {"linewidth": 1.2, "linestyle": (0, (1, 1.2))}
DECADES = 100.0
"""Larger powers of ten are not drawn: the ticks of the axes overflow."""
MOST_MARKERS = 60
"""With more steps, markers would overlap."""


@dataclass(frozen=True)
class Line:
    """One line of a panel."""

    label: str
    colour: str
    marker: str
    metric: MetricComparison


def draw(comparisons: list[Comparison]) -> bytes:
    """Return the plot as PNG: a panel per metric with all runs, and below them the differences from the baseline.

    The differences of one candidate share a panel. Those of several candidates have a panel per metric.
    """
    from matplotlib.figure import Figure  # takes a second; without pyplot it sets no backend and no global state

    styles = itertools.cycle(itertools.product(CANDIDATE_MARKERS, CANDIDATE_COLOURS))
    by_metric: dict[str, list[Line]] = {name: [] for name in METRICS}
    for label, comparison, (marker, colour) in zip(candidate_names(comparisons), comparisons, styles, strict=False):
        for metric in comparison.metrics:
            by_metric[metric.name].append(Line(label, colour, marker, metric))
    by_metric = {name: lines for name, lines in by_metric.items() if lines}
    if len(comparisons) == 1:
        lines = [
            Line(f"{LABELS[one.name]}, rel. diff.", METRIC_COLOURS[one.name], METRIC_MARKERS[one.name], one)
            for one in comparisons[0].metrics
        ]
        differences = {"relative difference": lines}
    else:
        differences = {f"{LABELS[name]}, rel. diff.": lines for name, lines in by_metric.items()}

    heights = [HEIGHTS.get(name, OTHER_HEIGHT) for name in by_metric] + [HEIGHTS["difference"]] * len(differences)
    figure = Figure((WIDTH, sum(heights) + MARGINS), dpi=DPI, layout="constrained")
    panels = figure.subplots(len(heights), 1, sharex=True, height_ratios=heights)
    for panel, (name, lines) in zip(panels, by_metric.items(), strict=False):
        _draw_curves(panel, lines)
        panel.set_ylabel(LABELS[name])
    tolerance = comparisons[0].tolerance
    for panel, (label, lines) in zip(panels[len(by_metric) :], differences.items(), strict=True):
        _draw_differences(panel, lines, tolerance)
        panel.set_ylabel(label)
    legend: dict[str, Any] = {}
    for panel in panels:
        panel.grid(True, color="0.9", linewidth=0.8)
        panel.set_axisbelow(True)
        panel.spines[["top", "right"]].set_visible(False)
        for step in {each.first_diverging_step for each in comparisons} - {None}:
            panel.axvline(step, color=FAILED, linewidth=1.2, alpha=0.8, zorder=1)
        legend |= dict(zip(*reversed(panel.get_legend_handles_labels()), strict=True))
    panels[-1].set_xlabel("step")
    panels[-1].locator_params(axis="x", integer=True)
    style: dict[str, Any] = {"loc": "outside lower left", "ncols": 4, "frameon": False, "fontsize": 8.5}
    figure.legend(list(legend.values()), list(legend), **style)

    patterns = dict.fromkeys(pattern.name for each in comparisons for pattern in each.patterns)
    verdict = headline(comparisons).split(":")[0] + (f": {', '.join(patterns)}" if patterns else "")
    colour = PASSED if all(each.passed for each in comparisons) else FAILED
    title: dict[str, Any] = {"x": 0.02, "ha": "left", "size": 14, "weight": "bold", "color": colour}
    figure.suptitle(verdict[0].upper() + verdict[1:], **title)
    sources = [f"baseline {_shorten(comparisons[0].baseline.source)}", f"{len(comparisons)} candidates"]
    if len(comparisons) == 1:
        sources[1] = f"candidate {_shorten(comparisons[0].candidate.source)}"
    panels[0].set_title("   |   ".join(sources), loc="left", size=9, color=GREY, parse_math=False)
    png = io.BytesIO()
    # Without the version in the metadata, equal comparisons give equal bytes.
    figure.savefig(png, format="png", metadata={"Software": None})
    return png.getvalue()


def _draw_curves(panel: Axes, lines: list[Line]) -> None:
    """Draw the baseline wide and solid, the candidates dashed on top, so that identical curves are all visible."""
    baseline: dict[int, float] = {}
    for line in lines:
        baseline |= dict(zip(line.metric.steps.tolist(), line.metric.baseline.tolist(), strict=True))
    few = len(baseline) <= MOST_MARKERS
    steps = np.array(sorted(baseline))
    values = _drawable(np.array([baseline[step] for step in steps]))
    style: dict[str, Any] = {"color": BASELINE, "alpha": 0.5, "linewidth": 4, "ms": 5}
    panel.plot(steps, values, marker="o" if few else None, label="baseline", **style)
    for order, line in enumerate(lines):
        style = {"color": line.colour, "marker": line.marker if few else None, "ms": 2.5}
        dashes = (order * 3, (4, 2.5))  # the gaps of one candidate show the next one
        panel.plot(line.metric.steps, _drawable(line.metric.candidate), linestyle=dashes, label=line.label, **style)


def _drawable(values: np.ndarray) -> np.ndarray:
    return np.where(np.abs(values) < 10.0**DECADES, values, np.nan)


def _draw_differences(panel: Axes, lines: list[Line], tolerance: Tolerance) -> None:
    """Draw relative differences on a log scale.

    A log scale has no zero: equal steps are squares on the bottom edge, which is labelled 0. Steps without two finite
    values are crosses on the top edge.
    """
    bottom, top = _limits(lines, tolerance)
    panel.set_yscale("log")
    panel.set_ylim(bottom, top)
    panel.yaxis.minorticks_off()
    any_equal = any_infinite = False
    for order, line in enumerate(lines):
        metric = line.metric
        equal, infinite = metric.relative == 0, ~np.isfinite(metric.relative)
        size = 4 if len(metric.steps) <= MOST_MARKERS else 1.5
        values = np.where(equal | infinite, np.nan, metric.relative)
        panel.plot(
            metric.steps, values, color=line.colour, marker=line.marker, ms=size, linewidth=1.2, label=line.label
        )
        # Several lines may share an edge: smaller markers are drawn on top of larger ones.
        edge: dict[str, Any] = {"color": line.colour, "linestyle": "none", "clip_on": False, "zorder": 6 - 0.1 * order}
        for selected, level, marker in ((equal, bottom, "s"), (infinite, top, "X")):
            if selected.any():  # a line without points that is not clipped would confuse the layout
                levels = np.full(selected.sum(), level)
                panel.plot(metric.steps[selected], levels, marker=marker, ms=4 + 2 * min(order, 3), **edge)
        any_equal |= bool(equal.any())
        any_infinite |= bool(infinite.any())
        if not tolerance.assert_equal:
            with np.errstate(divide="ignore", invalid="ignore"):
                limit = metric.limit / np.abs(metric.baseline)
            # Extend by half a step on both sides: a single step would have no line.
            around = [metric.steps[0] - 0.5, *metric.steps, metric.steps[-1] + 0.5]
            panel.plot(around, [limit[0], *limit, limit[-1]], color=line.colour, **DOTTED)
    if not tolerance.assert_equal:
        panel.plot([], [], color=GREY, label="tolerance", **DOTTED)
    if any_equal:
        panel.plot([], [], color=GREY, marker="s", linestyle="none", label="no difference")
        panel.annotate("0", (0, 0), (-6, 0), "axes fraction", textcoords="offset points", ha="right", va="center")
    if any_infinite:
        panel.plot([], [], color=GREY, marker="X", linestyle="none", label="NaN or infinite")


def _limits(lines: list[Line], tolerance: Tolerance) -> tuple[float, float]:
    """Return axis limits that contain every difference and the tolerance, with room for the markers on the edges."""
    values = [value for line in lines for value in line.metric.relative if 0 < value < math.inf]
    if 0 < tolerance.rtol < math.inf and not tolerance.assert_equal:
        values.append(tolerance.rtol)
    exponents = [math.log10(value) for value in values] or [-6.0]
    # Show at least three decades: a narrower log scale has no labelled ticks.
    lowest, highest = math.floor(min(exponents)) - 0.8, math.ceil(max(exponents)) + 0.6
    lowest, highest = max(lowest, -DECADES), min(highest, DECADES)
    return 10.0 ** min(lowest, highest - 3.4), 10.0**highest


def _shorten(source: str, most: int = 50) -> str:
    return source if len(source) <= most else "..." + source[3 - most :]
