"""Whether a pipeline's schedule can run a job's batches and layers, by the rules of torch and of TorchTitan."""

from __future__ import annotations

import csv
import math
import os
from itertools import chain

from torch.distributed.pipelining.schedules import (
    BACKWARD_INPUT,
    BACKWARD_WEIGHT,
    PipelineScheduleSingle,
    Schedule1F1B,
    ScheduleDualPipeV,
    ScheduleInterleaved1F1B,
    ScheduleInterleavedZeroBubble,
    ScheduleZBVZeroBubble,
    _Action,
    get_schedule_class,
)
from torchtitan.distributed.pipeline_parallel import generate_llm_fqn_per_model_part

from torchtitan_npu.compile.regions import compiled_here
from torchtitan_npu.config.job_config import JobConfig
from torchtitan_npu.errors import UsageError

TWO_BACKWARD_PASSES = (ScheduleInterleavedZeroBubble, ScheduleZBVZeroBubble)
"""One for inputs, one for weights. Seen with the second: where single operators are checkpointed torch stops at the
first step; where blocks are, a MoE layer of DeepSeek-V3.2 is computed 18 times more, and TorchTitan, which halves its
count of tokens for one time more, balances experts otherwise than on one rank. DualPipeV has two
for some of the microbatches."""


def check_pipeline(config: JobConfig, layers: int) -> None:
    """Raise :class:`UsageError` for what the Trainer would find out after it has started."""
    p, batch = config.parallelism, config.training.local_batch_size
    name = p.pipeline_parallel_schedule
    try:
        schedule = get_schedule_class(name)
    except ValueError as error:
        raise UsageError(f"parallelism.pipeline_parallel_schedule {name!r}: {error}") from error
    if batch % p.pipeline_parallel_microbatch_size:
        raise UsageError(
            f"training.local_batch_size {batch} is no multiple of "
            f"parallelism.pipeline_parallel_microbatch_size {p.pipeline_parallel_microbatch_size}"
        )
    if file := p.pipeline_parallel_schedule_csv:  # which says by itself what comes when
        given = f"parallelism.pipeline_parallel_schedule_csv {file}"
        always = sometimes = _has_two_backward_passes(file, given)
    else:
        given = f"parallelism.pipeline_parallel_schedule {name}"
        always = schedule in TWO_BACKWARD_PASSES
        sometimes = always or schedule is ScheduleDualPipeV
    if always and config.activation_checkpoint.mode in ("selective", "full"):
        raise UsageError(
            f'activation_checkpoint.mode must be "none" with {given}, which has the gradients of inputs and of weights '
            "computed apart: a block would be computed again for each weight"
        )
    if sometimes and compiled_here(config):
        raise UsageError(
            f"compile.enable must be false with {given}, which has the gradients of inputs and of weights computed "
            "apart: the backward pass of a compiled region, which is one, would run twice"
        )
    microbatches = batch // p.pipeline_parallel_microbatch_size
    made_of = (
        f"training.local_batch_size {batch} / parallelism.pipeline_parallel_microbatch_size "
        f"{p.pipeline_parallel_microbatch_size} = {microbatches}"
    )
    if config.validation.enable and config.validation.local_batch_size % microbatches:
        raise UsageError(
            f"validation.local_batch_size {config.validation.local_batch_size} is no multiple of {made_of} "
            "microbatches, which a batch of validation is split into too"
        )
    parts = model_parts(config, layers)
    if config.dsa.stage == "warmup":
        _check_indexers(parts, p.module_fqns_per_model_part is not None)
    if file:
        return
    stages = len(parts)
    if schedule in (Schedule1F1B, ScheduleDualPipeV) and microbatches < stages:
        raise UsageError(f"{made_of} microbatches are too few for {name}: it takes one for each of the {stages} stages")
    rounds = max(1, microbatches // p.pipeline_parallel_degree)
    if schedule in (ScheduleInterleaved1F1B, ScheduleInterleavedZeroBubble) and microbatches % rounds:
        raise UsageError(
            f"{made_of} microbatches are not for {name}: with {p.pipeline_parallel_degree} pipeline ranks it takes a "
            f"multiple of {rounds}"
        )


def _check_indexers(parts: list[list[str]], listed: bool) -> None:
    mend = "parallelism.module_fqns_per_model_part must give it one"
    if not listed:
        mend = (
            "parallelism.pipeline_parallel_first_stage_less_layers = 0 and pipeline_parallel_last_stage_less_layers "
            "= 0 give it one, or fewer stages do"
        )
    for number, names in enumerate(parts, 1):
        if not any(name.startswith("layers.") for name in names):
            raise UsageError(
                f'dsa.stage = "warmup" trains the indexers of layers only, and stage {number} of {len(parts)} has no '
                f"layer ({', '.join(names)}): {mend}"
            )


def model_parts(config: JobConfig, layers: int) -> list[list[str]]:
    """The modules of each stage, as TorchTitan shares them out: ``tok_embeddings``, ``layers.0``, ..."""
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


def _has_two_backward_passes(file: str, given: str) -> bool:
    """Whether a schedule in a file, a row of actions such as 0F1 for each rank, has one for inputs (I), or weights (W).

    torch runs the actions as they are listed: where W comes right after I it does not make one pass (B) of them.
    """
    if not os.path.isfile(file):
        raise UsageError(f"{given}: no such file")
    with open(file, newline="") as rows:
        try:
            actions = [_Action.from_str(cell) for cell in chain.from_iterable(csv.reader(rows))]
        except RuntimeError as error:  # torch's, of what is no action
            raise UsageError(f"{given}: {error}") from error
    single = chain.from_iterable(action.sub_actions or [action] for action in actions if action is not None)
    return any(action.computation_type in (BACKWARD_INPUT, BACKWARD_WEIGHT) for action in single)


def stage_count(config: JobConfig, schedule: type, layers: int) -> int:
    """How many the model is cut into; TorchTitan counts the embedding and the output as so many layers, too."""
    p = config.parallelism
    ranks, name, key = p.pipeline_parallel_degree, p.pipeline_parallel_schedule, "pipeline_parallel_layers_per_stage"
    single = issubclass(schedule, PipelineScheduleSingle)
    if (per_stage := p.pipeline_parallel_layers_per_stage) is None:
        return ranks if single else 2 * ranks
    counted = layers + p.pipeline_parallel_first_stage_less_layers + p.pipeline_parallel_last_stage_less_layers
    stages = math.ceil(counted / per_stage)
    each, left = divmod(stages, ranks)
    two = issubclass(schedule, (ScheduleZBVZeroBubble, ScheduleDualPipeV))
    if left or (single and each != 1) or (not single and each < 2) or (two and each != 2):
        takes = "one" if single else "two" if two else "two or more, as many each"
        raise UsageError(
            f"parallelism.{key} {per_stage} makes {stages} stages of {layers} layers, the embedding and the output; "
            f"{name} takes {takes} on each of {ranks} pipeline ranks"
        )
    return stages
