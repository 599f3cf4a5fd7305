"""Hooks that TorchTitan 0.2.2 lacks: replace a call inside one of its functions, in a copy of that function.

Each hook names the call and why it has to be replaced. A hook can be deleted when TorchTitan passes the callee as an
argument. Any module may import this one: of this package it imports only
:mod:`torchtitan_npu.titan_internals.rebind` and ``torch_internals``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from types import SimpleNamespace
from typing import Any

from torch import Tensor
from torch.distributed import checkpoint as dcp
from torch.distributed.pipelining import PipelineStage
from torch.distributed.tensor.parallel import ParallelStyle
from torchtitan.components.checkpoint import CheckpointManager, consolidate_safetensors_files_on_every_rank
from torchtitan.components.optimizer import OptimizersContainer, build_optimizers_with_moe_load_balancing
from torchtitan.distributed import utils as dist_utils
from torchtitan.distributed.activation_checkpoint import apply_ac
from torchtitan.distributed.context_parallel import apply_cp_to_attention_module
from torchtitan.distributed.expert_parallel import ExpertParallel, ReordererSequenceParallel
from torchtitan.models.deepseek_v3.infra.parallelize import apply_non_moe_tp as apply_deepseek_v3_tp
from torchtitan.models.llama4.infra.parallelize import apply_compile, apply_fsdp, apply_moe_ep_tp
from torchtitan.models.moe.moe import TokenChoiceTopKRouter
from torchtitan.models.moe.utils import _permute, _unpermute
from torchtitan.models.qwen3.infra.parallelize import apply_non_moe_tp as apply_qwen3_tp
from torchtitan.protocols.train_spec import OptimizersBuilder, ParallelizeFunction, PipeliningFunction
from torchtitan.tools import utils
from torchtitan.tools.profiling import maybe_enable_profiling
from torchtitan.train import Trainer

from torchtitan_npu.titan_internals.rebind import rebound, refers_to
from torchtitan_npu.torch_internals.activation_checkpoint import checkpoint_wrapper


def forces_load_balance(router: TokenChoiceTopKRouter) -> bool:
    """Return whether TorchTitan's debug option makes ``router`` assign the experts in turn."""
    return router._debug_force_load_balance


def limit_to_groups(router: TokenChoiceTopKRouter, scores: Tensor) -> Tensor:
    """Return ``scores`` (tokens, experts) with -inf outside the groups of experts that ``router`` selects."""
    return router._get_node_limited_routing_scores(scores)


def with_tensor_parallel(parallelize: ParallelizeFunction, apply: Callable[..., None]) -> ParallelizeFunction:
    """Return ``parallelize`` with ``apply`` in place of ``apply_non_moe_tp`` of DeepSeek-V3 or Qwen3.

    Its plan names the modules of that one model.
    """
    return rebound(parallelize, {apply_deepseek_v3_tp: apply, apply_qwen3_tp: apply})


def with_activation_checkpoint(parallelize: ParallelizeFunction, apply: Callable[..., None]) -> ParallelizeFunction:
    """Return ``parallelize`` with ``apply`` in place of ``apply_ac``.

    It wraps only the blocks in ``model.layers``, and saves only the operators that the plan's module lists.
    """
    return rebound(parallelize, {apply_ac: apply})


def with_compile(parallelize: ParallelizeFunction, apply: Callable[..., None]) -> ParallelizeFunction:
    """Return ``parallelize`` with ``apply`` in place of ``apply_compile``, which compiles whole attention modules."""
    return rebound(parallelize, {apply_compile: apply})


def with_fsdp(parallelize: ParallelizeFunction, apply: Callable[..., None]) -> ParallelizeFunction:
    """Return ``parallelize`` with ``apply`` in place of ``apply_fsdp``, which shards only ``model.layers`` by block."""
    return rebound(parallelize, {apply_fsdp: apply})


def with_moe_parallel(parallelize: ParallelizeFunction, apply: Callable[..., None]) -> ParallelizeFunction:
    """Return ``parallelize`` with ``apply`` in place of ``apply_moe_ep_tp``, which gathers tokens before the router."""
    return rebound(parallelize, {apply_moe_ep_tp: apply})


def calls_moe_parallel(parallelize: ParallelizeFunction) -> bool:
    """Return whether :func:`with_moe_parallel` would change ``parallelize``."""
    return bool(refers_to(parallelize, [apply_moe_ep_tp]))


def with_expert_parallel_styles(
    parallelize: ParallelizeFunction, styles: Mapping[type[ExpertParallel], type[ExpertParallel]]
) -> ParallelizeFunction:
    """Return ``parallelize`` with ``styles[x]`` in place of the expert-parallel style ``x``, which needs Triton."""
    return rebound(parallelize, styles)


def with_reorderer_style(parallelize: ParallelizeFunction, style: type[ParallelStyle]) -> ParallelizeFunction:
    """Return ``parallelize`` with ``style`` in place of TorchTitan's ``ReordererSequenceParallel``."""
    return rebound(parallelize, {ReordererSequenceParallel: style})


def without_attention_context_parallel(parallelize: ParallelizeFunction) -> ParallelizeFunction:
    """Return ``parallelize`` without TorchTitan's context parallel, which knows scaled dot-product attention only."""
    return rebound(parallelize, {apply_cp_to_attention_module: lambda *args: None})


def with_checkpoint_wrapper(parallelize: ParallelizeFunction, wrapper: Callable[..., Any]) -> ParallelizeFunction:
    """Return ``parallelize`` with ``wrapper`` in place of torch's ``checkpoint_wrapper``."""
    return rebound(parallelize, {checkpoint_wrapper: wrapper})


def with_pipeline_stage(pipeline: PipeliningFunction, stage: type[PipelineStage]) -> PipeliningFunction:
    """Return ``pipeline`` with ``stage`` in place of torch's ``PipelineStage``."""
    return rebound(pipeline, {PipelineStage: stage})


def with_optimizers_container(build_optimizers: OptimizersBuilder, container: Callable[..., Any]) -> OptimizersBuilder:
    """Return ``build_optimizers`` with ``container`` in place of TorchTitan's ``OptimizersContainer``."""
    return rebound(build_optimizers, {OptimizersContainer: container})


def with_expert_balancing(build_optimizers: OptimizersBuilder, balancing: OptimizersBuilder) -> OptimizersBuilder:
    """Return ``build_optimizers`` with ``balancing`` in place of TorchTitan's builder that balances experts."""
    if build_optimizers is build_optimizers_with_moe_load_balancing:
        return balancing
    return rebound(build_optimizers, {build_optimizers_with_moe_load_balancing: balancing})


def token_dispatch_with(permute: Callable[..., Any]) -> Callable[..., Any]:
    """Return ``ExpertParallel._token_dispatch`` with ``permute`` in place of its ``_permute``, which needs Triton."""
    return rebound(ExpertParallel._token_dispatch, {_permute: permute})


def token_combine_with(unpermute: Callable[..., Any]) -> Callable[..., Any]:
    """Return ``ExpertParallel._token_combine`` with ``unpermute`` in place of its ``_unpermute``."""
    return rebound(ExpertParallel._token_combine, {_unpermute: unpermute})


def train_with(profiling: Callable[..., Any], set_timeouts: Callable[..., None]) -> Callable[..., Any]:
    """Return ``Trainer.train`` with ``profiling`` and ``set_timeouts`` in place of TorchTitan's.

    They are ``maybe_enable_profiling``, which knows CUDA and XPU, and ``set_pg_timeouts``, which knows NCCL and gloo.
    """
    utils_with_timeouts = SimpleNamespace(**vars(dist_utils) | {"set_pg_timeouts": set_timeouts})
    replacements = {maybe_enable_profiling: profiling, dist_utils: utils_with_timeouts}
    return rebound(Trainer.train, replacements)


def train_step_with(clip: Callable[..., Any]) -> Callable[..., None]:
    """Return ``Trainer.train_step`` with ``clip`` in place of ``clip_grad_norm_``, the last call before the update."""
    return rebound(Trainer.train_step, {dist_utils: SimpleNamespace(**vars(dist_utils) | {"clip_grad_norm_": clip})})


def with_peak_flops(init: Callable[..., None], peak_flops: Callable[[str], float]) -> Callable[..., None]:
    """Return ``init``, of the Trainer or the MetricsProcessor, with ``peak_flops`` in place of ``get_peak_flops``.

    TorchTitan's takes an NPU for an A100.
    """
    return rebound(init, {utils: SimpleNamespace(**vars(utils) | {"get_peak_flops": peak_flops})})


def with_checkpoint_manager(init: Callable[..., None], manager: Callable[..., Any]) -> Callable[..., None]:
    """Return ``init`` of the Trainer with ``manager`` in place of TorchTitan's ``CheckpointManager``."""
    return rebound(init, {CheckpointManager: manager})


def saving_in(dcp_save: Callable[..., Any], group: Any) -> Callable[..., Any]:
    """Return ``CheckpointManager.dcp_save`` whose exports wait for the slowest rank in ``group``, with its time-out.

    TorchTitan's wait in the default group, whose time-out is that of the training's collectives.
    """
    save, consolidate = partial(dcp.save, process_group=group), consolidate_safetensors_files_on_every_rank
    return rebound(
        dcp_save,
        {
            dcp: SimpleNamespace(**vars(dcp) | {"save": save}),
            consolidate: partial(consolidate, process_group=group),
        },
    )


def loading_in(dcp_load: Callable[..., Any], group: Any) -> Callable[..., Any]:
    """Return ``CheckpointManager.dcp_load`` that waits for the slowest rank in ``group``, as :func:`saving_in` does."""
    return rebound(dcp_load, {dcp: SimpleNamespace(**vars(dcp) | {"load": partial(dcp.load, process_group=group)})})


def with_rotations(
    method: Callable[..., Any], rotations: Mapping[Callable[..., Any], Callable[..., Any]]
) -> Callable[..., Any]:
    """Return an attention's ``method`` with ``rotations[x]`` in place of the function ``x`` that rotates.

    TorchTitan's attention modules call ``apply_rotary_emb`` by global name.
    """
    return rebound(method, rotations)
