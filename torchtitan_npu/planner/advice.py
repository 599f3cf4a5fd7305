"""Changes that may make a job fit, each tried with dry runs of its representative ranks."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from torchtitan_npu.config.job_config import JobConfig
from torchtitan_npu.errors import UsageError
from torchtitan_npu.planner.dry_run import DryRun
from torchtitan_npu.planner.dry_run_ranks import Failure, assumed_load, attempt
from torchtitan_npu.planner.report import GIB
from torchtitan_npu.planner.truncated_dry_run import dry_run_truncated
from torchtitan_npu.preflight.job import check_job
from torchtitan_npu.progress import Progress


@dataclass
class Tried:
    """A change of the job, and its result."""

    change: str
    peak: int | None
    """Bytes that the job needs, or None if it does not start or train with the change."""
    rank: int
    """The representative rank that needs the most, or the first that does not fit."""
    error: str = ""


def _swap(config: JobConfig) -> str | None:
    if config.optimizer.swap:
        return None
    config.optimizer.swap = True
    return "optimizer.swap = true"


def _reshard(config: JobConfig) -> str | None:
    p = config.parallelism
    if p.pipeline_parallel_degree == 1 or p.fsdp_reshard_after_forward == "always":
        return None
    p.fsdp_reshard_after_forward = "always"
    return 'parallelism.fsdp_reshard_after_forward = "always"'


def _selective(config: JobConfig) -> str | None:
    if config.activation_checkpoint.mode != "none":
        return None
    config.activation_checkpoint.mode, config.activation_checkpoint.selective_ac_option = "selective", "op"
    return 'activation_checkpoint.mode = "selective", selective_ac_option = "op"'


def _full(config: JobConfig) -> str | None:
    if config.activation_checkpoint.mode == "full":
        return None
    config.activation_checkpoint.mode = "full"
    return 'activation_checkpoint.mode = "full"'


def _context_parallel(config: JobConfig) -> str | None:
    p = config.parallelism
    shards = p.data_parallel_shard_degree
    if shards != -1 and shards % 2:
        return None
    p.context_parallel_degree *= 2
    if shards == -1:
        return f"parallelism.context_parallel_degree = {p.context_parallel_degree}"
    p.data_parallel_shard_degree = shards // 2
    return (
        f"parallelism.context_parallel_degree = {p.context_parallel_degree}, "
        f"data_parallel_shard_degree = {p.data_parallel_shard_degree}"
    )


def _local_batch(config: JobConfig) -> str | None:
    training = config.training
    if training.local_batch_size % 2:
        return None
    training.local_batch_size //= 2
    return f"training.local_batch_size = {training.local_batch_size}"


CHANGES: tuple[Callable[[JobConfig], str | None], ...] = (
    _swap,
    _reshard,
    _selective,
    _full,
    _local_batch,
    _context_parallel,
)
"""Each changes the job and returns the change as text, or returns None if it does not apply."""


def advise(config: JobConfig, world_size: int, runs: list[DryRun], expert_load: str, device_memory: int) -> list[Tried]:
    """Try every change alone, then all that lowered the peak together, on the ranks of ``runs``."""
    by_memory = sorted(runs, key=lambda one: -one.needed)
    job = _Job(world_size, [one.rank for one in by_memory], expert_load, device_memory)
    tried, helping = [], []
    with Progress("plan: trying changes") as progress:
        for change in CHANGES:
            changed = copy.deepcopy(config)
            if (name := change(changed)) is not None:
                tried.append(job.attempt(name, changed, progress))
                if tried[-1].peak is not None and tried[-1].peak < by_memory[0].needed:
                    helping.append(change)
        if _full in helping and _selective in helping:
            helping.remove(_selective)
        if len(helping) > 1:
            together = copy.deepcopy(config)
            names = [name for change in helping if (name := change(together)) is not None]
            tried.append(job.attempt("; ".join(names), together, progress))
    return tried


@dataclass
class _Job:
    """The settings that no change touches."""

    world_size: int
    ranks: list[int]
    """The representative ranks, the one that needs the most first."""
    expert_load: str
    device_memory: int

    def attempt(self, change: str, config: JobConfig, progress: Progress) -> Tried:
        """Return the most that a rank needs with ``config``. Stop at the first rank that does not fit."""
        most, most_rank = 0, self.ranks[0]
        try:
            check_job(config, self.world_size)
            for rank in self.ranks:
                load = assumed_load(self.expert_load, config, rank)
                progress.update(f"plan: trying {change}, rank {rank}")
                result = attempt(partial(dry_run_truncated, config, self.world_size, rank, load), rank)
                if isinstance(result, Failure):
                    return Tried(change, None, rank, str(result))
                if result.without_gradient:
                    return Tried(change, None, rank, f"without gradient: {', '.join(result.without_gradient)}")
                if result.needed > most:
                    most, most_rank = result.needed, rank
                if most > self.device_memory:
                    break
        except UsageError as error:
            return Tried(change, None, most_rank, f"invalid: {error}")
        return Tried(change, most, most_rank)


def print_advice(console: Console, tried: list[Tried], worst: DryRun, device_memory: int) -> None:
    table = Table("change", "needed (GiB)", "rank", f"of {device_memory / GIB:.4g} GiB")
    for one in [Tried("none", worst.needed, worst.rank), *tried]:
        if one.peak is None:
            table.add_row(escape(one.change), "", str(one.rank), f"[red]{escape(one.error)}")
        else:
            verdict = "fits" if one.peak <= device_memory else "[red]does not fit"
            table.add_row(escape(one.change), f"{one.peak / GIB:.2f}", str(one.rank), verdict)
    console.print(table)
