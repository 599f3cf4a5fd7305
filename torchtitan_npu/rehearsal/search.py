"""Which layouts of a job fit a number of devices, best first: all that divide it are estimated, the best rehearsed."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from rich.console import Console
from rich.table import Table

from torchtitan_npu.config import JobConfig
from torchtitan_npu.errors import UsageError
from torchtitan_npu.rehearsal.estimate import Estimator, with_layout
from torchtitan_npu.rehearsal.job import check, degrees, layout_name, stated_load
from torchtitan_npu.rehearsal.rank import Rehearsal, rehearse_rank
from torchtitan_npu.rehearsal.rates import Rates, step_seconds
from torchtitan_npu.rehearsal.report import GIB

LARGEST = {"pp": 16, "tp": 16, "cp": 16}


@dataclass
class Layout:
    """One layout of the job."""

    config: JobConfig
    stage: int
    """Which needs the most memory, by the estimate."""
    estimate: int
    """Bytes at the peak."""
    microseconds: float
    """A token of the job's, at stated rates; by the estimate, or if rehearsed by that."""
    rehearsal: Rehearsal | None = None
    error: str = ""

    @property
    def name(self) -> str:
        return layout_name(self.config)

    @property
    def peak(self) -> int:
        return self.rehearsal.peak if self.rehearsal else self.estimate

    def fits(self, device_memory: int) -> bool:
        return not self.error and self.peak <= device_memory

    def as_json(self) -> dict[str, Any]:
        found = {"layout": self.name, **degrees(self.config), "stage": self.stage, "estimated_peak": self.estimate}
        found["rehearsed_peak"] = self.rehearsal.peak if self.rehearsal else None  # type: ignore[assignment]
        return {**found, "microseconds_per_token": self.microseconds, "error": self.error}


def dividing(config: JobConfig, world_size: int, heads: int, experts: int, layers: int) -> Iterator[dict[str, int]]:
    """The layouts whose degrees multiply to ``world_size`` and divide what they split; replicas stay as they are."""
    replicas = config.parallelism.data_parallel_replicate_degree
    training = config.training
    for pp in _divisors(world_size // replicas, min(LARGEST["pp"], layers)):
        for tp in _divisors(world_size // replicas // pp, LARGEST["tp"]):
            for cp in _divisors(world_size // replicas // pp // tp, LARGEST["cp"]):
                ranks = world_size // replicas // pp
                shards = ranks // tp // cp
                if heads % tp or training.seq_len % (2 * tp * cp if tp * cp > 1 else 1):
                    continue
                batch = training.local_batch_size * shards * replicas
                if training.global_batch_size > 0 and training.global_batch_size % batch:
                    continue
                for ep in _divisors(ranks, experts) if experts else [1]:
                    if not experts or experts % ep == 0:
                        yield {"dp_replicate": replicas, "dp_shard": shards, "cp": cp, "tp": tp, "pp": pp, "ep": ep}


def _divisors(number: int, largest: int) -> list[int]:
    return [n for n in range(1, min(number, largest) + 1) if number % n == 0]


def search(
    config: JobConfig, world_size: int, device_memory: int, expert_load: str, rates: Rates, top: int, console: Console
) -> list[Layout]:
    """All layouts by estimate, the ``top`` best of those that should fit, and the job's own, rehearsed."""
    estimator = Estimator.of(config)
    moe = getattr(estimator.args, "moe_args", None)
    experts = moe.num_experts if moe and estimator.moe_layers else 0
    found = []
    for layout in dividing(config, world_size, estimator.args.n_heads, experts, estimator.args.n_layers):
        ranks = world_size // layout["pp"] // layout["dp_replicate"]
        stages = estimator.memory(layout, ranks)
        peak = max(stages)
        time = estimator.seconds_per_token(layout, rates)
        found.append(Layout(with_layout(config, layout), stages.index(peak), peak, 1e6 * time))
    console.print(f"{len(found)} layouts divide {world_size} ranks")
    found.sort(key=lambda one: one.microseconds)
    hopeful = [one for one in found if one.estimate <= device_memory]
    own = [one for one in found if degrees(one.config) == degrees(config)]
    for one in [*own, *(one for one in hopeful if one not in own)][: top + len(own)]:
        _rehearse(one, world_size, expert_load, rates)
        console.print(f"{one.name}: {one.error or f'{one.peak / GIB:.2f} GiB'}")
    # what was rehearsed first: the others are estimates
    return sorted(found, key=lambda one: (not one.fits(device_memory), one.rehearsal is None, one.microseconds))


def _rehearse(one: Layout, world_size: int, expert_load: str, rates: Rates) -> None:
    pp, training = one.config.parallelism.pipeline_parallel_degree, one.config.training
    try:
        check(one.config, world_size)
        rank = one.stage * (world_size // pp)
        one.rehearsal = rehearse_rank(one.config, world_size, rank, stated_load(expert_load, one.config))
    except UsageError as error:
        one.error = str(error)
        return
    own = degrees(one.config)
    tokens = one.rehearsal.accumulated * training.local_batch_size * training.seq_len
    tokens *= own["dp_shard"] * own["dp_replicate"]
    one.microseconds = 1e6 * step_seconds([one.rehearsal], one.config, rates) / tokens


def print_layouts(console: Console, found: list[Layout], device_memory: int, most: int = 20) -> None:
    table = Table("layout", "peak (GiB)", "", f"of {device_memory / GIB:.4g} GiB", "µs a token, as stated")
    shown = [one for one in found if one.fits(device_memory)][:most] + [one for one in found if one.rehearsal]
    for one in dict.fromkeys(map(id, shown)):
        layout = next(other for other in shown if id(other) == one)
        verdict = "fits" if layout.fits(device_memory) else "[red]does not fit"
        how = "rehearsed" if layout.rehearsal else "estimated"
        table.add_row(layout.name, f"{layout.peak / GIB:.2f}", how, verdict, f"{layout.microseconds:.3f}")
    console.print(table)
    fitting = sum(one.fits(device_memory) for one in found)
    console.print(f"{fitting} of {len(found)} layouts fit" + (", by the estimate" if fitting else ""))
