"""What a rehearsal showed, as tables and as JSON."""

from __future__ import annotations

from typing import Any

from rich.console import Console
from rich.table import Table

from torchtitan_npu.planner.memory import CATEGORIES
from torchtitan_npu.planner.rank import Rehearsal
from torchtitan_npu.planner.rates import Rates, seconds

GIB = 1 << 30


def print_memory(console: Console, rehearsals: dict[str, Rehearsal], device_memory: int) -> None:
    """A column a kind of rank: memory at the peak by category, where that is, and whether it fits."""
    table = Table("GiB at the peak", *(f"{name}\nrank {one.rank}" for name, one in rehearsals.items()))
    for category in CATEGORIES:
        table.add_row(category, *(f"{one.at_peak.get(category, 0) / GIB:.2f}" for one in rehearsals.values()))
    table.add_section()
    table.add_row("peak", *(f"{one.peak / GIB:.2f}" for one in rehearsals.values()))
    if any(one.hccl_buffers for one in rehearsals.values()):
        cells = (f"{one.hccl_buffers / GIB:.2f} ({one.communicators} groups)" for one in rehearsals.values())
        table.add_row("HCCL's communication buffers, besides", *cells)
    table.add_row("where", *(f"{one.where} ({one.phase})" for one in rehearsals.values()))
    table.add_row("between steps", *(f"{sum(one.standing.values()) / GIB:.2f}" for one in rehearsals.values()))
    table.add_section()
    for swapped in (True, False):
        name = f"optimizer states {'with' if swapped else 'without'} swap"
        table.add_row(name, *(_states(one, swapped) for one in rehearsals.values()))
    table.add_section()
    table.add_row(f"fits {device_memory / GIB:.4g} GiB", *(_fits(one, device_memory) for one in rehearsals.values()))
    console.print(table)
    for one in rehearsals.values():
        console.print(f"rank {one.rank}: {one.modules}; {one.accumulated} batches a step; {one.seconds:.0f} s")
        if one.without_gradient:
            console.print(f"[red]rank {one.rank}: without gradient: {', '.join(one.without_gradient)}")


def _states(one: Rehearsal, swapped: bool) -> str:
    """Where the states are; without swap they lie there all through the step, so also at its peak."""
    on_device = one.standing.get("optimizer states", 0)
    if swapped == (one.host > 0):
        where = f"{one.host / GIB:.2f} in host memory" if swapped else f"{on_device / GIB:.2f} on the device"
        return f"{where} (as it is)"
    if swapped:
        return f"{on_device / GIB:.2f} in host memory at the most"
    peak = f", peak {(one.peak + one.host) / GIB:.2f}" if one.phase != "optimizer" else ""
    return f"{(on_device + one.host) / GIB:.2f} on the device{peak}"


def _fits(one: Rehearsal, device_memory: int) -> str:
    left = device_memory - one.needed
    return f"yes, {left / GIB:.2f} left" if left >= 0 else f"[red]no, {-left / GIB:.2f} too much"


def print_work(console: Console, rehearsals: dict[str, Rehearsal], rates: Rates) -> None:
    """A row for computing and one a collective: how often, how much, and its share of the time at stated rates."""
    table = Table("a step", "", *(f"rank {one.rank}" for one in rehearsals.values()))
    times = {one.rank: seconds(one, rates) for one in rehearsals.values()}

    def share(one: Rehearsal, what: str, part: float = 1.0) -> str:
        return f"{100 * part * times[one.rank].get(what, 0) / sum(times[one.rank].values()):.1f}%"

    table.add_row(
        "compute",
        "10¹² FLOP",
        *(f"{one.flops / 1e12:.1f}  {share(one, 'compute')}" for one in rehearsals.values()),
    )
    for key in sorted({key for one in rehearsals.values() for key in one.sent}):
        cells = []
        for one in rehearsals.values():
            sent, calls = one.sent.get(key, 0), one.calls.get(key, 0)
            part = sent / max(1, sum(n for (group, _), n in one.sent.items() if group == key[0]))
            cells.append(f"{calls} × {sent / max(1, calls) / 1e6:.1f} MB  {share(one, key[0], part)}" if calls else "")
        table.add_row(key[0], key[1], *cells)
    table.add_section()
    table.add_row("together", "s, as stated", *(f"{sum(times[one.rank].values()):.4g}" for one in rehearsals.values()))
    console.print(table)
    rate = f"{rates.tflops:g} TFLOP/s and {rates.bandwidth:g} GB/s"
    own = "".join(f", {group} {value:g} GB/s" for group, value in rates.groups.items())
    console.print(f"shares of the time at {rate}{own} a device, as stated, nothing overlapped; bytes sent by this rank")


def as_json(name: str, one: Rehearsal, rates: Rates, device_memory: int) -> dict[str, Any]:
    """Everything but the timeline; bytes and FLOPs are of one rank."""
    left_out = ("timeline", "phases", "peaks", "calls", "sent")
    collectives = [
        {"group": group, "kind": kind, "calls": one.calls[group, kind], "sent_bytes": sent}
        for (group, kind), sent in one.sent.items()
    ]
    return {
        "kind": name,
        **{key: value for key, value in vars(one).items() if key not in left_out},
        "collectives": collectives,
        "seconds_at_stated_rates": seconds(one, rates),
        "needed": one.needed,
        "fits": one.needed <= device_memory,
    }
