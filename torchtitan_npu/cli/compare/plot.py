"""Plot the curves of all runs and, below them, the relative differences from the baseline on a log scale."""

from __future__ import annotations

import io
import itertools
import math
from collections.abc import Collection
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from .comparison import Comparison, candidate_names, headline
from .curves import AUXILIARY, GRAD_NORM, LOSS, METRICS
from .metrics import MetricComparison, Tolerance

if TYPE_CHECKING:
    from matplotlib.artist import Artist
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# All lengths in inches. The fixed layout keeps a series of plots comparable.
DPI = 100
WIDTH, LEFT, RIGHT, TOP, BOTTOM, GAP = 9.0, 0.85, 0.25, 0.8, 0.65, 0.25
LEGEND_COLUMNS, LEGEND_ROW = 4, 0.2
HEIGHTS = {LOSS: 2.5, GRAD_NORM: 1.5, **dict.fromkeys(AUXILIARY, 1.5), "difference": 1.9}

_BASELINE = "#4c78a8"
_CANDIDATES = (
    *("#e4572e", "#4c9f70", "#8e5ea2", "#c49a3a", "#2a9d9d", "#3b3b6d"),
    *("#e377c2", "#7a4a21", "#9acd32", "#111111", "#8c8c8c", "#3fa7ff"),
)
# More candidates than colours differ in their markers and the length of their dashes.
_SHAPES = (("o", 4.0), ("s", 1.5), ("^", 8.0))
_DIFFERENCE = {LOSS: "#3b3b6d", GRAD_NORM: "#4c9f70", "indexer_loss": "#b07aa1", "mtp_loss": "#c49a3a"}
_LABELS = {LOSS: "loss", GRAD_NORM: "gradient norm", "indexer_loss": "indexer loss", "mtp_loss": "MTP loss"}
_MARKERS = {LOSS: "o", GRAD_NORM: "s", "indexer_loss": "D", "mtp_loss": "^"}
_PASSED, _FAILED, _GREY = "#2e7d32", "#c62828", "0.35"
_DOTTED: dict[str, Any] = {"linewidth": 1.2, "linestyle": (0, (1, 1.2))}
DECADES = 100.0
"""Larger powers of ten are not drawn: the ticks of the axes overflow."""
# With more steps, markers would overlap.
_MOST_MARKERS = 60
_MOST_EDGE_MARKERS = 20
# Shortest line on the bottom edge: one equal step of thousands would be invisible.
_SHORTEST_LINE = 0.03


@dataclass(frozen=True)
class Series:
    """Hold one line of a panel with differences. ``order`` counts from 0, the line drawn on top."""

    label: str
    colour: str
    marker: str
    order: int
    metric: MetricComparison
    dash: float = 4.0


def draw(comparisons: list[Comparison]) -> bytes:
    """Return the plot as PNG: a panel per metric with all runs, and below them the differences from the baseline.

    The differences of one candidate share a panel. Those of several candidates have a panel per metric. The legend of
    all panels is at the bottom.
    """
    # Imported here: this takes a second, which reading and comparing do not need. A Figure without pyplot sets no
    # backend and no global state.
    from matplotlib.figure import Figure

    by_metric = {name: series for name in METRICS if (series := _candidates(name, comparisons))}
    if len(comparisons) == 1:
        differences = {"relative difference": _metrics(comparisons[0])}
    else:
        differences = {f"{_LABELS[name]}, rel. diff.": series for name, series in by_metric.items()}
    heights = [*(HEIGHTS[name] for name in by_metric), *([HEIGHTS["difference"]] * len(differences))]
    figure = Figure(dpi=DPI)
    panels = figure.subplots(len(heights), 1, sharex=True, height_ratios=heights)
    steps = np.concatenate([metric.steps for each in comparisons for metric in each.metrics])
    panels[-1].set_xlim(steps.min() - 1, steps.max() + 1)
    for panel, (name, series) in zip(panels, by_metric.items(), strict=False):
        _draw_curves(panel, name, series)
    tolerance = comparisons[0].tolerance
    for panel, (label, series) in zip(panels[len(by_metric) :], differences.items(), strict=True):
        _draw_difference(panel, series, tolerance)
        panel.set_ylabel(label)
    panels[-1].set_xlabel("step")
    for panel in panels:
        _style(panel, {step for each in comparisons if (step := each.first_diverging_step) is not None})
    legend: dict[str, Artist] = {}
    for panel in panels:
        for line, label in zip(*panel.get_legend_handles_labels(), strict=True):
            legend.setdefault(label, line)
    bottom = BOTTOM + LEGEND_ROW * math.ceil(len(legend) / LEGEND_COLUMNS)
    height = TOP + sum(heights) + GAP * (len(heights) - 1) + bottom
    figure.set_size_inches(WIDTH, height)
    figure.subplots_adjust(
        left=LEFT / WIDTH,
        right=1 - RIGHT / WIDTH,
        top=1 - TOP / height,
        bottom=bottom / height,
        hspace=GAP / (sum(heights) / len(heights)),
    )
    figure.align_ylabels(panels)
    _draw_legend(figure, legend)
    _write_title(figure, comparisons, height)
    png = io.BytesIO()
    # Without the version in the metadata, equal comparisons give equal bytes.
    figure.savefig(png, format="png", metadata={"Software": None})
    return png.getvalue()


def _metrics(comparison: Comparison) -> list[Series]:
    """Return a line per metric of one candidate."""
    return [
        Series(f"{_LABELS[metric.name]}, rel. diff.", _DIFFERENCE[metric.name], _MARKERS[metric.name], order, metric)
        for order, metric in enumerate(comparison.metrics)
    ]


def _candidates(name: str, comparisons: list[Comparison]) -> list[Series]:
    """Return a line per candidate with the metric ``name``."""
    styles = ((shape, colour) for shape in itertools.cycle(_SHAPES) for colour in _CANDIDATES)
    named = zip(comparisons, candidate_names(comparisons), strict=True)
    return [
        Series(label, colour, marker, order, metric, dash)
        for order, ((comparison, label), ((marker, dash), colour)) in enumerate(zip(named, styles, strict=False))
        for metric in comparison.metrics
        if metric.name == name
    ]


def _draw_curves(panel: Axes, name: str, candidates: list[Series]) -> None:
    """Draw the baseline wide and solid, the candidates dashed on top, so that identical curves are all visible."""
    baseline = {
        int(step): float(value)
        for series in candidates
        for step, value in zip(series.metric.steps, series.metric.baseline, strict=True)
    }
    few = len(baseline) <= _MOST_MARKERS
    steps = np.array(sorted(baseline))
    values = _drawable(np.array([baseline[step] for step in sorted(baseline)]))
    panel.plot(
        steps, values, color=_BASELINE, alpha=0.5, linewidth=4, marker="o" if few else None, ms=5, label="baseline"
    )
    for series in candidates:
        # the gaps of one candidate show the next one
        dashes, values = (series.order * 3, (series.dash, 2.5)), _drawable(series.metric.candidate)
        marker = series.marker if few else None
        style: dict[str, Any] = {"color": series.colour, "linestyle": dashes, "marker": marker, "ms": 2.5}
        panel.plot(series.metric.steps, values, label=series.label, **style)
    panel.set_ylabel(_LABELS[name])


def _drawable(values: np.ndarray) -> np.ndarray:
    return np.where(np.abs(values) < 10.0**DECADES, values, np.nan)


def _draw_difference(panel: Axes, lines: list[Series], tolerance: Tolerance) -> None:
    """Draw relative differences on a log scale.

    A log scale has no zero: equal steps are on the bottom edge, which is labelled 0, as hollow markers or, if there are
    many, as a line. Steps without two finite values are crosses on the top edge.
    """
    bottom, top = _limits(lines, tolerance)
    panel.set_yscale("log")
    panel.set_ylim(bottom, top)
    panel.yaxis.minorticks_off()
    zero_marker = zero_line = infinite = False
    for line in lines:
        metric, colour = line.metric, line.colour
        zero, no_number = metric.relative == 0, ~np.isfinite(metric.relative)
        size = 4 if len(metric.steps) <= _MOST_MARKERS else 1.5
        shown = np.where(zero | no_number, np.nan, metric.relative)
        panel.plot(metric.steps, shown, color=colour, marker=line.marker, ms=size, lw=1.2, label=line.label)
        drawn = np.concatenate([[False], np.isfinite(shown), [False]])
        alone = drawn[1:-1] & ~drawn[:-2] & ~drawn[2:]  # a point without a line to it
        panel.plot(metric.steps[alone], shown[alone], color=colour, marker=line.marker, ms=4, linestyle="none")
        # Several lines may share an edge: smaller markers are drawn on top of larger ones.
        edge: dict[str, Any] = {"color": colour, "clip_on": False, "zorder": 6 - 0.1 * line.order}
        marks = edge | {"linestyle": "none", "ms": 4.0 + 3.7 * min(line.order, 3)}
        if zero.sum() > _MOST_EDGE_MARKERS:
            _plot_runs(panel, metric.steps, zero, bottom, linewidth=1.5 + 2.5 * min(line.order, 3), **edge)
            zero_line = True
        elif zero.any():
            _plot_level(panel, metric.steps[zero], bottom, marker=line.marker, markerfacecolor="white", **marks)
            zero_marker = True
        _plot_level(panel, metric.steps[no_number], top, marker="X", **marks)
        infinite |= bool(no_number.any())
        if not tolerance.assert_equal:
            with np.errstate(divide="ignore", invalid="ignore"):
                limit = metric.limit / np.abs(metric.baseline)
            # Extend by half a step on both sides: a single step would have no line.
            around = [metric.steps[0] - 0.5, *metric.steps, metric.steps[-1] + 0.5]
            panel.plot(around, [limit[0], *limit, limit[-1]], color=colour, **_DOTTED)
    if not tolerance.assert_equal:
        panel.plot([], [], color=_GREY, label="tolerance", **_DOTTED)
    if zero_marker:
        hollow: dict[str, Any] = {"marker": "o", "markerfacecolor": "white", "linestyle": "none"}
        panel.plot([], [], color=_GREY, label="no difference", **hollow)
    if zero_line:
        panel.plot([], [], color=_GREY, label="no difference, many steps", lw=4)
    if zero_marker or zero_line:
        panel.annotate("0", (0, 0), (-6, 0), "axes fraction", textcoords="offset points", ha="right", va="center")
    if infinite:
        panel.plot([], [], color=_GREY, marker="X", linestyle="none", label="NaN or infinite")


def _draw_legend(figure: Figure, lines: dict[str, Artist]) -> None:
    """Draw the legend below the panels."""
    width = 1 - (LEFT + RIGHT) / WIDTH
    figure.legend(
        list(lines.values()),
        list(lines),
        loc="lower left",
        bbox_to_anchor=(LEFT / WIDTH, 0.0, width, 0.0),
        mode="expand",
        ncols=LEGEND_COLUMNS,
        frameon=False,
        fontsize=8.5,
        handlelength=3,
    )


def _plot_level(panel: Axes, steps: np.ndarray, level: float, **style: Any) -> None:
    """Draw markers at ``steps`` and one height."""
    panel.plot(steps, np.full(len(steps), level), **style)


def _plot_runs(panel: Axes, steps: np.ndarray, selected: np.ndarray, level: float, **style: Any) -> None:
    """Draw a line at one height through each run of ``selected`` steps, to the middle of its neighbours or longer."""
    edges = np.flatnonzero(np.diff(np.concatenate([[0], selected.astype(np.int8), [0]])))
    middles = np.concatenate([[steps[0] - 0.5], (steps[1:] + steps[:-1]) / 2, [steps[-1] + 0.5]])
    starts, stops = middles[edges[::2]], middles[edges[1::2]]
    left, right = panel.get_xlim()
    shortest = _SHORTEST_LINE * (right - left) / (WIDTH - LEFT - RIGHT)
    missing = np.maximum(shortest - (stops - starts), 0) / 2
    starts, stops = starts - missing, stops + missing
    panel.hlines(np.full(len(starts), level), starts, stops, capstyle="butt", **style)


def _limits(lines: list[Series], tolerance: Tolerance) -> tuple[float, float]:
    """Return axis limits that contain every difference and the tolerance, with room for the markers on the edges."""
    values = np.concatenate([line.metric.relative for line in lines])
    values = values[np.isfinite(values) & (values > 0)]
    shown = [float(value) for value in (values.min(initial=math.inf), values.max(initial=0.0))]
    if not tolerance.assert_equal:
        shown.append(tolerance.rtol)
    shown = [math.log10(value) for value in shown if 0 < value < math.inf] or [-6.0]
    # Show at least three decades: a narrower log scale has no labelled ticks.
    lowest, highest = math.floor(min(shown)) - 0.8, math.ceil(max(shown)) + 0.6
    lowest, highest = max(lowest, -DECADES), min(highest, DECADES)
    return 10.0 ** min(lowest, highest - 3.4), 10.0**highest


def _style(panel: Axes, diverging_steps: Collection[int]) -> None:
    panel.grid(True, color="0.9", linewidth=0.8)
    panel.set_axisbelow(True)
    panel.spines[["top", "right"]].set_visible(False)
    panel.locator_params(axis="x", integer=True)
    for step in diverging_steps:
        panel.axvline(step, color=_FAILED, linewidth=1.2, alpha=0.8, zorder=1)


def _write_title(figure: Figure, comparisons: list[Comparison], height: float) -> None:
    """Write the verdict and the patterns in bold, and the sources below."""
    names = list(dict.fromkeys(pattern.name for each in comparisons for pattern in each.patterns))
    verdict = headline(comparisons).split(":")[0] + (f": {', '.join(names)}" if names else "")
    left = LEFT / WIDTH
    colour = _PASSED if all(each.passed for each in comparisons) else _FAILED
    figure.text(left, 1 - 0.3 / height, verdict[0].upper() + verdict[1:], size=14, weight="bold", color=colour)
    baseline, candidate = (_shorten(curve.source) for curve in (comparisons[0].baseline, comparisons[0].candidate))
    others = candidate if len(comparisons) == 1 else f"{len(comparisons)} candidates"
    sources = f"baseline {baseline}   |   {'candidate ' if len(comparisons) == 1 else ''}{others}"
    figure.text(left, 1 - 0.57 / height, sources, size=9, color=_GREY, parse_math=False)


def _shorten(source: str, most: int = 50) -> str:
    return source if len(source) <= most else "..." + source[3 - most :]
