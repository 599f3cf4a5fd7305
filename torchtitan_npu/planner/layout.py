"""A job's layout: its degrees, the parameters of its model, and the work of each pipeline rank."""

from __future__ import annotations

import copy
import functools
import itertools
import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn
from torch.distributed.pipelining.schedules import (
    PipelineScheduleSingle,
    ScheduleDualPipeV,
    ScheduleZBVZeroBubble,
    get_schedule_class,
)
from torchtitan.protocols.train_spec import get_train_spec

from torchtitan_npu.config.job_config import JobConfig
from torchtitan_npu.config.pipeline import pipeline_stages, stage_count
from torchtitan_npu.errors import UsageError
from torchtitan_npu.torch_internals.pipelining import Action, schedule_actions

DEGREES = {
    "dp_replicate": "data_parallel_replicate_degree",
    "dp_shard": "data_parallel_shard_degree",
    "cp": "context_parallel_degree",
    "tp": "tensor_parallel_degree",
    "pp": "pipeline_parallel_degree",
    "ep": "expert_parallel_degree",
}
"""The degrees of a layout and their keys in the section ``parallelism``. All but EP multiply to the world size."""

DURATIONS = {"F": 1, "I": 1, "W": 1, "B": 2}
"""Assumed duration of each computation of a pipeline, in forward passes."""


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


def world_size_of(config: JobConfig) -> int:
    """Return the number of ranks of a job, or raise :class:`UsageError` if the file leaves it open."""
    if config.parallelism.data_parallel_shard_degree == -1 and has_valid_degrees(config):
        raise UsageError("parallelism.data_parallel_shard_degree is -1: set --world-size")
    return math.prod(degree for name, degree in degrees(config).items() if name != "ep")


def with_all_degrees(config: JobConfig, world_size: int) -> JobConfig:
    """Return ``config`` with the value that ``data_parallel_shard_degree = -1`` stands for, if the degrees divide."""
    config = copy.deepcopy(config)
    if config.parallelism.data_parallel_shard_degree == -1 and has_valid_degrees(config):
        product = math.prod(degree for name, degree in degrees(config).items() if name not in ("ep", "dp_shard"))
        if world_size % product == 0:
            config.parallelism.data_parallel_shard_degree = world_size // product
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


def mesh_sizes(config: JobConfig) -> dict[str, int]:
    """Return the size of each dimension of TorchTitan's meshes by name; ``loss`` is all data-parallel ranks."""
    found = degrees(config)
    etp = config.parallelism.expert_tensor_parallel_degree if found["ep"] > 1 else 1
    fsdp = found["dp_shard"] * found["cp"]
    efsdp = fsdp * found["tp"] // (found["ep"] * etp) if found["ep"] > 1 else 1
    loss = found.pop("dp_shard") * found["dp_replicate"] * found["cp"]
    return found | {"etp": etp, "fsdp": fsdp, "efsdp": efsdp, "loss": loss}


def uses_fsdp(config: JobConfig) -> bool:
    """Return whether FSDP wraps the model.

    It also replicates a TP or PP model: see :mod:`torchtitan_npu.distributed.parallel_dims`.
    """
    sizes = mesh_sizes(config)
    return sizes["fsdp"] > 1 or sizes["ep"] > 1 or (sizes["dp_replicate"] > 1 and max(sizes["tp"], sizes["pp"]) > 1)


# --- parameters ---


@dataclass(frozen=True)
class Size:
    """Parameter counts of a module: those of experts, and the remaining (dense)."""

    dense: int
    experts: int

    def __add__(self, other: Size) -> Size:
        return Size(self.dense + other.dense, self.experts + other.experts)

    @property
    def total(self) -> int:
        return self.dense + self.experts


def model_args(config: JobConfig) -> Any:
    """Return the registered arguments of the job's flavor. Do not change them."""
    return get_train_spec(config.model.name).model_args[config.model.flavor]


def sizes(model: nn.Module) -> dict[str, Size]:
    """Return the size of each module of a pipeline stage (``tok_embeddings``, ``layers.0``, ...).

    Tied weights are counted in the first module that has them.
    """

    def module_of(parameter: str) -> str:
        first, second, *_ = f"{parameter}.".split(".")
        return f"{first}.{second}" if first == "layers" else first

    found = {module_of(name): Size(0, 0) for name, _ in model.named_parameters(remove_duplicate=False)}
    for name, parameter in model.named_parameters():
        experts = parameter.numel() if ".experts." in name else 0
        found[module_of(name)] += Size(parameter.numel() - experts, experts)
    return found


# --- pipeline schedules ---


def modules_per_rank(config: JobConfig, layers: int) -> list[list[str]]:
    """Return the modules of each pipeline rank, split as TorchTitan does: ``tok_embeddings``, ``layers.0``, ..."""
    parts = pipeline_stages(config, layers)
    ranks = range(config.parallelism.pipeline_parallel_degree)
    return [[name for stage in stages_of_rank(config, rank, len(parts)) for name in parts[stage]] for rank in ranks]


def stages_of_rank(config: JobConfig, rank: int, stages: int) -> Sequence[int]:
    """Return the indices of the stages of a pipeline rank, as TorchTitan assigns them."""
    pp = config.parallelism.pipeline_parallel_degree
    return (rank, 2 * pp - 1 - rank) if is_v_schedule(config) else range(rank, stages, pp)


def has_one_stage_per_rank(config: JobConfig) -> bool:
    return issubclass(get_schedule_class(config.parallelism.pipeline_parallel_schedule), PipelineScheduleSingle)


def is_v_schedule(config: JobConfig) -> bool:
    """Return whether the first rank has the first and the last stage."""
    schedule = get_schedule_class(config.parallelism.pipeline_parallel_schedule)
    return config.parallelism.pipeline_parallel_degree > 1 and schedule in (ScheduleZBVZeroBubble, ScheduleDualPipeV)


def actions_per_rank(config: JobConfig) -> list[list[Action]]:
    """Return the computations of each pipeline rank, in order."""
    p = config.parallelism
    schedule = get_schedule_class(p.pipeline_parallel_schedule)
    if p.module_fqns_per_model_part is not None:
        stages = len(p.module_fqns_per_model_part)
    else:
        stages = stage_count(config, schedule, model_args(config).n_layers)
    microbatches = config.training.local_batch_size // p.pipeline_parallel_microbatch_size
    return _actions(schedule, p.pipeline_parallel_degree, stages, microbatches, p.pipeline_parallel_schedule_csv or "")


@functools.cache
def _actions(schedule: Any, ranks: int, stages: int, microbatches: int, csv: str) -> list[list[Action]]:
    try:
        table = schedule_actions(schedule, ranks, stages, microbatches, csv)
    except (AssertionError, RuntimeError, ValueError) as error:
        if not csv:
            raise
        raise UsageError(f"parallelism.pipeline_parallel_schedule_csv {csv}: {error}") from error
    if csv or not issubclass(schedule, PipelineScheduleSingle):
        return table
    numbered: list[list[Action]] = []
    for actions in table:  # in torch's table for 1F1B the last stage begins with microbatch 1: number them in order
        seen: Counter[str] = Counter()
        numbered.append([])
        for action in actions:
            numbered[-1].append(action._replace(microbatch=seen[action.computation]))
            seen[action.computation] += 1
    return numbered


def bubble(config: JobConfig) -> float:
    """Return the duration of a pipelined step relative to the work of its busiest rank.

    Stages are assumed to be equal, and a backward pass to take twice as long as a forward pass. An action begins when
    its rank is free and its input has arrived.
    """
    if config.parallelism.pipeline_parallel_degree == 1:
        return 1.0
    ranks = actions_per_rank(config)
    last = max(action.stage for actions in ranks for action in actions)
    ended: dict[tuple[int, bool, int], int] = {}
    """When each pass ends, by stage, whether it is a forward pass, and microbatch."""
    free = [0] * len(ranks)
    remaining = [list(reversed(actions)) for actions in ranks]
    while any(remaining):
        before = sum(map(len, remaining))
        for rank, actions in enumerate(remaining):
            while actions:
                stage, computation, microbatch = actions[-1]
                if computation == "F":
                    needs = (stage - 1, True, microbatch) if stage > 0 else None
                elif computation == "W":
                    needs = stage, False, microbatch
                else:
                    needs = (stage, True, microbatch) if stage == last else (stage + 1, False, microbatch)
                if needs is not None and needs not in ended:
                    break
                free[rank] = max(free[rank], ended[needs] if needs else 0) + DURATIONS[computation]
                if computation != "W":  # no action depends on the gradients of weights
                    ended[stage, computation == "F", microbatch] = free[rank]
                actions.pop()
        assert sum(map(len, remaining)) < before, "the schedule deadlocks: every rank waits for another"
    return max(free) / max(sum(DURATIONS[action.computation] for action in actions) for actions in ranks)


def gathers_per_batch(config: JobConfig, rank: int) -> int:
    """Return how often FSDP gathers a layer of the first stage of ``rank``, if it reshards after each forward pass.

    Between two backward passes a pipeline keeps the gathered layer, also for a forward pass in between.
    """
    if config.parallelism.pipeline_parallel_degree == 1:
        return 2
    actions = actions_per_rank(config)[rank]
    count, gathered = 0, False
    for action in actions:
        if action.stage == actions[0].stage and action.computation != "W":
            count += not gathered
            gathered = action.computation != "F"
    return count


def microbatches_in_flight(config: JobConfig, rank: int) -> float:
    """Return the most microbatches whose activations ``rank`` holds at a time; a stage counts for its part of one."""
    if config.parallelism.pipeline_parallel_degree == 1:
        return 1
    actions = actions_per_rank(config)[rank]
    steps = (1 if action.computation == "F" else -(action.computation in "BW") for action in actions)
    return max(itertools.accumulate(steps)) / len({action.stage for action in actions})
