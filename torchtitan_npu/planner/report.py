"""The results of dry runs and of a search as tables, as JSON, and as a plot of memory through the step."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from torchtitan_npu.planner.dry_run import DryRun
from torchtitan_npu.planner.memory import CATEGORIES, GIB
from torchtitan_npu.planner.search import Layout, Tried
from torchtitan_npu.planner.work import Rates

GB = 10**9
COLOURS = ("#4e79a7", "#76b7b2", "#b07aa1", "#f28e2b", "#edc948", "#59a14f", "#9c755f", "#e15759", "#bab0ac")
"""Of the plot, by category."""


def print_memory(console: Console, runs: dict[str, DryRun], device_memory: int) -> None:
    """Print a column per rank: memory at the peak by category, where the peak is, and whether it fits."""
    table = Table("GiB at the peak", *(f"{name}\nrank {one.rank}" for name, one in runs.items()))
    for category in CATEGORIES:
        table.add_row(category, *(f"{one.at_peak.get(category, 0) / GIB:.2f}" for one in runs.values()))
    table.add_section()
    table.add_row("peak", *(f"{one.peak / GIB:.2f}" for one in runs.values()))
    if any(one.kept_workspace for one in runs.values()):
        cells = (f"{one.kept_workspace / GIB:.2f} ({one.workspace_operator})" for one in runs.values())
        table.add_row("largest operator workspace, in addition", *cells)
    if any(one.hccl_buffers for one in runs.values()):
        cells = (f"{one.hccl_buffers / GIB:.2f} ({one.communicators} groups)" for one in runs.values())
        table.add_row("HCCL's communication buffers, in addition", *cells)
    table.add_row("needed", *(f"{one.needed / GIB:.2f}" for one in runs.values()))
    table.add_row("where", *(f"{one.where} ({one.phase})" for one in runs.values()))
    table.add_row("between steps", *(f"{sum(one.between_steps.values()) / GIB:.2f}" for one in runs.values()))
    table.add_section()
    for swapped in (True, False):
        name = f"optimizer states {'with' if swapped else 'without'} swap"
        table.add_row(name, *(_states(one, swapped) for one in runs.values()))
    table.add_section()
    table.add_row(f"fits {device_memory / GIB:.4g} GiB", *(_fits(one, device_memory) for one in runs.values()))
    console.print(table)
    for one in runs.values():
        console.print(f"rank {one.rank}: {one.modules}; {one.accumulated} batches per step; {one.seconds:.0f} s")
        if one.without_gradient:
            console.print(f"[red]rank {one.rank}: {one.gradient_error}")


def _states(one: DryRun, swapped: bool) -> str:
    """Return where the optimizer states are. Without swap they stay on the device through the step and its peak."""
    on_device = one.between_steps.get("optimizer states", 0)
    if swapped == (one.host > 0):
        where = f"{one.host / GIB:.2f} in host memory" if swapped else f"{on_device / GIB:.2f} on the device"
        return f"{where} (this job)"
    if swapped:
        return f"at most {on_device / GIB:.2f} in host memory"
    peak = f", peak {(one.peak + one.host) / GIB:.2f}" if one.phase != "optimizer" else ""
    return f"{(on_device + one.host) / GIB:.2f} on the device{peak}"


def _fits(one: DryRun, device_memory: int) -> str:
    left = device_memory - one.needed
    return f"yes, {left / GIB:.2f} left" if left >= 0 else f"[red]no, {-left / GIB:.2f} too much"


def print_work(console: Console, runs: dict[str, DryRun], rates: Rates) -> None:
    """Print a row for compute and one per collective: calls, amount, and percentage of the time at assumed rates."""
    table = Table("per step", "", *(f"rank {one.rank}" for one in runs.values()))
    times = {one.rank: one.seconds_at(rates) for one in runs.values()}

    def percent(one: DryRun, what: str, part: float = 1.0) -> str:
        return f"{100 * part * times[one.rank].get(what, 0) / sum(times[one.rank].values()):.1f}%"

    table.add_row(
        "compute",
        "10¹² FLOP",
        *(f"{one.flops / 1e12:.1f}  {percent(one, 'compute')}" for one in runs.values()),
    )
    for key in sorted({key for one in runs.values() for key in one.sent}):
        cells = []
        for one in runs.values():
            sent, calls = one.sent.get(key, 0), one.calls.get(key, 0)
            part = sent / max(1, sum(n for (group, _), n in one.sent.items() if group == key[0]))
            text = f"{calls} × {sent / max(1, calls) / 1e6:.1f} MB  {percent(one, key[0], part)}"
            cells.append(text if calls else "")
        table.add_row(key[0], key[1], *cells)
    table.add_section()
    table.add_row("total", "s, assumed rates", *(f"{sum(times[one.rank].values()):.4g}" for one in runs.values()))
    console.print(table)
    rate = f"{rates.tflops:g} TFLOP/s and {rates.bandwidth:g} GB/s"
    by_group = "".join(f", {group} {value:g} GB/s" for group, value in rates.groups.items())
    console.print(f"times at assumed rates of {rate}{by_group} per device, nothing overlapped; bytes sent by this rank")


def as_json(name: str, one: DryRun, rates: Rates, device_memory: int) -> dict[str, Any]:
    """Return everything but the timeline. Bytes and FLOPs are those of one rank."""
    left_out = ("timeline", "phases", "peaks", "calls", "sent")
    collectives = [
        {"group": group, "collective": collective, "calls": one.calls[group, collective], "sent_bytes": sent}
        for (group, collective), sent in one.sent.items()
    ]
    return {
        "name": name,
        **{key: value for key, value in vars(one).items() if key not in left_out},
        "collectives": collectives,
        "seconds_at_assumed_rates": one.seconds_at(rates),
        "needed": one.needed,
        "fits": one.needed <= device_memory,
    }


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


def print_advice(console: Console, tried: list[Tried], worst: DryRun, device_memory: int) -> None:
    table = Table("change", "needed (GiB)", "rank", f"of {device_memory / GIB:.4g} GiB")
    for one in [Tried("none", worst.needed, worst.rank), *tried]:
        if one.peak is None:
            table.add_row(escape(one.change), "", str(one.rank), f"[red]{escape(one.error)}")
        else:
            verdict = "fits" if one.peak <= device_memory else "[red]does not fit"
            table.add_row(escape(one.change), f"{one.peak / GIB:.2f}", str(one.rank), verdict)
    console.print(table)


def print_weights_and_gradients(
    console: Console, found: dict[str, Any], degrees: dict[str, int], world_size: int, device_memory: int
) -> None:
    total = found["weights_and_gradients"] / GB
    fits = "fit" if world_size >= found["min_devices"] else "[red]do not fit[/]"
    console.print(
        f"weights and gradients in {found['dtype']}: {total:.0f} GB; they {fits} {world_size} devices of "
        f"{device_memory / GB:.4g} GB; the minimum is {found['min_devices']} devices"
    )
    dense = found["dense_before_fsdp"] / GB
    console.print(
        f"weights and gradients outside experts: {dense:.1f} GB per device with PP{degrees['pp']} TP{degrees['tp']}, "
        "before FSDP"
    )


def print_layouts(
    console: Console, found: list[Layout], device_memory: int, rates: Rates, most_estimates: int = 12
) -> None:
    """Print the layouts with a dry run, and the best of the remaining ones."""
    table = Table("layout", "peak (GiB)", "", f"of {device_memory / GIB:.4g} GiB", "µs per token, assumed rates")
    tried = [one for one in found if one.dry_runs or one.error]
    estimated = [one for one in found if not (one.dry_runs or one.error) and one.fits(device_memory)]
    for one in tried + estimated[:most_estimates]:
        verdict = "fits" if one.fits(device_memory) else "[red]does not fit"
        how = "dry run" if one.dry_runs else "estimate"
        if one.error:
            verdict, how = f"[red]{escape(one.error)}", ""
        table.add_row(one.name, f"{one.peak / GIB:.2f}", how, verdict, f"{one.microseconds(rates):.3f}")
    console.print(table)
    fitting = sum(one.fits(device_memory) for one in tried)
    console.print(f"dry runs: {len(tried)} layouts, {fitting} fit; {len(estimated)} more fit by the estimate")
