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
    layers. Before a layer without an indexer they also exchange the selected keys, (microbatch, seq_len / CP, 1, topk).
    """
    batch, length = config.parallelism.pipeline_parallel_microbatch_size, config.training.seq_len // dims.cp
    # Mixed precision is FSDP's: without FSDP a pipeline computes in training.dtype.
    dtype = config.training.mixed_precision_param if dims.fsdp_enabled else config.training.dtype
    mesh, count = dims.get_mesh("pp"), len(pipeline_stages(config, model_args.n_layers))
    stages = []
    for index, part in zip(stages_of_rank(config, mesh.get_local_rank(), count), model_parts, strict=True):
        if index == 0:
            inputs = [torch.zeros(batch, length, dtype=torch.int64, device=device)]
        else:
            shape = batch, length // dims.tp, model_args.dim
            inputs = [torch.zeros(shape, dtype=TORCH_DTYPE_MAP[dtype], device=device, requires_grad=True)]
        if _receives_selected(part, model_args):
            topk = model_args.attended_keys()
            inputs.append(torch.zeros(batch, length, 1, topk, dtype=torch.int32, device=device))
        hidden, *selected = _outputs_of(part, inputs)
        received, sent = (tuple(x.to("meta") for x in each) for each in (inputs, [hidden.requires_grad_(), *selected]))
        stage = PipelineStage(part, index, count, device, received, sent, group=mesh.get_group())
        skip_shape_vote(stage)
        stages.append(stage)
    return build_pipeline_schedule(config, stages, loss_fn)


def _receives_selected(part: Any, model_args: Any) -> bool:
    """Return whether a stage starts with a layer that attends to the keys that an earlier layer has selected."""
    first = min(map(int, part.layers), default=0)
    return hasattr(model_args, "passes_selected") and model_args.passes_selected(first - 1)


def _outputs_of(part: nn.Module, inputs: list[torch.Tensor]) -> tuple[torch.Tensor, ...]:
    """Run ``part`` on ``inputs`` and restore its token counts and its sharding."""
    with torch.no_grad(), keeping_counts(part):
        output = part(*inputs)
    for module in part.modules():
        if isinstance(module, FSDPModule):
            module.reshard()
    return output if isinstance(output, tuple) else (output,)
