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
from torchtitan_npu.distributed.pipeline_stage import PipelineStage, keeping_counts
from torchtitan_npu.planner.pipeline_schedule import stages_of_rank
from torchtitan_npu.torch_internals.pipelining import skip_shape_vote


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
    layers. Before a layer without an indexer they also exchange what :func:`_shared_inputs` returns.
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
        inputs += _shared_inputs(part, model_args, batch, length, config.training.seq_len, inputs[0])
        outputs = [x.requires_grad_() if x.is_floating_point() else x for x in _outputs_of(part, inputs)]
        received, sent = (tuple(x.to("meta") for x in each) for each in (inputs, outputs))
        stage = PipelineStage(part, index, count, device, received, sent, group=mesh.get_group())
        skip_shape_vote(stage)
        stages.append(stage)
    return build_pipeline_schedule(config, stages, loss_fn)


def _shared_inputs(
    part: Any, model_args: Any, batch: int, length: int, seq_len: int, hidden: torch.Tensor
) -> list[torch.Tensor]:
    """Return what a stage receives besides ``hidden`` if it starts with a layer without an indexer.

    These are the selected keys, and the indexer's tensors if its loss is shared. Each rank has the keys of ``seq_len``
    tokens and the queries of ``length`` tokens.
    """
    if not hasattr(model_args, "passed_tensors"):
        return []
    heads, width = model_args.index_n_heads, model_args.index_head_dim
    shapes = {
        "selected": (batch, length, 1, model_args.attended_keys()),
        "index_q": (batch, length, heads, width),
        "index_k": (batch, seq_len, width),
        "index_weights": (batch, length, heads),
    }
    names = model_args.passed_tensors(min(map(int, part.layers), default=0) - 1)
    return [
        hidden.new_zeros(shapes[name], dtype=torch.int32)
        if name == "selected"
        else hidden.new_zeros(shapes[name], requires_grad=True)
        for name in names
    ]


def _outputs_of(part: nn.Module, inputs: list[torch.Tensor]) -> tuple[torch.Tensor, ...]:
    """Run ``part`` on ``inputs`` and restore its token counts and its sharding."""
    with torch.no_grad(), keeping_counts(part):
        output = part(*inputs)
    for module in part.modules():
        if isinstance(module, FSDPModule):
            module.reshard()
    return output if isinstance(output, tuple) else (output,)
