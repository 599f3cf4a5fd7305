"""Checks of the section ``[pipeline]``."""

from __future__ import annotations

import torch
from torch.distributed.pipelining.schedules import (
    Schedule1F1B,
    ScheduleDualPipeV,
    ScheduleInterleaved1F1B,
    ScheduleInterleavedZeroBubble,
)

from torchtitan_npu.config.job_config import JobConfig, compiles_blocks
from torchtitan_npu.config.pipeline import pipeline_stages, schedule_class, split_backward
from torchtitan_npu.errors import UsageError
from torchtitan_npu.preflight.job_context import JobContext, check_adapted, check_not_on_cpu


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
