"""Plot both curves and, below them, their relative difference on a log scale."""

from __future__ import annotations

import io
import math
from typing import TYPE_CHECKING, Any

import numpy as np

from .curves import AUXILIARY, GRAD_NORM, LOSS

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from .comparison import Comparison
    from .metrics import MetricComparison

# All lengths in inches. The fixed layout keeps a series of plots comparable.
DPI = 100
WIDTH, LEFT, RIGHT, TOP, BOTTOM, GAP = 9.0, 0.85, 0.25, 0.8, 0.55, 0.38
HEIGHTS = {LOSS: 2.5, GRAD_NORM: 1.5, **dict.fromkeys(AUXILIARY, 1.5), "difference": 1.9}

_BASELINE, _CANDIDATE = "#4c78a8", "#e4572e"
_DIFFERENCE = {LOSS: "#3b3b6d", GRAD_NORM: "#4c9f70", "indexer_loss": "#b07aa1", "mtp_loss": "#c49a3a"}
_LABELS = {LOSS: "loss", GRAD_NORM: "gradient norm", "indexer_loss": "indexer loss", "mtp_loss": "MTP loss"}
_MARKERS = {LOSS: "o", GRAD_NORM: "s", "indexer_loss": "D", "mtp_loss": "^"}
# Several metrics may share an edge: smaller markers are drawn on top of larger ones.
_EDGE_STYLES: dict[str, dict[str, Any]] = {
    LOSS: {"linestyle": "none", "ms": 4.0, "clip_on": False, "zorder": 6},
    GRAD_NORM: {"linestyle": "none", "ms": 8.0, "clip_on": False, "zorder": 5},
    "indexer_loss": {"linestyle": "none", "ms": 11.0, "clip_on": False, "zorder": 4},
    "mtp_loss": {"linestyle": "none", "ms": 15.0, "clip_on": False, "zorder": 3},
}
_PASSED, _FAILED, _GREY = "#2e7d32", "#c62828", "0.35"
_DOTTED: dict[str, Any] = {"linewidth": 1.2, "linestyle": (0, (1, 1.2))}
DECADES = 100.0
"""Larger powers of ten are not drawn: the ticks of the axes overflow."""
# With more steps, markers would overlap.
_MOST_MARKERS = 60


def draw(comparison: Comparison) -> bytes:
    """Return the plot as PNG."""
    # Imported here: this takes a second, which reading and comparing do not need. A Figure without pyplot sets no
    # backend and no global state.
    from matplotlib.figure import Figure

    heights = [*(HEIGHTS[metric.name] for metric in comparison.metrics), HEIGHTS["difference"]]
    height = TOP + sum(heights) + GAP * (len(heights) - 1) + BOTTOM
    figure = Figure(figsize=(WIDTH, height), dpi=DPI)
    panels = figure.subplots(len(heights), 1, sharex=True, height_ratios=heights)
    figure.subplots_adjust(
        left=LEFT / WIDTH,
        right=1 - RIGHT / WIDTH,
        top=1 - TOP / height,
        bottom=BOTTOM / height,
        hspace=GAP / (sum(heights) / len(heights)),
    )
    for panel, metric in zip(panels[:-1], comparison.metrics, strict=True):
        _draw_curves(panel, metric)
    _draw_difference(panels[-1], comparison)
    for panel in panels:
        _style(panel, comparison.first_diverging_step)
    figure.align_ylabels(panels)
    panels[0].legend(loc="upper right", frameon=False)
    _write_title(figure, comparison, height)
    png = io.BytesIO()
    # Without the version in the metadata, equal comparisons give equal bytes.
    figure.savefig(png, format="png", metadata={"Software": None})
    return png.getvalue()


def _draw_curves(panel: Axes, metric: MetricComparison) -> None:
    """Draw the baseline wide and solid, the candidate dashed on top, so that identical curves are both visible."""
    marker = "o" if len(metric.steps) <= _MOST_MARKERS else None
    baseline, candidate = (
        np.where(np.abs(values) < 10.0**DECADES, values, np.nan) for values in (metric.baseline, metric.candidate)
    )
    panel.plot(metric.steps, baseline, color=_BASELINE, alpha=0.5, linewidth=4, marker=marker, ms=5, label="baseline")
    panel.plot(metric.steps, candidate, color=_CANDIDATE, dashes=(4, 2.5), marker=marker, ms=2.5, label="candidate")
    panel.set_ylabel(_LABELS[metric.name])


def _draw_difference(panel: Axes, comparison: Comparison) -> None:
    """Draw relative differences on a log scale.

    A log scale has no zero: equal steps are hollow markers on the bottom edge, which is labelled 0. Steps without two
    finite values are crosses on the top edge.
    """
    bottom, top = _limits(comparison)
    panel.set_yscale("log")
    panel.set_ylim(bottom, top)
    panel.yaxis.minorticks_off()
    zeros = [metric.relative == 0 for metric in comparison.metrics]
    unmeasurable = [~np.isfinite(metric.relative) for metric in comparison.metrics]
    with_tolerance = not comparison.tolerance.assert_equal
    for metric, zero, no_number in zip(comparison.metrics, zeros, unmeasurable, strict=True):
        colour, marker = _DIFFERENCE[metric.name], _MARKERS[metric.name]
        size = 4 if len(metric.steps) <= _MOST_MARKERS else 1.5
        shown = np.where(zero | no_number, np.nan, metric.relative)
        panel.plot(metric.steps, shown, color=colour, marker=marker, ms=size, lw=1.2, label=_LABELS[metric.name])
        edge = _EDGE_STYLES[metric.name]
        _plot_level(panel, metric.steps[zero], bottom, color=colour, marker=marker, markerfacecolor="white", **edge)
        _plot_level(panel, metric.steps[no_number], top, color=colour, marker="X", **edge)
        if with_tolerance:
            with np.errstate(divide="ignore", invalid="ignore"):
                limit = metric.limit / np.abs(metric.baseline)
            # Extend by half a step on both sides: a single step would have no line.
            around = [metric.steps[0] - 0.5, *metric.steps, metric.steps[-1] + 0.5]
            panel.plot(around, [limit[0], *limit, limit[-1]], color=colour, **_DOTTED)
    if with_tolerance:
        panel.plot([], [], color=_GREY, label="tolerance", **_DOTTED)
    if np.concatenate(zeros).any():
        panel.plot([], [], color=_GREY, marker="o", markerfacecolor="white", linestyle="none", label="no difference")
        panel.annotate("0", (0, 0), (-6, 0), "axes fraction", textcoords="offset points", ha="right", va="center")
    if np.concatenate(unmeasurable).any():
        panel.plot([], [], color=_GREY, marker="X", linestyle="none", label="NaN or infinite")
    panel.legend(loc="lower right", bbox_to_anchor=(1.0, 1.04), ncols=5, frameon=False, fontsize=8.5, borderaxespad=0)
    panel.set_ylabel("relative difference")
    panel.set_xlim(comparison.metrics[0].steps[0] - 1, comparison.metrics[0].steps[-1] + 1)
    panel.set_xlabel("step")


def _plot_level(panel: Axes, steps: np.ndarray, level: float, **style: Any) -> None:
    """Draw markers at ``steps`` and one height."""
    panel.plot(steps, np.full(len(steps), level), **style)


def _limits(comparison: Comparison) -> tuple[float, float]:
    """Return axis limits that contain every difference and the tolerance, with room for the markers on the edges."""
    values = np.concatenate([metric.relative for metric in comparison.metrics])
    values = values[np.isfinite(values) & (values > 0)]
    shown = [float(value) for value in (values.min(initial=math.inf), values.max(initial=0.0))]
    if not comparison.tolerance.assert_equal:
        shown.append(comparison.tolerance.rtol)
    shown = [math.log10(value) for value in shown if 0 < value < math.inf] or [-6.0]
    # Show at least three decades: a narrower log scale has no labelled ticks.
    lowest, highest = math.floor(min(shown)) - 0.8, math.ceil(max(shown)) + 0.6
    lowest, highest = max(lowest, -DECADES), min(highest, DECADES)
    return 10.0 ** min(lowest, highest - 3.4), 10.0**highest


def _style(panel: Axes, first_diverging_step: int | None) -> None:
    panel.grid(True, color="0.9", linewidth=0.8)
    panel.set_axisbelow(True)
    panel.spines[["top", "right"]].set_visible(False)
    panel.locator_params(axis="x", integer=True)
    if first_diverging_step is not None:
        panel.axvline(first_diverging_step, color=_FAILED, linewidth=1.2, alpha=0.8, zorder=1)


def _write_title(figure: Figure, comparison: Comparison, height: float) -> None:
    """Write the verdict and the patterns in bold, and the two sources below."""
    names = list(dict.fromkeys(pattern.name for pattern in comparison.patterns))
    verdict = comparison.headline.split(":")[0] + (f": {', '.join(names)}" if names else "")
    left = LEFT / WIDTH
    colour = _PASSED if comparison.passed else _FAILED
    figure.text(left, 1 - 0.3 / height, verdict[0].upper() + verdict[1:], size=14, weight="bold", color=colour)
    sources = [_shorten(curve.source) for curve in (comparison.baseline, comparison.candidate)]
    figure.text(
        left,
        1 - 0.57 / height,
        f"baseline {sources[0]}   |   candidate {sources[1]}",
        size=9,
        color=_GREY,
        parse_math=False,
    )


def _shorten(source: str, most: int = 50) -> str:
    return source if len(source) <= most else "..." + source[3 - most :]
