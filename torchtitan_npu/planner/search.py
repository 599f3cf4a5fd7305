"""A plan: estimate every layout that divides a number of devices, dry-run the best ones, and sort them."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from torchtitan_npu.config.job_config import JobConfig
from torchtitan_npu.errors import UsageError
from torchtitan_npu.planner.dry_run import DryRun
from torchtitan_npu.planner.dry_run_ranks import Failure, assumed_load, attempt
from torchtitan_npu.planner.estimate import Estimate, Estimator
from torchtitan_npu.planner.layout import degrees, has_valid_degrees, layout_name, with_layout
from torchtitan_npu.planner.pipeline_schedule import modules_per_rank
from torchtitan_npu.planner.replicated_parameters import heads
from torchtitan_npu.planner.report import GIB
from torchtitan_npu.planner.step_time import Rates, step_seconds
from torchtitan_npu.planner.truncated_dry_run import dry_run_truncated
from torchtitan_npu.preflight.job import check_job
from torchtitan_npu.preflight.pipeline import check_schedule
from torchtitan_npu.progress import Progress

LARGEST = {"pp": 16, "tp": 16, "cp": 16}
"""The largest degrees of the search, except for the file's own layout."""
MARGIN = 1.1
"""Layouts whose estimate exceeds the device's memory by less than this factor are dry-run all the same."""
MAX_ATTEMPTS = 2
"""The search stops after this many times ``top`` dry runs, even if fewer than ``top`` layouts fit."""


@dataclass
class Layout:
    """One layout of the job."""

    config: JobConfig
    estimate: Estimate
    dry_runs: list[DryRun] = field(default_factory=list)
    """Dry runs of the last pipeline rank and of those with the most memory and time by the estimate."""
    error: str = ""

    @property
    def name(self) -> str:
        return layout_name(self.config)

    @property
    def peak(self) -> int:
        """Return the bytes that the layout needs, with HCCL's buffers."""
        return max([one.needed for one in self.dry_runs] or self.estimate.memory)

    def microseconds(self, rates: Rates) -> float:
        """Return the microseconds per token of the job, at the assumed rates."""
        if not self.dry_runs:
            return 1e6 * max(self.estimate.seconds)
        training, own = self.config.training, degrees(self.config)
        tokens = self.dry_runs[0].accumulated * training.local_batch_size * training.seq_len
        tokens *= own["dp_shard"] * own["dp_replicate"]
        return 1e6 * step_seconds(self.dry_runs, self.config, rates) / tokens

    def fits(self, device_memory: int) -> bool:
        return not self.error and self.peak <= device_memory

    def as_json(self, device_memory: int, rates: Rates) -> dict[str, Any]:
        return {
            "layout": self.name,
            **degrees(self.config),
            "fits": self.fits(device_memory),
            "estimated_peak": max(self.estimate.memory),
            "dry_run_peak": self.peak if self.dry_runs else None,
            "microseconds_per_token": self.microseconds(rates),
            "error": self.error,
        }


def own_layout(config: JobConfig, world_size: int) -> JobConfig:
    """Return the job in its own layout on ``world_size`` ranks.

    Its degrees stay, with two exceptions: shards fill the ranks, and EP is reduced to divide the ranks of a stage.
    """
    if not has_valid_degrees(config):
        return config
    found = degrees(config)
    others = math.prod(found[name] for name in ("dp_replicate", "cp", "tp", "pp"))
    if world_size % others:
        raise UsageError(f"--world-size {world_size}: must be a multiple of {others} for {layout_name(config)}")
    found["dp_shard"] = world_size // others
    found["ep"] = math.gcd(
        found["ep"], world_size // found["pp"] // found["dp_replicate"] // _expert_tp(config, found["tp"])
    )
    return with_layout(config, found)


def dividing(config: JobConfig, world_size: int, args: Any, experts: int) -> Iterator[dict[str, int]]:
    """Yield the layouts whose degrees multiply to ``world_size`` and divide what they split. Replicas do not change.

    ``args`` are the model's arguments.
    """
    replicas = config.parallelism.data_parallel_replicate_degree
    training = config.training
    for pp in _divisors(world_size // replicas, min(LARGEST["pp"], args.n_layers)):
        for tp in _divisors(world_size // replicas // pp, LARGEST["tp"]):
            for cp in _divisors(world_size // replicas // pp // tp, LARGEST["cp"]):
                ranks = world_size // replicas // pp
                shards = ranks // tp // cp
                if heads(args) % tp or training.seq_len % (2 * tp * cp):  # ParallelDims.seq_len_divisor
                    continue
                batch = training.local_batch_size * shards * replicas
                if training.global_batch_size > 0 and training.global_batch_size % batch:
                    continue
                each = ranks // _expert_tp(config, tp)
                for ep in _divisors(each, experts) if experts else [1]:
                    if not experts or experts % ep == 0:
                        yield {"dp_replicate": replicas, "dp_shard": shards, "cp": cp, "tp": tp, "pp": pp, "ep": ep}


def _expert_tp(config: JobConfig, tp: int) -> int:
    """Return the expert TP degree of a layout with EP: 1 or ``tp``; see :func:`with_layout`."""
    return tp if config.parallelism.expert_tensor_parallel_degree > 1 else 1


def _divisors(number: int, largest: int) -> list[int]:
    return [n for n in range(1, min(number, largest) + 1) if number % n == 0]


def search(
    config: JobConfig, world_size: int, device_memory: int, expert_load: str, rates: Rates, top: int, console: Console
) -> list[Layout]:
    """Estimate all layouts, dry-run the job's own and the ``top`` best that may fit, and return all, best first."""
    own = own_layout(config, world_size)
    console.print(f"the file's layout on {world_size} ranks: {layout_name(own)}")
    with Progress("plan: running dry runs of few layers, for the estimate"):
        estimator = attempt(partial(Estimator.of, own), 0)
    if isinstance(estimator, Failure):
        raise UsageError(f"{layout_name(own)}, truncated to few layers: {estimator}")
    args = estimator.args
    found, refused = [], 0
    with Progress("plan: estimating layouts") as progress:
        for layout in dividing(config, world_size, args, estimator.experts):
            changed = with_layout(config, layout)
            try:
                if layout["pp"] > 1:
                    check_schedule(changed, args.n_layers)
                parts = modules_per_rank(changed, args.n_layers)
            except UsageError:
                refused += 1
                continue
            found.append(Layout(changed, estimator.of_layout(changed, parts, rates, expert_load)))
            progress.update(f"plan: estimating layouts, {len(found)} done")
    if not any(degrees(one.config) == degrees(own) for one in found):  # beyond LARGEST
        estimate = estimator.of_layout(own, modules_per_rank(own, args.n_layers), rates, expert_load)
        found.append(Layout(own, estimate))
    found.sort(key=lambda one: one.microseconds(rates))
    estimated_to_fit = [one for one in found if one.peak <= MARGIN * device_memory]
    most = ", ".join(f"{name.upper()}{degree}" for name, degree in LARGEST.items())
    console.print(
        f"{len(found) + refused} layouts divide {world_size} ranks, up to {most}; {refused} have no pipeline schedule; "
        f"{len(estimated_to_fit)} may fit by the estimate; dry runs of the file's own and of the best, until {top} fit"
    )
    first = [one for one in found if degrees(one.config) == degrees(own)]
    queue = first + [one for one in estimated_to_fit if one not in first][: MAX_ATTEMPTS * top]
    fitting = 0
    for one in queue:
        if fitting == top and one not in first:
            break
        text = f"dry run of {one.name}, estimated {max(one.estimate.memory) / GIB:.1f} GiB"
        with Progress(f"plan: running the {text}"):
            _dry_run(one, world_size, expert_load)
        seconds = sum(run.seconds for run in one.dry_runs)
        result = one.error or f"{one.peak / GIB:.1f} GiB ({seconds:.0f} s)"
        console.print(f"{text}: {result}", markup=False, soft_wrap=True)
        fitting += one.fits(device_memory) and one not in first
    return sorted(found, key=lambda one: (not one.fits(device_memory), not one.dry_runs, one.microseconds(rates)))


def _dry_run(one: Layout, world_size: int, expert_load: str) -> None:
    memory, seconds = one.estimate.memory, one.estimate.seconds
    try:
        check_job(one.config, world_size)
        # The last stage has the logits, which the estimate does not tell from the needs of other stages.
        for stage in sorted({memory.index(max(memory)), seconds.index(max(seconds)), len(memory) - 1}):
            rank = stage * (world_size // one.config.parallelism.pipeline_parallel_degree)
            load = assumed_load(expert_load, one.config, rank)
            result = attempt(partial(dry_run_truncated, one.config, world_size, rank, load), rank)
            if isinstance(result, Failure):
                one.error = str(result)
                return
            one.dry_runs.append(result)
            if result.without_gradient:
                one.error = f"rank {rank}: without gradient: {', '.join(result.without_gradient)}"
                return
    except UsageError as error:
        one.error = f"invalid: {error}"


def print_layouts(
    console: Console, found: list[Layout], device_memory: int, rates: Rates, most_estimates: int = 12
) -> None:
    """Print the layouts with a dry run, and the best of the others."""
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
