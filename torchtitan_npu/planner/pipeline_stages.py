"""Pipeline stages that know the shapes they receive and send; in training they exchange them before the first step."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torchtitan.config import TORCH_DTYPE_MAP
from torchtitan.distributed import ParallelDims
from torchtitan.distributed.pipeline_parallel import build_pipeline_schedule

from torchtitan_npu.config.job_config import JobConfig
from torchtitan_npu.config.pipeline import pipeline_stages
from torchtitan_npu.planner.pipeline_schedule import stages_of_rank
from torchtitan_npu.torch_internals.pipelining_shapes import skip_shape_vote
from torchtitan_npu.upstream.pipeline_stage import PipelineStage, keeping_counts


def schedule_with_shapes(
    model_parts: Sequence[nn.Module],
    dims: ParallelDims,
    config: JobConfig,
    model_args: Any,
    device: torch.device,
    loss_fn: Callable[..., Any],
) -> Any:
    """Return the job's schedule over stages with set shapes: inputs by arithmetic, outputs by running the stage once.

    Stages exchange hidden states of (microbatch, seq_len / CP / TP, dim): tensor parallel splits the sequence between
    layers.
    """
    batch, length = config.parallelism.pipeline_parallel_microbatch_size, config.training.seq_len // dims.cp
    # Mixed precision is FSDP's: without FSDP a pipeline computes in training.dtype.
    dtype = config.training.mixed_precision_param if dims.fsdp_enabled else config.training.dtype
    mesh, count = dims.get_mesh("pp"), len(pipeline_stages(config, model_args.n_layers))
    stages = []
    for index, part in zip(stages_of_rank(config, mesh.get_local_rank(), count), model_parts, strict=True):
        if index == 0:
            inputs = torch.zeros(batch, length, dtype=torch.int64, device=device)
        else:
            shape = batch, length // dims.tp, model_args.dim
            inputs = torch.zeros(shape, dtype=TORCH_DTYPE_MAP[dtype], device=device, requires_grad=True)
        output = _output_of(part, inputs).requires_grad_()
        shapes = inputs.to("meta"), output.to("meta")
        stage = PipelineStage(part, index, count, device, *shapes, group=mesh.get_group())
        skip_shape_vote(stage)
        stages.append(stage)
    return build_pipeline_schedule(config, stages, loss_fn)


def _output_of(part: nn.Module, inputs: torch.Tensor) -> torch.Tensor:
    """Run ``part`` on ``inputs`` and restore its token counts and its sharding."""
    with torch.no_grad(), keeping_counts(part):
        output = part(inputs)
    for module in part.modules():
        if isinstance(module, FSDPModule):
            module.reshard()
    return output
