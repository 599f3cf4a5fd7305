"""What of a model is compiled: whole blocks, or of a block that communicates inside the parts in between.

TorchTitan's own ``apply_compile`` also sets options of torch._dynamo and replaces a function of its MoE module, for
every model in the process. Here nothing but the given model changes, and its parameters keep their names.
"""

from __future__ import annotations

from dataclasses import replace
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
from torchtitan_npu.config import npu_options

OPTIONS: dict[str, Any] = {"backend": bypassed, "fullgraph": True}


def bypasses_codegen(job_config: JobConfig) -> bool:
    return job_config.compile.enable and npu_options(job_config).bypass_codegen


def not_compiling(job_config: JobConfig) -> JobConfig:
    """``job_config`` for TorchTitan's functions, which are to leave compiling to :func:`compile_model`."""
    return replace(job_config, compile=replace(job_config.compile, enable=False))


def compile_model(model: Any, job_config: JobConfig) -> None:
    """Compile the blocks in ``model.layers``, after all that the layout does to the model.

    The loss is left out: it is two operators, too few to gain.
    """
    if "model" not in job_config.compile.components:
        return
    npu = npu_options(job_config)
    passes = GraphPasses(npu.graph_passes, npu.sp_min_tokens)
    options = {**OPTIONS, "backend": bypassing([passes], Progress().region_compiled)}
    regions = sum(compile_block(block, options) for block in model.layers.values())
    logger.info(
        f"{regions} regions of {len(model.layers)} blocks are compiled when they are first called, code generation "
        "bypassed"
    )


def compile_block(outer: Any, options: dict[str, Any] = OPTIONS) -> int:
    """Compile a block, and return how many regions it then has.

    Experts and the exchange of tokens around them stay as they are: the number of tokens differs from step to step, and
    FSDP has hooks inside, which no graph can hold. So does an attention that says what comes before it proper and after
    (``prolog``, ``epilog``): what is between is a few fused operators, whose backward pass counts a loss.
    """
    outer.register_forward_pre_hook(wait_for_inputs, with_kwargs=True)
    block = outer._checkpoint_wrapped_module if isinstance(outer, CheckpointWrapper) else outer
    moes = [child for child in block.children() if isinstance(child, MoE)]
    attention = getattr(block, "attention", None)
    in_parts = hasattr(attention, "prolog")
    if not moes and not in_parts:
        # its forward, not its call: FSDP's hooks, which gather the weights, stay outside
        outer.forward = torch.compile(outer.forward, **options)
        return 1
    parts = [child for child in block.children() if child not in moes]
    regions = 0
    if in_parts:
        block.attention.prolog = torch.compile(block.attention.prolog, **options)
        regions += 1
        if is_worth_it(block.attention):
            block.attention.epilog = torch.compile(block.attention.epilog, **options)
            regions += 1
        parts.remove(block.attention)
    for moe in moes:
        # after tensor parallel's, which gathers the router's tokens
        moe.register_forward_pre_hook(wait_for_inputs, with_kwargs=True)
    parts += [part for moe in moes for part in (moe.router, moe.shared_experts) if part is not None]
    worth_it = [part for part in parts if part is attention or is_worth_it(part)]
    for part in worth_it:
        part.compile(**options)  # its call, with the hooks by which tensor parallel lays out its inputs
    return regions + len(worth_it)


def is_worth_it(part: nn.Module) -> bool:
    """Whether a part of a block is compiled: where calling a compiled region adds less than it takes off the host.

    DTensors cost the host several hundred µs for each operator. On local tensors it is through with a norm, a router,
    a dense network or an epilog sooner than with a region's guards: docs/compile.md has the numbers.
    """
    if next(part.children(), None) is None:  # a norm: torch.compile takes none of torch.nn's own modules by their call
        return False
    return any(isinstance(weight, DTensor) and "tp" in _mesh_names(weight) for weight in part.parameters())


def _mesh_names(weight: DTensor) -> tuple[str, ...]:
    return weight.device_mesh.mesh_dim_names or ()


class _Waited(torch.autograd.Function):
    """A tensor whose communication was under way, when it is there."""

    @staticmethod
    def forward(ctx: Any, pending: AsyncCollectiveTensor) -> Tensor:
        tensor = pending.trigger_wait()
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient


def wait_for_inputs(
    module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Wait for the collectives that the inputs of a compiled region come from.

    AOTAutograd waits for them too, but then goes on with the tensor inside, whose gradient does not pass where DTensor
    became local: "'Tensor' object has no attribute '_local_tensor'" in the backward pass (torch 2.13).
    """
    return tuple(map(_waited, args)), {name: _waited(value) for name, value in kwargs.items()}


def _waited(value: Any) -> Any:
    return _Waited.apply(value) if isinstance(value, AsyncCollectiveTensor) else value
