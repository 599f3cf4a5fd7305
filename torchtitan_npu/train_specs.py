"""TorchTitan's models under their own names, with what their TrainSpecs need to train right in every home and layout.

Importing this module registers them. The models, their sizes and their parallel plans stay TorchTitan's.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torchtitan.config import JobConfig
from torchtitan.distributed import ParallelDims
from torchtitan.distributed.pipeline_parallel import pipeline_llm
from torchtitan.models.moe.moe import GroupedExperts
from torchtitan.protocols.train_spec import TrainSpec, get_train_spec, register_train_spec

from torchtitan_npu import platform
from torchtitan_npu.data import build_text_dataloader
from torchtitan_npu.distributed.moe_gradients import mend_moe_gradients
from torchtitan_npu.distributed.tied_weights import parallelize_tied, ties_weights

ADAPTED_MODELS = ("llama3", "llama4", "qwen3", "deepseek_v3", "gpt_oss")


class LossPerToken:
    """A loss function whose sum over tokens can be divided before the backward pass.

    Pipeline schedules run the backward pass themselves, on what the loss function returns: TorchTitan divides only
    what it reports, and the gradients are those of the sum (train.py:505).
    """

    def __init__(self, loss_fn: Callable[..., torch.Tensor]) -> None:
        self.loss_fn = loss_fn
        self.tokens: float | torch.Tensor = 1.0

    def __call__(self, pred: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return self.loss_fn(pred, labels) / self.tokens


def adapt(upstream: TrainSpec) -> TrainSpec:
    """``upstream`` with our data loading, a divisible loss and parallelisation that is right in every home."""

    def parallelize_part(model: nn.Module, dims: ParallelDims, job_config: JobConfig) -> nn.Module:
        if platform.home() != "cuda":
            _multiply_experts_one_by_one(model)
        if dims.cp_enabled:
            if platform.home() == "cpu":
                from torchtitan_npu.distributed.cpu_context_parallel import gather_keys_and_values

                gather_keys_and_values(model, job_config.parallelism.context_parallel_load_balancer)
            if dims.tp_enabled:
                _take_local_heads(model)
        if ties_weights(model) and dims.fsdp_enabled:
            model = parallelize_tied(model, dims, job_config, upstream.parallelize_fn)
        else:
            model = upstream.parallelize_fn(model, dims, job_config)
        if dims.tp_enabled:
            tokens_are_split = dims.ep_enabled and not dims.etp_enabled
            mend_moe_gradients(model, dims.get_mesh("tp"), tokens_are_split)
        if platform.home() == "cpu":
            for module in model.modules():
                if isinstance(module, FSDPModule):
                    module.set_force_sum_reduction_for_comms(True)  # gloo has no pre-multiplied sum
        return model

    def parallelize(model: nn.Module, dims: ParallelDims, job_config: JobConfig) -> nn.Module:
        whole = copy.deepcopy(model) if _draws_like_one_rank(dims) else None
        model = parallelize_part(model, dims, job_config)
        if whole is not None:
            _start_as_one_rank(whole, [model])
        return model

    def pipeline(model: nn.Module, dims: ParallelDims, job_config: JobConfig, *args: Any, **kwargs: Any) -> Any:
        whole = copy.deepcopy(model) if _draws_like_one_rank(dims) else None
        device, model_args, _, loss_fn = args
        schedule, parts, first, last = upstream.pipelining_fn(
            model, dims, job_config, device, model_args, parallelize_part, loss_fn, **kwargs
        )
        if whole is not None:
            _start_as_one_rank(whole, parts)
        return schedule, parts, first, last

    def build_loss(*args: Any, **kwargs: Any) -> LossPerToken:
        return LossPerToken(upstream.build_loss_fn(*args, **kwargs))

    return replace(
        upstream,
        parallelize_fn=parallelize,
        pipelining_fn=pipeline if upstream.pipelining_fn is not None else None,
        build_dataloader_fn=build_text_dataloader,
        build_loss_fn=build_loss,
    )


def _draws_like_one_rank(dims: ParallelDims) -> bool:
    return platform.home() == "cpu" and dims.world_size > 1


def _start_as_one_rank(whole: nn.Module, parts: list[nn.Module]) -> None:
    from torchtitan_npu.distributed.start import start_as_one_rank

    for part in parts:
        start_as_one_rank(whole, part)


def _multiply_experts_one_by_one(model: nn.Module) -> None:
    """``torch._grouped_mm`` is CUDA's. The other models then loop over the experts by themselves, qwen3 does not."""
    for module in model.modules():
        if isinstance(module, GroupedExperts):
            module.use_grouped_mm = False


def _take_local_heads(model: nn.Module) -> None:
    """qwen3 hands attention DTensors over its heads, where torch's context parallel takes local tensors only."""

    def to_local(module: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
        return tuple(arg.to_local() if isinstance(arg, DTensor) else arg for arg in args)

    for block in model.layers.values():  # type: ignore[union-attr, operator]
        block.attention.inner_attention.register_forward_pre_hook(to_local)


for _name in ADAPTED_MODELS:
    _upstream = get_train_spec(_name)
    if _name == "qwen3":  # its forward takes a stage of the model as llama3's does; only the entry is missing
        _upstream = replace(_upstream, pipelining_fn=pipeline_llm)
    register_train_spec(_name, adapt(_upstream))
