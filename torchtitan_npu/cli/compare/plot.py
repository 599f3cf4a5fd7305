"""Plot the curves of all runs and, below them, the relative differences from the baseline on a log scale."""

from __future__ import annotations

import io
import itertools
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from torchtitan_npu.cli.compare.comparison import (
    Comparison,
    MetricComparison,
    Tolerance,
    candidate_names,
    headline,
)
from torchtitan_npu.cli.compare.sources import GRAD_NORM, LOSS, METRICS

if TYPE_CHECKING:
    from matplotlib.axes import Axes

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
