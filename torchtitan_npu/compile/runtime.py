"""What runs when a compiled region is called: one node of autograd's graph, and nothing that is not needed.

AOTAutograd's own runtime can do more: inputs that are changed, outputs that alias inputs, tensor subclasses, sizes that
change. Regions that have none of that, those on local tensors without experts, do without: docs/how-to/compile.md
has what it
takes the host.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch._functorch._aot_autograd.schemas import OutputType
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from torchtitan_npu.compile.interpreter import Launch

PLAIN_OUTPUTS = (OutputType.non_alias, OutputType.unsafe_view_alias)


@dataclass
class Compiled:
    """What runs a graph, and how many inputs it takes."""

    launch: Launch
    inputs: int


def plain_region(inputs: list[Any], metadata: Any, compiled: list[Compiled]) -> Callable[..., Any] | None:
    """The function of ``inputs`` that ``compiled`` is, or none where it takes AOTAutograd's runtime to call it.

    ``compiled`` is the forward graph and the backward, or one without gradients; ``metadata`` is what AOTAutograd knows
    of the function; ``inputs`` are examples.
    """
    if not _is_plain(inputs, metadata, compiled[0]):
        return None
    if len(compiled) == 1:
        if any(info.requires_grad for info in metadata.output_info):
            return None  # the backward graph is not there yet
        launch = compiled[0].launch
        return lambda *given: _without_autocast(launch, list(given))
    forward, backward = compiled
    return _differentiable(metadata, forward, backward)


def _is_plain(inputs: list[Any], metadata: Any, forward: Compiled) -> bool:
    """Whether the graphs' inputs and outputs are the function's own: tensors that alias none of the others."""
    unusual = (
        "num_mutated_inp_runtime_indices",
        "num_intermediate_bases",
        "num_tensors_saved_with_no_vc_check",
        "num_opaque_objects_saved_for_bw",
        "num_symints_saved_for_bw",
        "num_backward_tokens",
        "num_graphsafe_rng_states",
        "tokens",
        "is_rng_op_functionalized",
    )
    if any(getattr(metadata, name) for name in unusual) or metadata.grad_enabled_mutation is not None:
        return False
    if getattr(metadata, "act_input_indices", None):  # torch 2.11 has none
        return False
    if forward.inputs != len(inputs):
        return False
    if not all(isinstance(value, Tensor) and not is_traceable_wrapper_subclass(value) for value in inputs):
        return False
    if any(info.mutates_data or info.mutates_metadata for info in metadata.input_info):
        return False
    return all(
        info.output_type in PLAIN_OUTPUTS and issubclass(info.raw_type, Tensor) and not _is_subclass(info.raw_type)
        for info in metadata.output_info
    )


def _is_subclass(raw_type: type) -> bool:
    return hasattr(raw_type, "__tensor_flatten__")


def _differentiable(metadata: Any, forward: Compiled, backward: Compiled) -> Callable[..., Any]:
    """The region as a function whose gradients are ``backward``'s outputs."""
    infos = metadata.output_info
    count = len(infos)
    constant = [place for place, info in enumerate(infos) if not info.requires_grad]
    # torch 2.13 tells a view without a gradient of its own from what requires one; 2.11 does not
    varying = [
        place for place, info in enumerate(infos) if getattr(info, "requires_grad_for_backward", info.requires_grad)
    ]

    class Region(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, *given: Tensor) -> tuple[Tensor, ...]:  # type: ignore[override]
            results = _without_autocast(forward.launch, list(given))
            outputs = tuple(results[:count])
            ctx.save_for_backward(*results[count:])
            if constant:
                ctx.mark_non_differentiable(*(outputs[place] for place in constant))
            return outputs

        @staticmethod
        def backward(ctx: Any, *gradients: Any) -> Any:
            if torch.is_grad_enabled():
                raise RuntimeError("a compiled region has no second derivative: backward(create_graph=True)")
            given = [*ctx.saved_tensors]
            for place in varying:
                gradient = gradients[place]
                given.append(gradient.trigger_wait() if isinstance(gradient, AsyncCollectiveTensor) else gradient)
            ctx.maybe_clear_saved_tensors()  # so that each is freed when the graph has used it, not at the end
            return _without_autocast(backward.launch, given)

    # past the Python of torch.autograd.Function.apply, which asks after functorch's transforms
    return super(torch.autograd.Function, Region).apply  # type: ignore[misc]


def _without_autocast(launch: Launch, given: list[Any]) -> Any:
    """A graph has its casts in it."""
    with torch._C._DisableAutocast():
        return launch(given)
