"""TorchTitan's models under their names, with what their TrainSpecs need to train right in every backend and layout.

Importing this module registers them. The models, their sizes and their parallel plans stay TorchTitan's.
"""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torchtitan.components.optimizer import OptimizersContainer
from torchtitan.config import JobConfig
from torchtitan.config import Optimizer as OptimizerConfig
from torchtitan.distributed import ParallelDims
from torchtitan.distributed.context_parallel import apply_cp_to_attention_module
from torchtitan.distributed.pipeline_parallel import pipeline_llm
from torchtitan.models.gpt_oss.model.model import GptOssModel as TitanGptOssModel
from torchtitan.models.llama4.infra.parallelize import apply_moe_ep_tp
from torchtitan.models.moe.moe import GroupedExperts, TokenChoiceTopKRouter
from torchtitan.protocols.train_spec import (
    LossFunction,
    OptimizersBuilder,
    ParallelizeFunction,
    PipeliningFunction,
    TrainSpec,
    get_train_spec,
    register_train_spec,
)

from torchtitan_npu import platform
from torchtitan_npu.components.dataloader import build_text_dataloader
from torchtitan_npu.components.expert_balance import counting_once
from torchtitan_npu.components.loss import LossPerToken
from torchtitan_npu.components.metrics import build_metrics_processor
from torchtitan_npu.components.swap_optimizer.container import swapping_if_asked
from torchtitan_npu.components.validation import Validator
from torchtitan_npu.distributed.context_parallel import context_parallel
from torchtitan_npu.distributed.expert_parallel import with_fused_dispatch
from torchtitan_npu.distributed.local_tensor import local
from torchtitan_npu.distributed.moe_tensor_parallel import routes_own_tokens, with_own_tokens
from torchtitan_npu.errors import UsageError
from torchtitan_npu.models import own_train_specs
from torchtitan_npu.upstream import rotations  # noqa: F401 - registers the rotations of TorchTitan's models
from torchtitan_npu.upstream.activation_checkpoint import without_marks
from torchtitan_npu.upstream.adapted_spec import AdaptedTrainSpec
from torchtitan_npu.upstream.cpu_context_parallel import gather_keys_and_values
from torchtitan_npu.upstream.initial_weights import start_as_one_rank
from torchtitan_npu.upstream.moe_gradients import mend_moe_gradients
from torchtitan_npu.upstream.parallel_dims import ParallelDims as OurParallelDims
from torchtitan_npu.upstream.pipeline_stage import PipelineStage, TorchPipelineStage
from torchtitan_npu.upstream.rebind import rebound
from torchtitan_npu.upstream.sdpa_flavors import with_sdpa_flavors
from torchtitan_npu.upstream.tied_weights import parallelize_tied, ties_weights

ADAPTED_MODELS = ("llama3", "llama4", "qwen3", "deepseek_v3", "gpt_oss")


def adapt(upstream: TrainSpec) -> AdaptedTrainSpec:
    """``upstream`` with our data and validation, a divisible loss and parallelization for every backend."""
    parallelize_part = mended(upstream.parallelize_fn)
    ours = replace(
        upstream,
        parallelize_fn=started_alike(parallelize_part),
        pipelining_fn=upstream.pipelining_fn and pipelined(upstream.pipelining_fn, parallelize_part),
        build_optimizers_fn=placing_states(upstream.build_optimizers_fn),
        build_dataloader_fn=build_text_dataloader,
        build_loss_fn=lambda *args, **kwargs: LossPerToken(upstream.build_loss_fn(*args, **kwargs)),
        build_validator_fn=Validator,
        build_metrics_processor_fn=build_metrics_processor,
    )
    return AdaptedTrainSpec(**vars(ours))


def placing_states(build_optimizers: OptimizersBuilder) -> OptimizersBuilder:
    """``build_optimizers`` with the states where the job wants them, and the token counts of our layers as they are."""

    def build(
        model_parts: list[nn.Module], optimizer_config: OptimizerConfig, *args: Any, **kwargs: Any
    ) -> OptimizersContainer:
        placed = swapping_if_asked(build_optimizers, model_parts, optimizer_config)
        return counting_once(placed)(model_parts, optimizer_config, *args, **kwargs)

    return build


def mended(parallelize: ParallelizeFunction) -> ParallelizeFunction:
    """``parallelize`` for a model or a stage of it, with its corrections for this backend and layout."""
    titans = without_marks(parallelize)

    def parallelize_part(model: nn.Module, dims: ParallelDims, job_config: JobConfig) -> nn.Module:
        backend = platform.backend()
        _require_our_trainer(dims)
        if backend != "cuda":
            _multiply_experts_one_by_one(model)
        parallelize = titans
        if context := context_parallel(job_config, dims, _own_context(model)):
            context.parallelize(model)
            parallelize = rebound(parallelize, {apply_cp_to_attention_module: lambda *args: None})
        elif dims.cp_enabled:
            if backend == "cpu":
                gather_keys_and_values(model, job_config.parallelism.context_parallel_load_balancer)
            if dims.tp_enabled:
                _take_local_heads(model)
        own_tokens = routes_own_tokens(parallelize, dims, job_config)
        if own_tokens:
            parallelize_experts = with_own_tokens(parallelize, with_fused_dispatch(apply_moe_ep_tp, model))
        else:
            parallelize_experts = with_fused_dispatch(parallelize, model) if dims.ep_enabled else parallelize
        if dims.fsdp_enabled and ties_weights(model):
            model = parallelize_tied(model, dims, job_config, parallelize_experts)
        else:
            model = parallelize_experts(model, dims, job_config)
        if dims.tp_enabled and not own_tokens:
            mend_moe_gradients(model, dims.get_mesh("tp"), dims.ep_enabled and not dims.etp_enabled)
        if backend == "cpu":
            _reduce_by_plain_sums(model)
        return model

    return parallelize_part


def _own_context(model: Any) -> str | None:
    """The context parallel that the model says it needs."""
    return getattr(getattr(model, "model_args", None), "context_parallel", None)


def started_alike(parallelize: ParallelizeFunction) -> ParallelizeFunction:
    """``parallelize``, after which the model starts from the weights that one rank would draw."""

    def parallelize_model(model: nn.Module, dims: ParallelDims, job_config: JobConfig) -> nn.Module:
        whole = _copy_to_draw_from(model, dims)
        model = parallelize(model, dims, job_config)
        start_as_one_rank(whole, [model])
        return model

    return parallelize_model


def pipelined(pipeline: PipeliningFunction, parallelize_part: ParallelizeFunction) -> PipeliningFunction:
    """``pipeline`` with stages that are parallelised by ``parallelize_part`` and start as they would on one rank."""
    pipeline = rebound(pipeline, {TorchPipelineStage: PipelineStage})

    def pipeline_model(
        model: nn.Module,
        dims: ParallelDims,
        job_config: JobConfig,
        device: torch.device,
        model_args: Any,
        parallelize: ParallelizeFunction,
        loss_fn: LossFunction,
    ) -> Any:
        whole = _copy_to_draw_from(model, dims)
        schedule, parts, *rest = pipeline(model, dims, job_config, device, model_args, parallelize_part, loss_fn)
        start_as_one_rank(whole, parts)
        return schedule, parts, *rest

    return pipeline_model


def _copy_to_draw_from(model: nn.Module, dims: ParallelDims) -> nn.Module | None:
    """The whole model, still on the meta device, where the layout would otherwise decide the initial weights."""
    return copy.deepcopy(model) if platform.backend() == "cpu" and dims.world_size > 1 else None


def _require_our_trainer(dims: ParallelDims) -> None:
    """Under PP and DDP TorchTitan's Trainer has wrong gradients; ours, which mends them, brings its ParallelDims."""
    ddp = dims.dp_replicate_enabled and not dims.fsdp_enabled
    if (dims.pp_enabled or ddp) and not isinstance(dims, OurParallelDims):
        key = "pipeline_parallel_degree" if dims.pp_enabled else "data_parallel_replicate_degree"
        raise UsageError(
            f"parallelism.{key} above 1 needs `-m torchtitan_npu.train`: in TorchTitan's entry its gradients are wrong"
        )


def _multiply_experts_one_by_one(model: nn.Module) -> None:
    """``torch._grouped_mm`` is CUDA's. The other models then loop over the experts by themselves, qwen3 does not."""
    for module in model.modules():
        if isinstance(module, GroupedExperts):
            module.use_grouped_mm = False


def _take_local_heads(model: Any) -> None:
    """qwen3 hands attention DTensors over its heads, where torch's context parallel takes local tensors only."""

    def to_local(module: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
        return tuple(map(local, args))

    for block in model.layers.values():
        block.attention.inner_attention.register_forward_pre_hook(to_local)


def _reduce_by_plain_sums(model: nn.Module) -> None:
    """gloo has no pre-multiplied sum, which FSDP would reduce gradients with."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_force_sum_reduction_for_comms(True)


class GptOssModel(TitanGptOssModel):
    """gpt_oss whose routers' biases start at zero: TorchTitan 0.2.2 starts them with what was in memory."""

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
        data = {"build_dataloader_fn": spec.build_dataloader_fn, "build_validator_fn": spec.build_validator_fn}
        register_train_spec(name, replace(adapt(spec), **data))


_register()
