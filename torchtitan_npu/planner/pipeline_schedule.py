"""What a pipeline's schedule does, by torch's own table of actions: how long its ranks wait, and what they hold."""

from __future__ import annotations

import functools
import itertools
from collections import Counter
from collections.abc import Iterable, Iterator
from types import SimpleNamespace
from typing import Any, NamedTuple

from torch import nn
from torch.distributed.pipelining.schedules import PipelineScheduleSingle, _PipelineScheduleRuntime, get_schedule_class

from torchtitan_npu.config.job_config import JobConfig
from torchtitan_npu.config.pipeline import stage_count
from torchtitan_npu.errors import UsageError
from torchtitan_npu.planner.parameters import model_args

LENGTHS = {"F": 1, "I": 1, "W": 1, "B": 2}
"""Of a stage's forward pass, of the gradients of its inputs, of its weights, and of both; in forward passes."""


class Action(NamedTuple):
    stage: int
    kind: str
    """One of :data:`LENGTHS`."""
    microbatch: int


def order(config: JobConfig) -> list[list[Action]]:
    """By rank of the pipeline: its actions, one after the other."""
    p = config.parallelism
    schedule = get_schedule_class(p.pipeline_parallel_schedule)
    if p.module_fqns_per_model_part is not None:
        stages = len(p.module_fqns_per_model_part)
    else:
        stages = stage_count(config, schedule, model_args(config).n_layers)
    microbatches = config.training.local_batch_size // p.pipeline_parallel_microbatch_size
    csv = p.pipeline_parallel_schedule_csv or ""
    return _order(schedule, csv, p.pipeline_parallel_degree, stages, microbatches)


@functools.cache
def _order(schedule: Any, csv: str, ranks: int, stages: int, microbatches: int) -> list[list[Action]]:
    stage = SimpleNamespace(num_stages=stages, group_size=ranks, group_rank=0, submod=nn.Identity())
    if csv:
        made: Any = _PipelineScheduleRuntime([stage] * (stages // ranks), microbatches)  # type: ignore[list-item]
        try:
            made._load_csv(csv)
        except (AssertionError, RuntimeError, ValueError) as error:  # torch's, of a schedule that cannot be
            raise UsageError(f"parallelism.pipeline_parallel_schedule_csv {csv}: {error}") from error
    elif issubclass(schedule, PipelineScheduleSingle):
        made = schedule(stage, microbatches)  # type: ignore[arg-type]
        return [_in_order(_actions(made.pipeline_order[rank])) for rank in range(ranks)]
    else:
        made = schedule([stage] * (stages // ranks), microbatches)
    return [list(_actions(made.pipeline_order[rank])) for rank in range(ranks)]


def _actions(row: list[Any]) -> Iterator[Action]:
    for action in row:
        if action is None:  # the table is in steps of equal length, and here a rank waits
            continue
        if action.sub_actions:  # a forward and a backward pass at a time: one after the other, as nothing overlaps
            yield from _actions(list(action.sub_actions))
        elif action.computation_type.value in LENGTHS:
            yield Action(action.stage_index, action.computation_type.value, action.microbatch_index)


def _in_order(actions: Iterable[Action]) -> list[Action]:
    """``actions`` with microbatches numbered as they come: torch's table of 1F1B has the last stage begin with 1."""
    seen: Counter[str] = Counter()
    numbered = []
    for action in actions:
        numbered.append(action._replace(microbatch=seen[action.kind]))
        seen[action.kind] += 1
    return numbered


def bubble(config: JobConfig) -> float:
    """How many times longer a pipeline takes than one of its ranks works: its stages equal, a backward pass twice as
    long as a forward one."""
    if config.parallelism.pipeline_parallel_degree == 1:
        return 1.0
    ranks = order(config)
    work = max(sum(LENGTHS[action.kind] for action in actions) for actions in ranks)
    return _makespan(ranks) / work


def _makespan(ranks: list[list[Action]]) -> float:
    """When the last action ends; each begins when its rank is free and its neighbour has sent what it needs."""
    last = max(action.stage for actions in ranks for action in actions)
    ended: dict[tuple[int, bool, int], int] = {}
    free = [0] * len(ranks)
    left = [list(reversed(actions)) for actions in ranks]
    while any(left):
        before = len(ended), sum(map(len, left))
        for rank, actions in enumerate(left):
            while actions:
                stage, kind, microbatch = actions[-1]
                needs = _needed(actions[-1], last)
                if needs is not None and needs not in ended:
                    break
                free[rank] = max(free[rank], ended[needs] if needs else 0) + LENGTHS[kind]
                if kind != "W":  # which nobody waits for
                    ended[stage, kind == "F", microbatch] = free[rank]
                actions.pop()
        assert (len(ended), sum(map(len, left))) != before, "every rank waits for another"
    return max(free)


def _needed(action: Action, last: int) -> tuple[int, bool, int] | None:
    """By stage, whether it is a forward pass, and microbatch: what has to have ended before ``action``."""
    stage, kind, microbatch = action
    if kind == "F":
        return (stage - 1, True, microbatch) if stage > 0 else None
    if kind == "W":
        return stage, False, microbatch
    return (stage, True, microbatch) if stage == last else (stage + 1, False, microbatch)


def gathers(config: JobConfig, rank: int) -> int:
    """How often FSDP gathers a layer of the first stage of ``rank`` for a batch, if it gives it back after each forward
    pass.

    Between two backward passes a pipeline keeps what is gathered, also for a forward pass in between.
    """
    if config.parallelism.pipeline_parallel_degree == 1:
        return 2
    actions = order(config)[rank]
    count, gathered = 0, False
    for action in actions:
        if action.stage == actions[0].stage and action.kind != "W":
            count += not gathered
            gathered = action.kind != "F"
    return count


def under_way(config: JobConfig, rank: int) -> float:
    """Microbatches whose activations ``rank`` holds at a time, at the most; a part where it has only some stages of
    one."""
    if config.parallelism.pipeline_parallel_degree == 1:
        return 1
    actions = order(config)[rank]
    steps = (1 if action.kind == "F" else -(action.kind in "BW") for action in actions)
    return max(itertools.accumulate(steps)) / len({action.stage for action in actions})
