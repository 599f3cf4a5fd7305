"""Shapes of what pipeline stages receive and send; in training the stages exchange them before the first step."""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed.fsdp import FSDPModule
from torchtitan.config import TORCH_DTYPE_MAP
from torchtitan.distributed import ParallelDims

from torchtitan_npu.config.job_config import JobConfig
from torchtitan_npu.torch_internals.pipelining_shapes import schedule_stages, set_stage_shapes
from torchtitan_npu.upstream.pipeline_stage import keeping_counts


def set_pipeline_shapes(schedule: Any, dims: ParallelDims, config: JobConfig, model_args: Any) -> None:
    """Set the shapes of each stage of ``schedule``: inputs by arithmetic, outputs by running the stage once.

    Stages exchange hidden states of (microbatch, seq_len / CP / TP, dim): tensor parallel splits the sequence between
    layers.
    """
    batch, length = config.parallelism.pipeline_parallel_microbatch_size, config.training.seq_len // dims.cp
    # Mixed precision is FSDP's: without FSDP a pipeline computes in training.dtype.
    dtype = config.training.mixed_precision_param if dims.fsdp_enabled else config.training.dtype
    for stage in schedule_stages(schedule):
        if stage.is_first:
            inputs = torch.zeros(batch, length, dtype=torch.int64, device=stage.device)
        else:
            shape = batch, length // dims.tp, model_args.dim
            inputs = torch.zeros(shape, dtype=TORCH_DTYPE_MAP[dtype], device=stage.device)
        set_stage_shapes(stage, inputs, _output_of(stage.submod, inputs))


def _output_of(part: torch.nn.Module, inputs: torch.Tensor) -> torch.Tensor:
    """Run ``part`` on ``inputs`` and restore its token counts and its sharding."""
    with torch.no_grad(), keeping_counts(part):
        output = part(inputs)
    for module in part.modules():
        if isinstance(module, FSDPModule):
            module.reshard()
    return output
