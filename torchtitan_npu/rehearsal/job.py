"""A whole job: checked as a real start checks it, then one rank of each kind rehearsed."""

from __future__ import annotations

import copy
import math
import traceback
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torchtitan.protocols.train_spec import get_train_spec

from torchtitan_npu.config import JobConfig
from torchtitan_npu.errors import UsageError
from torchtitan_npu.preflight import check_job
from torchtitan_npu.rehearsal.load import Load, balanced, uneven
from torchtitan_npu.rehearsal.rank import Rehearsal, rehearse_rank

DEGREES = {
    "dp_replicate": "data_parallel_replicate_degree",
    "dp_shard": "data_parallel_shard_degree",
    "cp": "context_parallel_degree",
    "tp": "tensor_parallel_degree",
    "pp": "pipeline_parallel_degree",
    "ep": "expert_parallel_degree",
}
"""The degrees of a layout, by their keys in the job's section ``parallelism``; all but EP multiply to the ranks."""


@dataclass
class Failure:
    """What ends the start of a rank."""

    rank: int
    error: str
    where: str
    """The innermost line of it."""

    def __str__(self) -> str:
        return f"{self.error} ({self.where})"


def degrees(config: JobConfig) -> dict[str, int]:
    return {name: getattr(config.parallelism, key) for name, key in DEGREES.items()}


def layout_name(config: JobConfig) -> str:
    """``PP2 TP4 EP64 FSDP16``."""
    names = {"pp": "PP", "dp_replicate": "DP", "dp_shard": "FSDP", "cp": "CP", "tp": "TP", "ep": "EP"}
    found = degrees(config)
    return " ".join(f"{label}{found[name]}" for name, label in names.items() if found[name] > 1) or "one rank"


def world_size_of(config: JobConfig) -> int:
    """How many ranks the file is for, if it leaves no degree open."""
    if config.parallelism.data_parallel_shard_degree < 1:
        raise UsageError("parallelism.data_parallel_shard_degree is -1: say --world-size")
    return math.prod(degree for name, degree in degrees(config).items() if name != "ep")


def with_all_degrees(config: JobConfig, world_size: int) -> JobConfig:
    """``config`` with the shards that ``data_parallel_shard_degree = -1`` comes to; what does not divide stays."""
    config = copy.deepcopy(config)
    if config.parallelism.data_parallel_shard_degree == -1:
        others = math.prod(degree for name, degree in degrees(config).items() if name not in ("ep", "dp_shard"))
        if world_size % others == 0:
            config.parallelism.data_parallel_shard_degree = world_size // others
    return config


def stated_load(assumption: str, config: JobConfig, rank: int = 0) -> Load:
    """``balanced``, ``worst``, or by which factor the experts of ``rank`` get more than their share."""
    if assumption == "balanced":
        return balanced
    try:
        factor = math.inf if assumption == "worst" else float(assumption)
    except ValueError:
        factor = 0
    if not factor >= 1:
        raise UsageError(f"--expert-load {assumption}: balanced, worst, or a factor of at least 1")
    args: Any = get_train_spec(config.model.name).model_args[config.model.flavor]
    moe = getattr(args, "moe_args", None)
    if not moe:
        return balanced
    p = config.parallelism
    coordinate = rank // p.expert_tensor_parallel_degree % p.expert_parallel_degree  # ETP is the innermost dimension
    return uneven(factor, p.expert_parallel_degree, moe.top_k, coordinate)


def kinds(config: JobConfig, world_size: int) -> dict[int, str]:
    """The first rank of each kind of pipeline stage: the first, the second, which of the like ones has the most
    batches under way, a middle one and the last.

    Within a stage the first rank has the largest shard where shards are uneven, and the busiest experts.
    """
    pp = config.parallelism.pipeline_parallel_degree
    if pp == 1:
        return {0: "every rank"}
    stages = {pp - 1: "last stage", pp // 2: "a middle stage", 1: "second stage", 0: "first stage"}
    if pp == 2:
        stages = {0: "first stage", 1: "last stage"}
    return {stage * (world_size // pp): stages[stage] for stage in sorted(stages)}


def asked_ranks(asked: str, config: JobConfig, world_size: int) -> dict[int, str]:
    """What ``--rank`` asks for: ``all-kinds``, or a number."""
    if asked == "all-kinds":
        return kinds(config, world_size)
    if not asked.isdecimal() or int(asked) >= world_size:
        raise UsageError(f"--rank {asked}: all-kinds, or a number from 0 to {world_size - 1}")
    return {int(asked): "this rank"}


def rehearse_job(
    config: JobConfig, world_size: int, ranks: list[int], expert_load: str = "balanced"
) -> list[Rehearsal | Failure]:
    """One step of each of ``ranks``, after the checks of a real start; each has the busiest experts when it is its
    turn."""
    check_job(config, world_size)
    loads = [stated_load(expert_load, config, rank) for rank in ranks]
    return [attempt(rehearse_rank, config, world_size, rank, load) for rank, load in zip(ranks, loads, strict=True)]


def attempt(rehearse: Any, config: JobConfig, world_size: int, rank: int, load: Load) -> Rehearsal | Failure:
    """``rehearse`` a rank. What it raises, the start of this rank would raise: that is what was asked for.

    But not what the rehearsal itself raises: that is an error of this tool.
    """
    try:
        return rehearse(config, world_size, rank, load)
    except UsageError:
        raise
    except Exception as error:
        frame = traceback.extract_tb(error.__traceback__)[-1]
        if Path(frame.filename).parent == Path(__file__).parent:
            raise
        text = " ".join(str(error).split())
        return Failure(rank, f"{type(error).__name__}: {text}", f"{frame.filename}:{frame.lineno}")
