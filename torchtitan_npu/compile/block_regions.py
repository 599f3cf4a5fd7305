"""Choose and compile the regions of a model: whole blocks, or the parts between a block's hooks and waits.

TorchTitan's ``apply_compile`` sets options of torch._dynamo and replaces a function of its MoE module for every model
in the process. Here only the model that is passed changes, and its parameters keep their names.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torchtitan.config import JobConfig
from torchtitan.models.moe.moe import MoE
from torchtitan.tools.logging import logger

from torchtitan_npu.compile.backend import bypass_codegen, make_backend
from torchtitan_npu.compile.passes import GraphPasses
from torchtitan_npu.config.job_config import with_all_sections
from torchtitan_npu.torch_internals.activation_checkpoint import without_checkpoint_wrapper
from torchtitan_npu.torch_internals.distributed import waited

OPTIONS: dict[str, Any] = {"backend": bypass_codegen, "fullgraph": True}


def compile_models(models: Sequence[Any], job_config: JobConfig) -> None:
    """Compile the blocks in ``layers`` of each model part, after the parallelism has been applied.

    A rank with several pipeline stages has several parts. They use one backend, so identical blocks reuse graphs. The
    loss is not compiled: it has only two operators.
    """
    if not models or "model" not in job_config.compile.components:
        return
    npu = with_all_sections(job_config).npu
    passes = GraphPasses(npu.graph_passes, npu.sp_min_tokens, npu.sp_whole_inputs, npu.strict_limits)
    for model in models:
        model.graph_passes = passes  # for the report after the first step
    bypassed = npu.bypass_codegen != "off"
    if bypassed:
        options = {**OPTIONS, "backend": make_backend([passes])}
    else:
        # Inductor runs this pass on the same graphs as our backend: joint graphs and inference graphs
        options = {**OPTIONS, "backend": "inductor", "options": {"joint_custom_pre_pass": passes}}
    blocks = [block for model in models for block in model.layers.values()]
    regions = sum(compile_block(block, options, codegen=not bypassed) for block in blocks)
    how = "code generation bypassed" if bypassed else "by Inductor, which can take minutes"
    logger.info(f"{regions} regions of {len(blocks)} blocks are compiled at their first call, {how}")


def compile_block(outer: Any, options: dict[str, Any] = OPTIONS, codegen: bool = False) -> int:
    """Compile a block and return the number of its regions.

    Two parts may stay eager. Experts do if :func:`has_static_sizes` is false for them, together with the exchange of
    tokens around them. Attention does in a block with ``pre_attention`` and ``post_attention``: it consists of a few
    fused operators, and its backward pass updates a loss.

    If the backend generates code (``codegen``), small parts are compiled too, and experts always stay eager.
    """
    add_input_waits(outer)
    block = without_checkpoint_wrapper(outer)
    moes = [child for child in block.children() if isinstance(child, MoE)]
    in_parts = hasattr(block, "pre_attention")
    with_experts = not moes or (not codegen and all(map(has_static_sizes, moes)))
    if with_experts and in_parts:
        block.pre_attention = torch.compile(block.pre_attention, **options)
        block.post_attention = torch.compile(block.post_attention, **options)
        block.experts_in_post_attention = bool(moes)
        for moe in moes:  # activation checkpointing is outside of the regions and runs them twice
            block.register_forward_pre_hook(partial(_set_whether_tokens_count, moe))
        return 2
    if with_experts:
        # forward and not __call__: FSDP's hooks, which gather the weights, stay outside
        outer.forward = torch.compile(outer.forward, **options)
        for moe in moes:
            moe.counts_tokens = True  # the recomputation inside the backward graph does not count tokens
        return 1
    small = [part for moe in moes for part in (moe.router, moe.shared_experts) if part is not None]
    regions, large = 0, []
    if in_parts:
        block.pre_attention = torch.compile(block.pre_attention, **options)
        regions = 1
        # up to the experts, post_attention is a matmul, a sum and a norm: too little for a region on local tensors
        if codegen or is_worth_compiling(block.attention):
            block.post_attention = torch.compile(block.post_attention, **options)
            regions = 2
    else:
        large = [child for child in block.children() if child is getattr(block, "attention", None)]
        small += [child for child in block.children() if child not in (*moes, *large)]
    parts = [*large, *(part for part in small if (codegen and _has_children(part)) or is_worth_compiling(part))]
    for part in parts:
        # __call__ and not forward: tensor parallel's input and output hooks are compiled as graphs of their own
        part.compile(**options)
    return regions + len(parts)


def has_static_sizes(moe: Any) -> bool:
    """Return whether the sizes in a MoE module are independent of the routing, so that one graph can hold it.

    They are with ``npu_permute`` and ``npu_gmm``, which pass the token counts as a tensor. With expert parallel, the
    number of tokens of a rank depends on the routing, and FSDP adds hooks inside the module.
    """
    waits = any(getattr(part, "waits_for_counts", True) for part in (moe, moe.experts))
    return not waits and not any("ep" in _mesh_dim_names(weight) for weight in moe.experts.parameters())


def _set_whether_tokens_count(moe: Any, block: nn.Module, args: Any) -> None:
    moe.counts_tokens = moe.is_counted()


def is_worth_compiling(part: nn.Module) -> bool:
    """Return whether a compiled part of a block costs the host less time than an eager one.

    It does with DTensors, which cost several hundred µs per operator. On local tensors a norm, a router or shared
    experts take less time than the guards of a region.
    """
    if not _has_children(part):
        return False
    return any("tp" in _mesh_dim_names(weight) for weight in part.parameters())


def _has_children(part: nn.Module) -> bool:
    """Return whether ``part`` has submodules. ``Module.compile`` has no effect on torch.nn's own modules (norms)."""
    return next(part.children(), None) is not None


def _mesh_dim_names(weight: Tensor) -> tuple[str, ...]:
    return (weight.device_mesh.mesh_dim_names or ()) if isinstance(weight, DTensor) else ()


def add_input_waits(block: nn.Module) -> None:
    """Workaround: let a block and its MoE modules wait for pending inputs before a compiled region gets them.

    AOTAutograd waits for such inputs too, but then passes on the tensor inside. Where a DTensor became local, its
    gradient fails: "'Tensor' object has no attribute '_local_tensor'" in the backward pass (torch 2.13).
    Delete when tensor-parallel MoE blocks train compiled without it.
    """

    def wait(
        module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        return tuple(map(waited, args)), {name: waited(value) for name, value in kwargs.items()}

    for module in (block, *(module for module in block.modules() if isinstance(module, MoE))):
        # runs after tensor parallel's hook, which gathers the router's tokens
        module.register_forward_pre_hook(wait, with_kwargs=True)
