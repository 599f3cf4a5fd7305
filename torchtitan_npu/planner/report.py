"""The results of dry runs as tables and as JSON."""

from __future__ import annotations

from typing import Any

from rich.console import Console
from rich.table import Table

from torchtitan_npu.planner.dry_run import DryRun
from torchtitan_npu.planner.memory import CATEGORIES
from torchtitan_npu.planner.step_time import Rates, seconds

GIB = 1 << 30


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
            console.print(f"[red]rank {one.rank}: without gradient: {', '.join(one.without_gradient)}")


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
    times = {one.rank: seconds(one, rates) for one in runs.values()}

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
    own = "".join(f", {group} {value:g} GB/s" for group, value in rates.groups.items())
    console.print(f"times at assumed rates of {rate}{own} per device, nothing overlapped; bytes sent by this rank")


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
        "seconds_at_assumed_rates": seconds(one, rates),
        "needed": one.needed,
        "fits": one.needed <= device_memory,
    }
