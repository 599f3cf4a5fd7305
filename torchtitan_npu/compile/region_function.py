"""The autograd function of a compiled region that does not need AOTAutograd's runtime.

That runtime also handles in-place updates of inputs, outputs that alias inputs, tensor subclasses and dynamic sizes.
Regions on local tensors without experts have none of these. docs/results/compile.md has the host time that this saves.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from torchtitan_npu.torch_internals.aot_autograd import graphs_match_region
from torchtitan_npu.torch_internals.collectives import AsyncCollectiveTensor
from torchtitan_npu.torch_internals.dispatch import without_autocast
from torchtitan_npu.torch_internals.graph_interpreter import Launch


class CompiledGraph(NamedTuple):
    """A graph's launch function and the number of its inputs."""

    launch: Launch
    inputs: int


def region_function(
    inputs: Sequence[Any], metadata: Any, compiled: Sequence[CompiledGraph]
) -> Callable[..., Any] | None:
    """Return the region as a function of ``inputs``, or ``None`` if it needs AOTAutograd's runtime.

    ``compiled`` has the forward and the backward graph, or the only graph of a region without gradients. ``metadata``
    is AOTAutograd's. ``inputs`` are example inputs.
    """
    if not graphs_match_region(metadata, inputs, compiled[0].inputs):
        return None
    if len(compiled) == 2:
        return _differentiable(metadata, *compiled)
    if any(info.requires_grad for info in metadata.output_info):
        return None  # the backward graph is compiled later
    launch = compiled[0].launch
    return lambda *given: _launch_without_autocast(launch, list(given))


def _differentiable(metadata: Any, forward_graph: CompiledGraph, backward_graph: CompiledGraph) -> Callable[..., Any]:
    infos = metadata.output_info
    count = len(infos)
    without_gradient = [place for place, info in enumerate(infos) if not info.requires_grad]
    # in torch 2.13 an output may require a gradient that the backward graph does not take; 2.11 has no such field
    with_gradient = [
        place for place, info in enumerate(infos) if getattr(info, "requires_grad_for_backward", info.requires_grad)
    ]

    class Region(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, *given: Tensor) -> tuple[Tensor, ...]:  # type: ignore[override]
            results = _launch_without_autocast(forward_graph.launch, list(given))
            outputs = tuple(results[:count])
            ctx.save_for_backward(*results[count:])
            if without_gradient:
                ctx.mark_non_differentiable(*(outputs[place] for place in without_gradient))
            return outputs

        @staticmethod
        def backward(ctx: Any, *gradients: Any) -> Any:
            if torch.is_grad_enabled():
                raise RuntimeError("a compiled region has no second derivative: backward(create_graph=True)")
            given = [*ctx.saved_tensors]
            for place in with_gradient:
                gradient = gradients[place]
                given.append(gradient.trigger_wait() if isinstance(gradient, AsyncCollectiveTensor) else gradient)
            ctx.maybe_clear_saved_tensors()  # so that each saved tensor is freed after its last use in the graph
            return _launch_without_autocast(backward_graph.launch, given)

    return Region.apply


def _launch_without_autocast(launch: Launch, inputs: list[Any]) -> Any:
    with without_autocast():  # the graph contains its casts
        return launch(inputs)
