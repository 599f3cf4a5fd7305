"""What would make a job fit: each thing tried, by rehearsing the rank that needs the most."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass

from rich.console import Console
from rich.table import Table

from torchtitan_npu.config import JobConfig
from torchtitan_npu.errors import UsageError
from torchtitan_npu.preflight import check_job
from torchtitan_npu.rehearsal.job import Failure, attempt
from torchtitan_npu.rehearsal.load import Load
from torchtitan_npu.rehearsal.rank import Rehearsal, rehearse_rank
from torchtitan_npu.rehearsal.report import GIB


@dataclass
class Tried:
    """A change of the job, and what came of it."""

    change: str
    peak: int | None
    """Bytes that are needed, or None if the job does not start so."""
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
"""Each makes a change and says which, or makes none where there is nothing to change."""


def advise(config: JobConfig, world_size: int, worst: Rehearsal, load: Load) -> list[Tried]:
    """Every change by itself, then all that lowered the peak together; of ``worst``'s rank."""
    tried, helping = [], []
    for change in CHANGES:
        changed = copy.deepcopy(config)
        if (name := change(changed)) is not None:
            tried.append(_try(name, changed, world_size, worst.rank, load))
            if tried[-1].peak is not None and tried[-1].peak < worst.needed:
                helping.append(change)
    if len(helping) > 1:
        together = copy.deepcopy(config)
        names = [name for change in helping if (name := change(together)) is not None]
        tried.append(_try("; ".join(names), together, world_size, worst.rank, load))
    return tried


def _try(change: str, config: JobConfig, world_size: int, rank: int, load: Load) -> Tried:
    try:
        check_job(config, world_size)
        result = attempt(rehearse_rank, config, world_size, rank, load)
    except UsageError as error:
        return Tried(change, None, str(error))
    return Tried(change, None, str(result)) if isinstance(result, Failure) else Tried(change, result.needed)


def print_advice(console: Console, tried: list[Tried], worst: Rehearsal, device_memory: int) -> None:
    table = Table(f"tried, rank {worst.rank}", "needed (GiB)", f"of {device_memory / GIB:.4g} GiB")
    table.add_row(
        "as it is", f"{worst.needed / GIB:.2f}", "fits" if worst.needed <= device_memory else "[red]does not fit"
    )
    for one in tried:
        if one.peak is None:
            table.add_row(one.change, "", f"[red]does not start: {one.error}")
        else:
            verdict = "fits" if one.peak <= device_memory else "[red]does not fit"
            table.add_row(one.change, f"{one.peak / GIB:.2f}", verdict)
    console.print(table)
