"""Hooks that TorchTitan 0.2.2 lacks: replace one call inside one of its functions, in a copy of that function.

Each hook names the call and why it has to be replaced. A hook can be deleted when TorchTitan passes the callee as an
argument. Any module may import this one: of this package it imports only
:mod:`torchtitan_npu.upstream.rebind` and ``torch_internals``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch.distributed.pipelining import PipelineStage
from torchtitan.components.optimizer import OptimizersContainer, build_optimizers_with_moe_load_balancing
from torchtitan.distributed.context_parallel import apply_cp_to_attention_module
from torchtitan.distributed.expert_parallel import ExpertParallel
from torchtitan.models.moe.utils import _permute, _unpermute
from torchtitan.protocols.train_spec import OptimizersBuilder, ParallelizeFunction, PipeliningFunction

from torchtitan_npu.torch_internals.activation_checkpoint import checkpoint_wrapper
from torchtitan_npu.upstream.rebind import rebound


def with_steps(parallelize: ParallelizeFunction, steps: Mapping[Any, Any]) -> ParallelizeFunction:
    """Return ``parallelize`` with ``steps[x]`` in place of its step or parallel style ``x``.

    A parallel plan of TorchTitan calls its steps (``apply_fsdp``, ``apply_ac``, …) by global name. A model that needs
    one step changed would otherwise have to copy the plan.
    """
    return rebound(parallelize, steps)


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


def with_functions(method: Callable[..., Any], functions: Mapping[Any, Any]) -> Callable[..., Any]:
    """Return a model's ``method`` with ``functions[x]`` in place of the function ``x`` that it calls.

    TorchTitan's attention modules call ``apply_rotary_emb`` by global name.
    """
    return rebound(method, functions)
