"""Pipeline schedules: which modules a rank has, how long ranks are idle, and how many microbatches they hold."""

from __future__ import annotations

import functools
import itertools
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

from torch.distributed.pipelining.schedules import (
    PipelineScheduleSingle,
    ScheduleDualPipeV,
    ScheduleZBVZeroBubble,
    get_schedule_class,
)

from torchtitan_npu.config.job_config import JobConfig
from torchtitan_npu.config.pipeline import pipeline_stages, stage_count
from torchtitan_npu.errors import UsageError
from torchtitan_npu.planner.parameters import model_args
from torchtitan_npu.torch_internals.pipelining import Action, schedule_actions

DURATIONS = {"F": 1, "I": 1, "W": 1, "B": 2}
"""Assumed duration of each computation, in forward passes."""


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
    single = not csv and issubclass(schedule, PipelineScheduleSingle)
    return [_numbered(actions) for actions in table] if single else table


def _numbered(actions: Iterable[Action]) -> list[Action]:
    """Number the microbatches in order. In torch's table for 1F1B the last stage begins with microbatch 1."""
    seen: Counter[str] = Counter()
    numbered = []
    for action in actions:
        numbered.append(action._replace(microbatch=seen[action.computation]))
        seen[action.computation] += 1
    return numbered


def bubble(config: JobConfig) -> float:
    """Return the duration of a pipelined step relative to the work of its busiest rank.

    Stages are assumed to be equal, and a backward pass to take twice as long as a forward pass.
    """
    if config.parallelism.pipeline_parallel_degree == 1:
        return 1.0
    ranks = actions_per_rank(config)
    work = max(sum(DURATIONS[action.computation] for action in actions) for actions in ranks)
    return _makespan(ranks) / work


def _makespan(ranks: list[list[Action]]) -> float:
    """Return when the last action ends. An action begins when its rank is free and its input has arrived."""
    last = max(action.stage for actions in ranks for action in actions)
    ended: dict[tuple[int, bool, int], int] = {}
    free = [0] * len(ranks)
    left = [list(reversed(actions)) for actions in ranks]
    while any(left):
        before = len(ended), sum(map(len, left))
        for rank, actions in enumerate(left):
            while actions:
                stage, computation, microbatch = actions[-1]
                needs = _dependency(actions[-1], last)
                if needs is not None and needs not in ended:
                    break
                free[rank] = max(free[rank], ended[needs] if needs else 0) + DURATIONS[computation]
                if computation != "W":  # no action depends on the gradients of weights
                    ended[stage, computation == "F", microbatch] = free[rank]
                actions.pop()
        assert (len(ended), sum(map(len, left))) != before, "the schedule deadlocks: every rank waits for another"
    return max(free)


def _dependency(action: Action, last: int) -> tuple[int, bool, int] | None:
    """Return what must end before ``action``, as (stage, whether it is a forward pass, microbatch)."""
    stage, computation, microbatch = action
    if computation == "F":
        return (stage - 1, True, microbatch) if stage > 0 else None
    if computation == "W":
        return stage, False, microbatch
    return (stage, True, microbatch) if stage == last else (stage + 1, False, microbatch)


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
