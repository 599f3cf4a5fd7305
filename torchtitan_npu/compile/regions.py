"""What of a model is compiled: whole blocks, or of a block with hooks or waits inside the parts in between.

TorchTitan's own ``apply_compile`` also sets options of torch._dynamo and replaces a function of its MoE module, for
every model in the process. Here nothing but the given model changes, and its parameters keep their names.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import CheckpointWrapper
from torch.distributed.tensor import DTensor
from torchtitan.config import JobConfig
from torchtitan.models.moe.moe import MoE
from torchtitan.tools.logging import logger

from torchtitan_npu.compile.backend import bypassed, bypassing
from torchtitan_npu.compile.passes import GraphPasses
from torchtitan_npu.compile.progress import Progress
from torchtitan_npu.config.job_config import npu_options

OPTIONS: dict[str, Any] = {"backend": bypassed, "fullgraph": True}


def compiled_here(job_config: JobConfig) -> bool:
    """Whether we choose what is compiled, and with what: TorchTitan has no place for a backend of ours, nor a pass."""
    npu = npu_options(job_config)
    return job_config.compile.enable and (npu.bypass_codegen or bool(npu.graph_passes))


def not_compiling(job_config: JobConfig) -> JobConfig:
    """``job_config`` for TorchTitan's functions, which are to leave compiling to :func:`compile_models`."""
    return replace(job_config, compile=replace(job_config.compile, enable=False))


def compile_models(models: Sequence[Any], job_config: JobConfig) -> None:
    """Compile the blocks in the ``layers`` of a job's models, after all that the layout does to them.

    There are several where a rank has several stages of a pipeline: with one backend for all, their blocks share
    graphs. The loss is left out: it is two operators, too few to gain.
    """
    if not models or "model" not in job_config.compile.components:
        return
    npu = npu_options(job_config)
    passes = GraphPasses(npu.graph_passes, npu.sp_min_tokens, npu.sp_whole_inputs, npu.strict_limits)
    for model in models:
        model.graph_passes = passes  # for the report after the first step
    if npu.bypass_codegen:
        options = {**OPTIONS, "backend": bypassing([passes], Progress().region_compiled)}
    else:
        # Inductor has it run on what our backend does: a joint graph before it is cut, or one without gradients
        options = {**OPTIONS, "backend": "inductor", "options": {"joint_custom_pre_pass": passes}}
    blocks = [block for model in models for block in model.layers.values()]
    regions = sum(compile_block(block, options, generating=not npu.bypass_codegen) for block in blocks)
    how = "code generation bypassed" if npu.bypass_codegen else "by Inductor, which can take minutes"
    logger.info(f"{regions} regions of {len(blocks)} blocks are compiled when they are first called, {how}")


def compile_block(outer: Any, options: dict[str, Any] = OPTIONS, generating: bool = False) -> int:
    """Compile a block, and return how many regions it then has.

    Experts whose sizes are not known (:func:`has_known_sizes`) stay as they are, with the exchange of tokens around
    them. So does attention in a block that says what comes before it and after (``prolog``, ``epilog``): it is a few
    fused operators, whose backward pass counts a loss.

    With ``generating``, the backend generates kernels, by which every part gains; but experts stay as they are.
    """
    wait_at(outer)
    block = outer._checkpoint_wrapped_module if isinstance(outer, CheckpointWrapper) else outer
    moes = [child for child in block.children() if isinstance(child, MoE)]
    in_parts = hasattr(block, "prolog")
    in_full = not moes or (not generating and all(map(has_known_sizes, moes)))
    if in_full and in_parts:
        block.prolog = torch.compile(block.prolog, **options)
        block.epilog = torch.compile(block.epilog, **options)
        block.experts_in_epilog = bool(moes)
        for moe in moes:  # activation checkpointing, which is outside of the regions, repeats them
            block.register_forward_pre_hook(partial(_tell_whether_it_counts, moe))
        return 2
    if in_full:
        # its forward, not its call: FSDP's hooks, which gather the weights, stay outside
        outer.forward = torch.compile(outer.forward, **options)
        for moe in moes:
            moe.told_to_count = True  # what the graph computes again for the backward pass counts nothing
        return 1
    small = [part for moe in moes for part in (moe.router, moe.shared_experts) if part is not None]
    regions, large = 0, []
    if in_parts:
        block.prolog = torch.compile(block.prolog, **options)
        regions = 1
        # up to the experts it is a product, a sum and a norm: too little on local tensors
        if generating or is_worth_it(block.attention):
            block.epilog = torch.compile(block.epilog, **options)
            regions = 2
    else:
        large = [child for child in block.children() if child is getattr(block, "attention", None)]
        small += [child for child in block.children() if child not in (*moes, *large)]
    parts = [*large, *(part for part in small if (generating and _has_children(part)) or is_worth_it(part))]
    for part in parts:
        # its call: the hooks by which tensor parallel lays out its inputs are compiled too, as graphs of their own
        part.compile(**options)
    return regions + len(parts)


def has_known_sizes(moe: Any) -> bool:
    """Whether a graph can hold the experts: its sizes are those of their input, whichever tokens go where.

    They are with ``npu_permute`` and ``npu_gmm``, for which the numbers of tokens are a tensor. Expert parallel sends
    as many tokens to a rank as are routed there, and FSDP then has hooks inside, which no graph can hold.
    """
    waits = any(getattr(part, "waits_for_counts", True) for part in (moe, moe.experts))
    return not waits and not any("ep" in _mesh_names(weight) for weight in moe.experts.parameters())


def _tell_whether_it_counts(moe: Any, block: nn.Module, args: Any) -> None:
    moe.told_to_count = moe.is_counted()


def is_worth_it(part: nn.Module) -> bool:
    """Whether a part of a block is compiled: where calling a compiled region adds less than it takes off the host.

    DTensors cost the host several hundred µs for each operator. On local tensors it is through with a norm, a router
    or shared experts sooner than with a region's guards: docs/how-to/compile.md has the numbers.
    """
    if not _has_children(part):
        return False
    return any("tp" in _mesh_names(weight) for weight in part.parameters())


def _has_children(part: nn.Module) -> bool:
    """Whether it is no norm: torch.compile takes none of torch.nn's own modules by their call."""
    return next(part.children(), None) is not None


def _mesh_names(weight: Tensor) -> tuple[str, ...]:
    """Of the dimensions of the mesh that ``weight`` is on, if it is on one."""
    return (weight.device_mesh.mesh_dim_names or ()) if isinstance(weight, DTensor) else ()


class _Waited(torch.autograd.Function):
    """A tensor whose communication was under way, when it is there."""

    @staticmethod
    def forward(ctx: Any, pending: AsyncCollectiveTensor) -> Tensor:
        tensor = pending.trigger_wait()
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient


def wait_at(block: nn.Module) -> None:
    """Have a block that is compiled, or parts of it, wait for its inputs; and its experts for theirs."""
    for module in (block, *(module for module in block.modules() if isinstance(module, MoE))):
        # after tensor parallel's, which gathers the router's tokens
        module.register_forward_pre_hook(wait_for_inputs, with_kwargs=True)


def wait_for_inputs(
    module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Wait for the collectives that the inputs of a compiled region come from.

    AOTAutograd waits for them too, but then goes on with the tensor inside, whose gradient does not pass where DTensor
    became local: "'Tensor' object has no attribute '_local_tensor'" in the backward pass (torch 2.13).
    """
    return tuple(map(_waited, args)), {name: _waited(value) for name, value in kwargs.items()}


def _waited(value: Any) -> Any:
    if not isinstance(value, AsyncCollectiveTensor):
        return value
    # without gradients no view: the other blocks' inputs are none, and would have a graph of their own
    return _Waited.apply(value) if torch.is_grad_enabled() else value.trigger_wait()
