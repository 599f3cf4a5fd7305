"""A job's layout: its parallel degrees, their name, and the same job with other degrees."""

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
"""The degrees of a layout and their keys in the section ``parallelism``. All but EP multiply to the world size."""


def degrees(config: JobConfig) -> dict[str, int]:
    return {name: getattr(config.parallelism, key) for name, key in DEGREES.items()}


def layout_name(config: JobConfig) -> str:
    """Return for example ``PP2 FSDP16 TP4 EP64``."""
    names = {"pp": "PP", "dp_replicate": "DP", "dp_shard": "FSDP", "cp": "CP", "tp": "TP", "ep": "EP"}
    found = degrees(config)
    return " ".join(f"{label}{found[name]}" for name, label in names.items() if found[name] > 1) or "one rank"


def has_valid_degrees(config: JobConfig) -> bool:
    """Return whether every degree is a number of ranks. If not, :func:`check_job` names the wrong one."""
    found = degrees(config) | {"etp": config.parallelism.expert_tensor_parallel_degree}
    return all(degree >= 1 or (name, degree) == ("dp_shard", -1) for name, degree in found.items())


def world_size(config: JobConfig) -> int:
    """Return the number of ranks of a job whose degrees are all set."""
    return math.prod(degree for name, degree in degrees(config).items() if name != "ep")


def world_size_of(config: JobConfig) -> int:
    """Return the number of ranks of a job, or raise :class:`UsageError` if the file leaves it open."""
    if config.parallelism.data_parallel_shard_degree == -1 and has_valid_degrees(config):
        raise UsageError("parallelism.data_parallel_shard_degree is -1: set --world-size")
    return world_size(config)


def with_all_degrees(config: JobConfig, world_size: int) -> JobConfig:
    """Return ``config`` with the value that ``data_parallel_shard_degree = -1`` stands for, if the degrees divide."""
    config = copy.deepcopy(config)
    if config.parallelism.data_parallel_shard_degree == -1 and has_valid_degrees(config):
        others = math.prod(degree for name, degree in degrees(config).items() if name not in ("ep", "dp_shard"))
        if world_size % others == 0:
            config.parallelism.data_parallel_shard_degree = world_size // others
    return config


def with_layout(config: JobConfig, layout: dict[str, int]) -> JobConfig:
    """Return ``config`` with the degrees of ``layout``. Pipeline splits and schedules are dropped if PP changes."""
    changed = copy.deepcopy(config)
    p = changed.parallelism
    for name, degree in layout.items():
        setattr(p, DEGREES[name], degree)
    if p.expert_tensor_parallel_degree > 1:  # TorchTitan allows 1 or the TP degree
        p.expert_tensor_parallel_degree = p.tensor_parallel_degree
    if p.pipeline_parallel_degree != config.parallelism.pipeline_parallel_degree:
        p.module_fqns_per_model_part = p.pipeline_parallel_layers_per_stage = None
        p.pipeline_parallel_schedule_csv = ""
        # TorchTitan's defaults: embedding and output count as one layer each.
        p.pipeline_parallel_first_stage_less_layers = p.pipeline_parallel_last_stage_less_layers = 1
    return changed
