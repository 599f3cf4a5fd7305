"""Adapt a train spec, so that its model trains correctly on every backend and layout.

The model's code, sizes and parallel plan stay as they are. :mod:`torchtitan_npu.train_specs.registry` adapts
TorchTitan's models and those of this package.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.pipelining import PipelineStage as TorchPipelineStage
from torchtitan.components.loss import build_cross_entropy_loss
from torchtitan.config import JobConfig
from torchtitan.distributed import ParallelDims
from torchtitan.models.llama4.infra.parallelize import apply_moe_ep_tp
from torchtitan.models.moe.moe import GroupedExperts
from torchtitan.protocols.train_spec import (
    LossFunction,
    LossFunctionBuilder,
    ParallelizeFunction,
    PipeliningFunction,
    TrainSpec,
)

from torchtitan_npu import platform
from torchtitan_npu.compile.block_regions import add_input_waits, compile_models
from torchtitan_npu.components.chunked_loss import ChunkedLossPerToken, defer_output
from torchtitan_npu.components.dataloader import build_text_dataloader
from torchtitan_npu.components.loss import LossPerToken
from torchtitan_npu.components.metrics import MetricsProcessor
from torchtitan_npu.components.optimizers import adapted_optimizers
from torchtitan_npu.components.replay.install import install_routing_decisions
from torchtitan_npu.components.validation import Validator
from torchtitan_npu.config.job_config import compiles_blocks, with_all_sections
from torchtitan_npu.dist_utils import local
from torchtitan_npu.distributed.activation_checkpoint import CHECKPOINTING
from torchtitan_npu.distributed.context_parallel import WITHOUT_ATTENTION, apply_context_parallel
from torchtitan_npu.distributed.cpu_ranks import gather_keys_and_values, initialize_as_one_rank
from torchtitan_npu.distributed.expert_parallel import fused_styles
from torchtitan_npu.distributed.moe_tensor_parallel import (
    SPLITTING_BY_SEQUENCE,
    fix_moe_gradients,
    sequence_parallel_moe,
    uses_sequence_parallel_moe,
)
from torchtitan_npu.distributed.parallel_dims import ParallelDims as AdaptedParallelDims
from torchtitan_npu.distributed.pipeline_stage import PipelineStage
from torchtitan_npu.distributed.tied_weights import parallelize_tied, ties_weights
from torchtitan_npu.errors import UsageError
from torchtitan_npu.titan_internals.rebind import copy_with_globals


@dataclass
class AdaptedTrainSpec(TrainSpec):
    """A TrainSpec that :func:`adapt` has made."""

    parallelized_by: tuple[ParallelizeFunction, PipeliningFunction | None] | None = None
    """The functions that :func:`adapt` made. ``dataclasses.replace`` may have replaced them."""

    @property
    def is_adapted(self) -> bool:
        """True if this package parallelizes and compiles the model."""
        return self.parallelized_by == (self.parallelize_fn, self.pipelining_fn)


def adapt(upstream: TrainSpec) -> AdaptedTrainSpec:
    """Return ``upstream`` with this package's data, validation and metrics, a loss per token, and a corrected plan."""
    parallelize_part = corrected(upstream.parallelize_fn)
    adapted = replace(
        upstream,
        parallelize_fn=parallelized(parallelize_part),
        pipelining_fn=upstream.pipelining_fn and pipelined(upstream.pipelining_fn, parallelize_part),
        build_optimizers_fn=adapted_optimizers(upstream.build_optimizers_fn),
        build_dataloader_fn=build_text_dataloader,
        build_loss_fn=per_token(upstream.build_loss_fn),
        build_validator_fn=Validator,
        build_metrics_processor_fn=MetricsProcessor,
    )
    functions = adapted.parallelize_fn, adapted.pipelining_fn
    return AdaptedTrainSpec(**{**vars(adapted), "parallelized_by": functions})


def per_token(build_loss_fn: LossFunctionBuilder) -> LossFunctionBuilder:
    """Return a builder of the loss per token: of the loss that ``build_loss_fn`` builds, or in chunks of tokens."""

    def build_loss(job_config: JobConfig, **kwargs: Any) -> LossPerToken:
        chunk_tokens = with_all_sections(job_config).npu.loss_chunk_tokens
        if not chunk_tokens:
            return LossPerToken(build_loss_fn(_titan_config(job_config), **kwargs))
        if build_loss_fn is not build_cross_entropy_loss:
            raise UsageError(f"npu.loss_chunk_tokens must be 0: {job_config.model.name} has a loss of its own")
        return ChunkedLossPerToken(chunk_tokens)

    return build_loss


def parallelized(parallelize_part: ParallelizeFunction) -> ParallelizeFunction:
    """Return the ``parallelize_fn`` of a model: parallelized by ``parallelize_part``, compiled, and initialized."""

    def parallelize_model(model: nn.Module, dims: ParallelDims, job_config: JobConfig) -> nn.Module:
        unsharded = _copy_for_initialization(model, dims)
        model = parallelize_part(model, dims, _titan_config(job_config))
        initialize_as_one_rank(unsharded, [model])
        _compile([model], job_config)
        return model

    return parallelize_model


def pipelined(pipeline: PipeliningFunction, parallelize_part: ParallelizeFunction) -> PipeliningFunction:
    """Return the ``pipelining_fn`` of a model, whose stages are treated as :func:`parallelized` treats the model."""
    # TorchTitan's function names the class of the stages
    pipeline = copy_with_globals(pipeline, {TorchPipelineStage: PipelineStage})

    def pipeline_model(
        model: nn.Module,
        dims: ParallelDims,
        job_config: JobConfig,
        device: torch.device,
        model_args: Any,
        parallelize: ParallelizeFunction,
        loss_fn: LossFunction,
    ) -> Any:
        unsharded = _copy_for_initialization(model, dims)
        config = _titan_config(job_config)
        schedule, parts, *rest = pipeline(model, dims, config, device, model_args, parallelize_part, loss_fn)
        initialize_as_one_rank(unsharded, parts)
        _compile(parts, job_config)
        return schedule, parts, *rest

    return pipeline_model


def _titan_config(job_config: JobConfig) -> JobConfig:
    """Return the config for TorchTitan's functions, which compile unless this package does."""
    if not compiles_blocks(job_config):
        return job_config
    return replace(job_config, compile=replace(job_config.compile, enable=False))


def _compile(parts: Sequence[Any], job_config: JobConfig) -> None:
    """Compile the model ``parts`` if the job bypasses code generation or has graph passes; else TorchTitan has."""
    if compiles_blocks(job_config):
        compile_models(parts, job_config)
    elif job_config.compile.enable:
        for block in (block for part in parts for block in part.layers.values()):
            add_input_waits(block)


def corrected(plan: ParallelizeFunction) -> ParallelizeFunction:
    """Return ``plan``, for a model or a pipeline stage, with the workarounds for this backend and layout."""

    def parallelize_part(model: nn.Module, dims: ParallelDims, job_config: JobConfig) -> nn.Module:
        backend = platform.backend()
        _require_trainer(dims)
        if backend != "cuda":
            _disable_grouped_mm(model)
        if with_all_sections(job_config).npu.loss_chunk_tokens:
            defer_output(model)
        if with_all_sections(job_config).replay.is_used:
            install_routing_decisions(model, job_config.training.seq_len)
        replacements: dict[Any, Any] = {**CHECKPOINTING}
        if apply_context_parallel(model, job_config, dims):
            replacements |= WITHOUT_ATTENTION
        elif dims.cp_enabled:
            if backend == "cpu":
                gather_keys_and_values(model, job_config.parallelism.context_parallel_load_balancer)
            if dims.tp_enabled:
                _pass_local_tensors_to_attention(model)
        splits_moe_by_sequence = uses_sequence_parallel_moe(plan, dims, job_config)
        if splits_moe_by_sequence:
            replacements[apply_moe_ep_tp] = sequence_parallel_moe(model)
        elif dims.ep_enabled:
            replacements |= SPLITTING_BY_SEQUENCE
            replacements |= fused_styles(plan, model)
        # plans name the functions and classes they call
        parallelize = copy_with_globals(plan, replacements)
        if dims.fsdp_enabled and ties_weights(model):
            model = parallelize_tied(model, dims, job_config, parallelize)
        else:
            model = parallelize(model, dims, job_config)
        if dims.tp_enabled and not splits_moe_by_sequence:
            fix_moe_gradients(model, dims.get_mesh("tp"), dims.ep_enabled and not dims.etp_enabled)
        if backend != "cuda":
            _reduce_by_plain_sums(model)
        return model

    return parallelize_part


def _copy_for_initialization(model: nn.Module, dims: ParallelDims) -> nn.Module | None:
    """Return a copy of the unsharded model on the meta device if its initial weights would depend on the layout."""
    return copy.deepcopy(model) if platform.backend() == "cpu" and dims.world_size > 1 else None


def _require_trainer(dims: ParallelDims) -> None:
    """Raise an error if TorchTitan's Trainer runs the job and would compute wrong gradients, as under PP and DDP.

    This package's Trainer corrects them, and uses its ParallelDims.
    """
    ddp = dims.dp_replicate_enabled and not dims.fsdp_enabled
    if (dims.pp_enabled or ddp) and not isinstance(dims, AdaptedParallelDims):
        layout = "pipeline parallel" if dims.pp_enabled else "DDP"
        raise RuntimeError(f"{layout} needs `-m torchtitan_npu.train`: TorchTitan's Trainer computes wrong gradients")


def _disable_grouped_mm(model: nn.Module) -> None:
    """Workaround: TorchTitan's qwen3 calls ``torch._grouped_mm`` on devices without it; its other models check.

    Delete when qwen3 checks too.
    """
    for module in model.modules():
        if isinstance(module, GroupedExperts):
            module.use_grouped_mm = False


def _pass_local_tensors_to_attention(model: Any) -> None:
    """Workaround: TorchTitan's qwen3 passes DTensors to attention, which torch's context parallel does not take.

    Delete when it passes local tensors, as TorchTitan's other models do.
    """

    def to_local(module: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
        return tuple(map(local, args))

    for block in model.layers.values():
        block.attention.inner_attention.register_forward_pre_hook(to_local)


def _reduce_by_plain_sums(model: nn.Module) -> None:
    """Workaround: FSDP multiplies gradients by a factor, which TorchTitan sets to 1. Let it reduce by a plain sum.

    FSDP passes the factor to NCCL as a pre-multiplied sum. gloo has none. On HCCL torch_npu first multiplies the
    unsharded gradient by it, in a kernel of its own. Delete when FSDP omits a factor of 1.
    """
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_force_sum_reduction_for_comms(True)
