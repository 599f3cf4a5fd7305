"""The pipeline keys of ``[parallelism]``: stages of the model, and what torch and TorchTitan require of a schedule."""

from __future__ import annotations

import csv
import math
import os
import re
from itertools import chain
from typing import TYPE_CHECKING

import torch
from torch.distributed.pipelining.schedules import (
    BACKWARD_INPUT,
    BACKWARD_WEIGHT,
    FORWARD,
    PipelineScheduleSingle,
    Schedule1F1B,
    ScheduleDualPipeV,
    ScheduleInterleaved1F1B,
    ScheduleInterleavedZeroBubble,
    ScheduleZBVZeroBubble,
    get_schedule_class,
)
from torchtitan.distributed.pipeline_parallel import generate_llm_fqn_per_model_part

from torchtitan_npu.compile.block_regions import compiles_blocks
from torchtitan_npu.config.check_helpers import check_adapted, check_not_on_cpu
from torchtitan_npu.config.job_config import JobConfig
from torchtitan_npu.errors import UsageError

if TYPE_CHECKING:
    from torchtitan_npu.config.preflight import JobContext

SPLIT_BACKWARD = (ScheduleInterleavedZeroBubble, ScheduleZBVZeroBubble)
"""Schedules that compute the gradients of inputs and of weights in separate passes for all microbatches; DualPipeV
does so for some. With ZBVZeroBubble, selective activation checkpointing fails in the first step. Full checkpointing
recomputes a MoE layer of DeepSeek-V3.2 18 times, so that TorchTitan's expert balancing miscounts the tokens."""
SCHEDULE_ACTIONS = "|".join(kind.value for kind in type(FORWARD))
"""The action types of a schedule file: ``F``, ``I``, ``W``, ``B``, ``SEND_F``, ..."""


def check_pipeline(job: JobContext) -> None:
    """Check the pipeline keys against the model, if the job has pipeline parallelism; the name of a schedule always."""
    schedule_class(job.config)
    if not job.dims.pp_enabled:
        return
    config, degree = job.config, job.dims.pp
    schedule = config.parallelism.pipeline_parallel_schedule
    check_not_on_cpu({'parallelism.pipeline_parallel_schedule = "DualPipeV"': schedule == "DualPipeV"})
    check_adapted(
        job,
        f"parallelism.pipeline_parallel_degree {degree}",
        ": otherwise the gradients are those of the summed loss, not of the mean",
    )
    flavor = f"model.flavor {config.model.flavor!r}"
    if job.n_layers < degree:
        raise UsageError(f"parallelism.pipeline_parallel_degree {degree} exceeds the {job.n_layers} layers of {flavor}")
    check_schedule(config, job.n_layers)
    _check_weight_gradients(job)
    _check_no_integers_are_sent(job)
    if job.ties_weights:
        raise UsageError(
            f"parallelism.pipeline_parallel_degree must be 1: {flavor} ties its output to its embedding, and they "
            "would be on different stages"
        )


def _check_weight_gradients(job: JobContext) -> None:
    """Raise if torch would compute other gradients of weights, or none, because the schedule computes them separately.

    - FSDP reshards weights before torch's stage looks for the gathered ones in the autograd graph (2.11 to 2.13).
    - Before 2.13, the stage adds the gradients of all outputs of an operator, and takes the sum for that of the first.
      In an attention that splits a projection, as that of DeepSeek, they even have different shapes.
    """
    split, _, sometimes = split_backward(job.config)
    if not sometimes:
        return
    if torch.__version__ < "2.13":
        raise UsageError(
            f"{split}, needs torch 2.13: torch {torch.__version__} adds the gradients of different outputs of an "
            "operator there"
        )
    if job.dims.fsdp_enabled and job.config.parallelism.fsdp_reshard_after_forward == "always":
        raise UsageError(
            f'parallelism.fsdp_reshard_after_forward must not be "always" with {split}: torch would compute no '
            "gradients of the weights"
        )


def _check_no_integers_are_sent(job: JobContext) -> None:
    """Raise if a stage sends indices with torch before 2.13, whose stages need a gradient of all that they receive."""
    passed_tensors = getattr(job.model_args, "passed_tensors", None)
    if torch.__version__ >= "2.13" or passed_tensors is None:
        return
    for number, modules in enumerate(job.pipeline_stages, 1):
        layers = [int(name.removeprefix("layers.")) for name in modules if name.startswith("layers.")]
        if layers and "selected" in passed_tensors(layers[0] - 1):
            raise UsageError(
                f"pipeline stage {number} starts with layers.{layers[0]}, which uses the keys that another layer's "
                f"indexer selects, and torch {torch.__version__} cannot send them: install torch 2.13, or start each "
                "stage in parallelism.module_fqns_per_model_part with a layer that has an indexer"
            )


def schedule_class(config: JobConfig) -> type:
    """Return torch's class of ``parallelism.pipeline_parallel_schedule``."""
    name = config.parallelism.pipeline_parallel_schedule
    try:
        return get_schedule_class(name)
    except ValueError as error:
        raise UsageError(f"parallelism.pipeline_parallel_schedule {name!r}: {error}") from error


def check_schedule(config: JobConfig, layers: int) -> None:
    """Raise :class:`UsageError` if the schedule cannot run the job's batches on a model of ``layers`` layers."""
    p, batch = config.parallelism, config.training.local_batch_size
    name = p.pipeline_parallel_schedule
    schedule = schedule_class(config)
    if batch % p.pipeline_parallel_microbatch_size:
        raise UsageError(
            f"training.local_batch_size {batch} is not a multiple of "
            f"parallelism.pipeline_parallel_microbatch_size {p.pipeline_parallel_microbatch_size}"
        )
    split, always, sometimes = split_backward(config)
    if always and config.activation_checkpoint.mode in ("selective", "full"):
        raise UsageError(
            f'activation_checkpoint.mode must be "none" with {split}: a block would be recomputed for each weight'
        )
    if sometimes and (compiles_blocks(config) or (config.compile.enable and "model" in config.compile.components)):
        raise UsageError(
            f"compile.enable must be false with {split}: the backward pass of a compiled region computes both and "
            "would run twice"
        )
    microbatches = batch // p.pipeline_parallel_microbatch_size
    computed = (
        f"training.local_batch_size {batch} / parallelism.pipeline_parallel_microbatch_size "
        f"{p.pipeline_parallel_microbatch_size} = {microbatches}"
    )
    if config.validation.enable and config.validation.local_batch_size % microbatches:
        raise UsageError(
            f"validation.local_batch_size {config.validation.local_batch_size} is not a multiple of {computed} "
            "microbatches, into which a validation batch is split too"
        )
    stages = len(pipeline_stages(config, layers))
    if p.pipeline_parallel_schedule_csv:
        return
    if schedule in (Schedule1F1B, ScheduleDualPipeV) and microbatches < stages:
        raise UsageError(
            f"{computed} microbatches are too few for {name}: it needs one for each of the {stages} stages"
        )
    rounds = max(1, microbatches // p.pipeline_parallel_degree)
    if schedule in (ScheduleInterleaved1F1B, ScheduleInterleavedZeroBubble) and microbatches % rounds:
        raise UsageError(
            f"{computed} microbatches do not fit {name}: with {p.pipeline_parallel_degree} pipeline ranks it needs a "
            f"multiple of {rounds}"
        )


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
