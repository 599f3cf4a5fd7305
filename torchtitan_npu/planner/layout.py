"""A job's layout: its degrees, their name, and the same job with others."""

from __future__ import annotations

import copy
import math

from torchtitan_npu.config.job_config import JobConfig
from torchtitan_npu.errors import UsageError

DEGREES = {
    "dp_replicate": "data_parallel_replicate_degree",
    "dp_shard": "data_parallel_shard_degree",
    "cp": "context_parallel_degree",
    "tp": "tensor_parallel_degree",
    "pp": "pipeline_parallel_degree",
    "ep": "expert_parallel_degree",
}
"""The degrees of a layout, by their keys in the job's section ``parallelism``; all but EP multiply to the ranks."""


def degrees(config: JobConfig) -> dict[str, int]:
    return {name: getattr(config.parallelism, key) for name, key in DEGREES.items()}


def layout_name(config: JobConfig) -> str:
    """``PP2 TP4 EP64 FSDP16``."""
    names = {"pp": "PP", "dp_replicate": "DP", "dp_shard": "FSDP", "cp": "CP", "tp": "TP", "ep": "EP"}
    found = degrees(config)
    return " ".join(f"{label}{found[name]}" for name, label in names.items() if found[name] > 1) or "one rank"


def has_degrees(config: JobConfig) -> bool:
    """Whether its degrees are numbers of ranks; if not, :func:`check_job` names the one that is none."""
    found = degrees(config) | {"etp": config.parallelism.expert_tensor_parallel_degree}
    return all(degree >= 1 or (name, degree) == ("dp_shard", -1) for name, degree in found.items())


def world_size(config: JobConfig) -> int:
    """Of a job with all its degrees."""
    return math.prod(degree for name, degree in degrees(config).items() if name != "ep")


def world_size_of(config: JobConfig) -> int:
    """How many ranks the file is for, if it leaves no degree open."""
    if config.parallelism.data_parallel_shard_degree == -1 and has_degrees(config):
        raise UsageError("parallelism.data_parallel_shard_degree is -1: say --world-size")
    return world_size(config)


def with_all_degrees(config: JobConfig, world_size: int) -> JobConfig:
    """``config`` with the shards that ``data_parallel_shard_degree = -1`` comes to; what does not divide stays."""
    config = copy.deepcopy(config)
    if config.parallelism.data_parallel_shard_degree == -1 and has_degrees(config):
        others = math.prod(degree for name, degree in degrees(config).items() if name not in ("ep", "dp_shard"))
        if world_size % others == 0:
            config.parallelism.data_parallel_shard_degree = world_size // others
    return config


def with_layout(config: JobConfig, layout: dict[str, int]) -> JobConfig:
    """``config`` with these degrees; where it says which layers are where, and what comes when, that is
    for its own degrees only."""
    changed = copy.deepcopy(config)
    p = changed.parallelism
    for name, degree in layout.items():
        setattr(p, DEGREES[name], degree)
    if p.expert_tensor_parallel_degree > 1:  # 1, or as much as the tensor's
        p.expert_tensor_parallel_degree = p.tensor_parallel_degree
    if p.pipeline_parallel_degree != config.parallelism.pipeline_parallel_degree:
        p.module_fqns_per_model_part = p.pipeline_parallel_layers_per_stage = None
        p.pipeline_parallel_schedule_csv = ""
        # TorchTitan's defaults: the embedding and the output count as a layer each
        p.pipeline_parallel_first_stage_less_layers = p.pipeline_parallel_last_stage_less_layers = 1
    return changed
