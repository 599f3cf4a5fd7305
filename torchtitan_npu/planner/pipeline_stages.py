"""Pipeline stages that know what their neighbours send: in a real start they tell each other the shapes."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from torch.distributed.fsdp import FSDPModule
from torch.distributed.pipelining import stage as pipelining
from torchtitan.config import TORCH_DTYPE_MAP
from torchtitan.distributed import ParallelDims

from torchtitan_npu.config.job_config import JobConfig
from torchtitan_npu.upstream.pipeline_stage import keeping_counts


def stages_of(schedule: Any) -> list[Any]:
    """This rank's stages: one, or with a looped schedule several."""
    return list(schedule._stages) if hasattr(schedule, "_stages") else [schedule._stage]


def know_neighbours(schedule: Any, dims: ParallelDims, config: JobConfig, model_args: Any) -> None:
    """Tell each stage of ``schedule`` what comes in, and what it sends on: a trial run shows it.

    Between stages go hidden states: (microbatch, seq_len / CP / TP, dim), since tensor parallel splits the sequence
    between the layers.
    """
    batch, length = config.parallelism.pipeline_parallel_microbatch_size, config.training.seq_len // dims.cp
    # FSDP computes in its own dtype, and without it there is no mixed precision in a pipeline
    dtype = config.training.mixed_precision_param if dims.fsdp_enabled else config.training.dtype
    for stage in stages_of(schedule):
        if stage.is_first:
            inputs = torch.zeros(batch, length, dtype=torch.int64, device=stage.device)
        else:
            shape = batch, length // dims.tp, model_args.dim
            inputs = torch.zeros(shape, dtype=TORCH_DTYPE_MAP[dtype], device=stage.device)
        _set_shapes(stage, inputs, _trial(stage.submod, inputs))


def _trial(part: torch.nn.Module, inputs: torch.Tensor) -> torch.Tensor:
    """What ``part`` makes of ``inputs``; it keeps nothing of it."""
    with torch.no_grad(), keeping_counts(part):
        output = part(inputs)
    for module in part.modules():
        if isinstance(module, FSDPModule):
            module.reshard()
    return output


def _set_shapes(stage: Any, inputs: torch.Tensor, output: torch.Tensor) -> None:
    inputs.requires_grad_(inputs.is_floating_point())
    output.requires_grad_()
    if not hasattr(stage, "_user_meta"):  # up to torch 2.12
        stage.inputs_meta = (inputs.to("meta"),)
        stage._configure_outputs_meta((output.to("meta"),))
        return
    metas = (pipelining.extract_tensor_metas((x,)) for x in (inputs, output))
    stage._user_meta.inputs, stage._user_meta.outputs = metas
    # the stages vote whether all of them know: each takes its neighbours' word for it
    everyone_knows = SimpleNamespace(item=lambda: 1)
    stage._warmup_forward_vote = lambda *_, **__: everyone_knows
    stage._warmup_backward_result = lambda *_, **__: everyone_knows
