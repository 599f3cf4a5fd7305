"""A plot of memory through a step, by category, with one panel per representative rank."""

from __future__ import annotations

from pathlib import Path

from torchtitan_npu.planner.dry_run import DryRun
from torchtitan_npu.planner.memory import CATEGORIES
from torchtitan_npu.planner.report import GIB

COLOURS = ("#4e79a7", "#76b7b2", "#b07aa1", "#f28e2b", "#edc948", "#59a14f", "#9c755f", "#e15759", "#bab0ac")


def draw(path: Path, runs: dict[str, DryRun], device_memory: int, title: str) -> None:
    """Write the plot of ``runs`` to ``path``."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 3.4 * len(runs) + 0.8), layout="constrained")
    panels = figure.subplots(len(runs), squeeze=False)[:, 0]
    for panel, (name, one) in zip(panels, runs.items(), strict=True):
        layers = [[point.get(category, 0) / GIB for point in one.timeline] for category in CATEGORIES]
        panel.stackplot(range(len(one.timeline)), layers, labels=CATEGORIES, colors=COLOURS, linewidth=0)
        limit = (device_memory - one.hccl_buffers - one.kept_workspace) / GIB  # neither is drawn
        panel.axhline(limit, color="red", linewidth=1)
        for begin, phase in one.phases:
            panel.axvline(begin, color="black", linewidth=0.5, linestyle=":")
            if phase in ("forward", "optimizer"):
                label = "batch" if phase == "forward" else phase
                panel.text(begin, limit, f" {label}", fontsize=8, va="bottom")
        panel.set_title(f"{name}, rank {one.rank}: {one.peak / GIB:.1f} GiB, {one.where} ({one.phase})", fontsize=10)
        panel.set_ylabel("GiB")
        panel.set_xticks([])
        panel.margins(x=0)
        panel.set_ylim(0, max(1.12 * limit, 1.05 * one.peak / GIB))
    panels[-1].set_xlabel("allocations and frees through the step, in order")
    handles, labels = panels[0].get_legend_handles_labels()
    figure.legend(handles[::-1], labels[::-1], loc="outside right upper", fontsize=8)
    figure.suptitle(title, fontsize=11)
    figure.savefig(path, dpi=110)
