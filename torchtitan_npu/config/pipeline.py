"""The pipeline keys of ``[parallelism]``: stages of the model, and what torch and TorchTitan require of a schedule."""

from __future__ import annotations

import csv
import math
import os
import re
from itertools import chain

from torch.distributed.pipelining.schedules import (
    BACKWARD_INPUT,
    BACKWARD_WEIGHT,
    FORWARD,
    PipelineScheduleSingle,
    ScheduleDualPipeV,
    ScheduleInterleavedZeroBubble,
    ScheduleZBVZeroBubble,
    get_schedule_class,
)
from torchtitan.distributed.pipeline_parallel import generate_llm_fqn_per_model_part

from torchtitan_npu.config.job_config import JobConfig
from torchtitan_npu.errors import UsageError

SPLIT_BACKWARD = (ScheduleInterleavedZeroBubble, ScheduleZBVZeroBubble)
"""Schedules that compute the gradients of inputs and of weights in separate passes for all microbatches; DualPipeV
does so for some. With ZBVZeroBubble, selective activation checkpointing fails in the first step. Full checkpointing
recomputes a MoE layer of DeepSeek-V3.2 18 times, so that TorchTitan's expert balancing miscounts the tokens."""
SCHEDULE_ACTIONS = "|".join(kind.value for kind in type(FORWARD))
"""The action types of a schedule file: ``F``, ``I``, ``W``, ``B``, ``SEND_F``, ..."""


def schedule_class(config: JobConfig) -> type:
    """Return torch's class of ``parallelism.pipeline_parallel_schedule``."""
    name = config.parallelism.pipeline_parallel_schedule
    try:
        return get_schedule_class(name)
    except ValueError as error:
        raise UsageError(f"parallelism.pipeline_parallel_schedule {name!r}: {error}") from error


def split_backward(config: JobConfig) -> tuple[str, bool, bool]:
    """Return a description of the schedule for messages about those that split the backward pass, and if it does.

    The second value is true if it does so for all microbatches, the third if it does for some.
    """
    p = config.parallelism
    if file := p.pipeline_parallel_schedule_csv:  # it replaces the named schedule
        key = f"parallelism.pipeline_parallel_schedule_csv {file}"
        always = sometimes = _file_splits_backward(file, key)
    else:
        key, schedule = f"parallelism.pipeline_parallel_schedule {p.pipeline_parallel_schedule}", schedule_class(config)
        always = schedule in SPLIT_BACKWARD
        sometimes = always or schedule is ScheduleDualPipeV
    return f"{key}, which computes the gradients of inputs and of weights separately", always, sometimes


def _file_splits_backward(file: str, key: str) -> bool:
    """Return whether a schedule file has separate backward passes for inputs (``I``) or weights (``W``).

    The file has a row of actions, such as ``0F1`` or ``(1F1;1B0)OVERLAP_F_B``, for each rank. torch runs the actions
    as listed: it does not merge ``I`` and a following ``W`` into one pass (``B``).
    """
    if not os.path.isfile(file):
        raise UsageError(f"{key}: no such file")
    with open(file, newline="") as rows:
        cells = [cell.strip() for cell in chain.from_iterable(csv.reader(rows))]
    kinds = set()
    for cell in filter(None, cells):
        grouped = re.fullmatch(rf"\((.*)\)({SCHEDULE_ACTIONS})", cell)
        for action in grouped[1].split(";") if grouped else [cell]:
            if not (found := re.fullmatch(rf"\d+({SCHEDULE_ACTIONS})\d*", action.strip())):
                raise UsageError(f"{key}: invalid action {cell!r}")
            kinds.add(found[1])
    return bool(kinds & {BACKWARD_INPUT.value, BACKWARD_WEIGHT.value})


def pipeline_stages(config: JobConfig, layers: int) -> list[list[str]]:
    """Return the modules of each stage as TorchTitan splits the model: ``tok_embeddings``, ``layers.0``, ..."""
    p = config.parallelism
    schedule = get_schedule_class(p.pipeline_parallel_schedule)
    count = stage_count(config, schedule, layers) if p.pipeline_parallel_degree > 1 else 1
    if p.module_fqns_per_model_part is not None:
        return p.module_fqns_per_model_part
    weights = p.pipeline_parallel_first_stage_less_layers, p.pipeline_parallel_last_stage_less_layers
    try:
        return generate_llm_fqn_per_model_part(count, layers, *weights)
    except ValueError as error:
        raise UsageError(f"parallelism.pipeline_parallel_degree {p.pipeline_parallel_degree}: {error}") from error


def stage_count(config: JobConfig, schedule: type, layers: int) -> int:
    """Return the number of stages. TorchTitan counts the embedding and the output as layers."""
    p = config.parallelism
    ranks, name = p.pipeline_parallel_degree, p.pipeline_parallel_schedule
    single = issubclass(schedule, PipelineScheduleSingle)
    if (per_stage := p.pipeline_parallel_layers_per_stage) is None:
        return ranks if single else 2 * ranks
    counted = layers + p.pipeline_parallel_first_stage_less_layers + p.pipeline_parallel_last_stage_less_layers
    stages = math.ceil(counted / per_stage)
    each, left = divmod(stages, ranks)
    two = issubclass(schedule, (ScheduleZBVZeroBubble, ScheduleDualPipeV))
    if left or (single and each != 1) or (not single and each < 2) or (two and each != 2):
        needed = "one" if single else "two" if two else "the same number, at least two,"
        raise UsageError(
            f"parallelism.pipeline_parallel_layers_per_stage {per_stage} splits {layers} layers, the embedding and the "
            f"output into {stages} stages; {name} needs {needed} on each of {ranks} pipeline ranks"
        )
    return stages
