"""Train specs for TorchTitan's models and ours that train correctly on every backend and layout.

Importing this module registers them, TorchTitan's models under their own names. Their code, sizes and parallel plans
stay TorchTitan's.
"""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torchtitan.components.loss import build_cross_entropy_loss
from torchtitan.config import JobConfig
from torchtitan.distributed import ParallelDims
from torchtitan.distributed.pipeline_parallel import pipeline_llm
from torchtitan.models.gpt_oss.model.model import GptOssModel as TitanGptOssModel
from torchtitan.models.llama4.infra.parallelize import apply_moe_ep_tp
from torchtitan.models.moe.moe import GroupedExperts, TokenChoiceTopKRouter
from torchtitan.protocols.train_spec import (
    LossFunction,
    LossFunctionBuilder,
    ParallelizeFunction,
    PipeliningFunction,
    TrainSpec,
    get_train_spec,
    register_train_spec,
)

from torchtitan_npu import platform
from torchtitan_npu.components.chunked_loss import ChunkedLossPerToken, defer_output
from torchtitan_npu.components.dataloader import build_text_dataloader
from torchtitan_npu.components.expert_balance import build_balancing_optimizers
from torchtitan_npu.components.loss import LossPerToken
from torchtitan_npu.components.metrics import build_metrics_processor
from torchtitan_npu.components.optimizers import SwappableOptimizers
from torchtitan_npu.components.replay.install import install_choices
from torchtitan_npu.components.validation import Validator
from torchtitan_npu.config.job_config import npu_options, replay_options
from torchtitan_npu.dist_utils import local
from torchtitan_npu.distributed import gpt_oss_experts  # noqa: F401 - register replacements for converters
from torchtitan_npu.distributed.activation_checkpoint import corrected_checkpointing
from torchtitan_npu.distributed.context_parallel import apply_context_parallel
from torchtitan_npu.distributed.cpu_context_parallel import gather_keys_and_values
from torchtitan_npu.distributed.expert_parallel import with_fused_dispatch
from torchtitan_npu.distributed.initial_weights import initialize_as_one_rank
from torchtitan_npu.distributed.moe_gradients import fix_moe_gradients, splitting_by_sequence
from torchtitan_npu.distributed.moe_tensor_parallel import uses_sequence_parallel_moe, with_sequence_parallel_moe
from torchtitan_npu.distributed.parallel_dims import ParallelDims as OurParallelDims
from torchtitan_npu.distributed.pipeline_stage import PipelineStage
from torchtitan_npu.distributed.tied_weights import parallelize_tied, ties_weights
from torchtitan_npu.errors import UsageError
from torchtitan_npu.models import own_train_specs
from torchtitan_npu.titan_internals.hooks import (
    with_expert_balancing,
    with_pipeline_stage,
    without_attention_context_parallel,
)
from torchtitan_npu.train_specs import rotations  # noqa: F401 - register replacements for converters
from torchtitan_npu.train_specs.adapted_spec import AdaptedTrainSpec
from torchtitan_npu.train_specs.qwen3_vl_dataloader import ImageTextValidator, build_image_text_dataloader
from torchtitan_npu.train_specs.registries import ADAPTED_MODELS
from torchtitan_npu.train_specs.sdpa_flavors import with_sdpa_flavors


def adapt(upstream: TrainSpec) -> AdaptedTrainSpec:
    """Return ``upstream`` with our data, validation and metrics, a loss per token, and corrected parallelization."""
    parallelize_part = corrected(upstream.parallelize_fn)
    build_optimizers = with_expert_balancing(upstream.build_optimizers_fn, build_balancing_optimizers)
    ours = replace(
        upstream,
        parallelize_fn=initialized_as_one_rank(parallelize_part),
        pipelining_fn=upstream.pipelining_fn and pipelined(upstream.pipelining_fn, parallelize_part),
        build_optimizers_fn=SwappableOptimizers(build_optimizers),
        build_dataloader_fn=build_text_dataloader,
        build_loss_fn=per_token(upstream.build_loss_fn),
        build_validator_fn=Validator,
        build_metrics_processor_fn=build_metrics_processor,
    )
    return AdaptedTrainSpec(**vars(ours))


def per_token(build_loss_fn: LossFunctionBuilder) -> LossFunctionBuilder:
    """Return a builder of the loss per token: of the loss that ``build_loss_fn`` builds, or in chunks of tokens."""

    def build_loss(job_config: JobConfig, **kwargs: Any) -> LossPerToken:
        chunk_tokens = npu_options(job_config).loss_chunk_tokens
        if not chunk_tokens:
            return LossPerToken(build_loss_fn(job_config, **kwargs))
        if build_loss_fn is not build_cross_entropy_loss:
            raise UsageError(f"npu.loss_chunk_tokens must be 0: {job_config.model.name} has a loss of its own")
        return ChunkedLossPerToken(chunk_tokens)

    return build_loss


def corrected(parallelize: ParallelizeFunction) -> ParallelizeFunction:
    """Return ``parallelize``, for a model or a pipeline stage, with the workarounds for this backend and layout."""
    original = corrected_checkpointing(parallelize)

    def parallelize_part(model: nn.Module, dims: ParallelDims, job_config: JobConfig) -> nn.Module:
        backend = platform.backend()
        _require_our_trainer(dims)
        if backend != "cuda":
            _disable_grouped_mm(model)
        if npu_options(job_config).loss_chunk_tokens:
            defer_output(model)
        if replay_options(job_config).is_used:
            install_choices(model, job_config.training.seq_len)
        parallelize = original
        if apply_context_parallel(model, job_config, dims):
            parallelize = without_attention_context_parallel(parallelize)
        elif dims.cp_enabled:
            if backend == "cpu":
                gather_keys_and_values(model, job_config.parallelism.context_parallel_load_balancer)
            if dims.tp_enabled:
                _pass_local_tensors_to_attention(model)
        sequence_parallel_moe = uses_sequence_parallel_moe(parallelize, dims, job_config)
        if sequence_parallel_moe:
            parallelize = with_sequence_parallel_moe(parallelize, with_fused_dispatch(apply_moe_ep_tp, model))
        elif dims.ep_enabled:
            parallelize = splitting_by_sequence(with_fused_dispatch(parallelize, model))
        if dims.fsdp_enabled and ties_weights(model):
            model = parallelize_tied(model, dims, job_config, parallelize)
        else:
            model = parallelize(model, dims, job_config)
        if dims.tp_enabled and not sequence_parallel_moe:
            fix_moe_gradients(model, dims.get_mesh("tp"), dims.ep_enabled and not dims.etp_enabled)
        if backend != "cuda":
            _reduce_by_plain_sums(model)
        return model

    return parallelize_part


def initialized_as_one_rank(parallelize: ParallelizeFunction) -> ParallelizeFunction:
    """Return ``parallelize`` for a model whose initial weights do not depend on the layout."""

    def parallelize_model(model: nn.Module, dims: ParallelDims, job_config: JobConfig) -> nn.Module:
        unsharded = _copy_for_initialization(model, dims)
        model = parallelize(model, dims, job_config)
        initialize_as_one_rank(unsharded, [model])
        return model

    return parallelize_model


def pipelined(pipeline: PipeliningFunction, parallelize_part: ParallelizeFunction) -> PipeliningFunction:
    """Return ``pipeline`` with stages parallelized by ``parallelize_part`` and initialized as on one rank."""
    pipeline = with_pipeline_stage(pipeline, PipelineStage)

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
        schedule, parts, *rest = pipeline(model, dims, job_config, device, model_args, parallelize_part, loss_fn)
        initialize_as_one_rank(unsharded, parts)
        return schedule, parts, *rest

    return pipeline_model


def _copy_for_initialization(model: nn.Module, dims: ParallelDims) -> nn.Module | None:
    """Return a copy of the unsharded model on the meta device if its initial weights would depend on the layout."""
    return copy.deepcopy(model) if platform.backend() == "cpu" and dims.world_size > 1 else None


def _require_our_trainer(dims: ParallelDims) -> None:
    """Raise an error if TorchTitan's Trainer runs the job and would compute wrong gradients, as under PP and DDP.

    Our Trainer corrects them, and uses our ParallelDims.
    """
    ddp = dims.dp_replicate_enabled and not dims.fsdp_enabled
    if (dims.pp_enabled or ddp) and not isinstance(dims, OurParallelDims):
        layout = "pipeline parallel" if dims.pp_enabled else "DDP"
        raise RuntimeError(f"{layout} needs `-m torchtitan_npu.train`: TorchTitan's Trainer computes wrong gradients")


def _disable_grouped_mm(model: nn.Module) -> None:
    """Disable ``torch._grouped_mm``, which only CUDA has. All models but qwen3 do so themselves."""
    for module in model.modules():
        if isinstance(module, GroupedExperts):
            module.use_grouped_mm = False


def _pass_local_tensors_to_attention(model: Any) -> None:
    """Pass local tensors to the attention. qwen3 passes DTensors, which torch's context parallel does not take."""

    def to_local(module: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
        return tuple(map(local, args))

    for block in model.layers.values():
        block.attention.inner_attention.register_forward_pre_hook(to_local)


def _reduce_by_plain_sums(model: nn.Module) -> None:
    """Let FSDP reduce gradients by a plain sum: TorchTitan's divide factor is 1.

    FSDP passes the factor to NCCL as a pre-multiplied sum. gloo has none. On HCCL torch_npu first multiplies the
    unsharded gradient by it, in a kernel of its own.
    """
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_force_sum_reduction_for_comms(True)


class GptOssModel(TitanGptOssModel):
    """gpt_oss whose routers' biases start at zero. TorchTitan 0.2.2 leaves them uninitialized."""

    def init_weights(self, buffer_device: torch.device | None = None) -> None:
        super().init_weights(buffer_device)
        for module in self.modules():
            if isinstance(module, TokenChoiceTopKRouter) and module.gate.bias is not None:
                nn.init.zeros_(module.gate.bias)


def _register() -> None:
    for name in ADAPTED_MODELS:
        spec = get_train_spec(name)
        if name == "qwen3":  # its forward runs a stage of the model like llama3's, but its spec names no pipelining_fn
            spec = replace(spec, pipelining_fn=pipeline_llm)
        if name == "gpt_oss":
            spec = replace(spec, model_cls=GptOssModel)
        if name == "deepseek_v3":
            spec = replace(spec, model_args=with_sdpa_flavors(spec.model_args))
        register_train_spec(name, adapt(spec))
    for name, spec in own_train_specs().items():
        adapted = adapt(spec)
        if name == "qwen3_vl":
            adapted.build_dataloader_fn = build_image_text_dataloader
            adapted.build_validator_fn = ImageTextValidator
        register_train_spec(name, adapted)


_register()
