"""Backward graphs that take gradients as they lie, so that none is copied for its layout.

A backward graph is captured on gradients that lie as the region's outputs do. What autograd's formulas ask of strides
is answered then: a reshape without a copy is written down as a view, a ``contiguous()`` without one not at all. Where a
gradient turns out to lie in another way, the same graph runs with these questions open, as eager mode asks them.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor, fx
from torch._functorch._aot_autograd import subclass_utils
from torch._functorch._aot_autograd.descriptors import SubclassGetAttrAOTOutput
from torch._functorch._aot_autograd.schemas import MemoryFormatMeta

from torchtitan_npu.compile.interpreter import Launch, NotExpressible
from torchtitan_npu.compile.passes.graphs import SAME_MEMORY, aten, gradients, laid_by_gradients, value
from torchtitan_npu.torch_internals.dispatch import OpOverload

COUNT_ON_STRIDES = {
    # made so by autograd's formulas
    "aten.view_as_real.default",
    "aten.view_as_complex.default",
    # by DTensor
    "_c10d_functional.all_gather_into_tensor.default",
    "_c10d_functional.reduce_scatter_tensor.default",
    "_c10d_functional.all_to_all_single.default",
    # by the pass that writes them
    "npu.npu_all_gather_base_mm.default",
    "npu.npu_mm_reduce_scatter_base.default",
    # by torchao
    "aten._scaled_mm.default",
}
"""Operators whose arguments are made contiguous before, where they are not; where they were, no graph shows it."""
NAMESPACES = ("aten", "prims", "npu", "_c10d_functional")
"""Whose other operators take any strides. What a user's own are given may have been made contiguous, too."""
OF_STRIDES = (
    aten.as_strided.default,
    aten.as_strided_copy.default,
    aten.as_strided_scatter.default,
    aten._reshape_alias.default,
)
"""Operators that are told strides, by which they mean those of what they were captured on."""


def copy_of(graph_module: fx.GraphModule) -> fx.GraphModule:
    graph = fx.Graph()
    graph.output(graph.graph_copy(graph_module.graph, {}))
    return fx.GraphModule(graph_module, graph)


def open_strides(graph: fx.Graph) -> None:
    """Have what depends on the gradients' strides ask for them when it runs."""
    open_ones = laid_by_gradients(graph)
    for node in [node for node in graph.nodes if not open_ones.isdisjoint(node.all_input_nodes)]:
        first: Any = node.args[0] if node.args else None
        if node.target in SAME_MEMORY:
            node.target = aten.reshape.default  # which copies only if it must
            if _is_laid_out(first):  # a reshape that had to
                node.args = (first.args[0], *node.args[1:])
        elif _is_laid_out(node):
            node.target = aten.contiguous.default
        elif _may_count_on_strides(node.target):
            for argument in node.all_input_nodes:
                if argument in open_ones and _was_contiguous(value(argument)):
                    with graph.inserting_before(node):
                        laid = graph.call_function(aten.contiguous.default, (argument,))
                    node.replace_input_with(argument, laid)
    graph.eliminate_dead_code()


def _was_contiguous(captured: Any) -> bool:
    if not isinstance(captured, Tensor):
        return False
    if all(isinstance(number, int) for number in (*captured.shape, *captured.stride())):
        return captured.is_contiguous()
    # sizes that are not known are compared as written, so that none is guarded
    steps = [*accumulate(reversed(captured.shape[1:]), operator.mul, initial=1)]
    return [repr(step) for step in reversed(steps)] == [repr(step) for step in captured.stride()]


def _may_count_on_strides(target: Any) -> bool:
    if not isinstance(target, OpOverload):
        return False
    return str(target) in COUNT_ON_STRIDES or target.namespace not in NAMESPACES


def _is_laid_out(node: Any) -> bool:
    """Whether it is what ``contiguous()`` does where it has to do something."""
    return (
        isinstance(node, fx.Node)
        and node.target in (aten.clone.default, aten.contiguous.default)
        and node.kwargs.get("memory_format") is torch.contiguous_format
    )


def for_any_strides(
    graph_module: fx.GraphModule, as_captured: Callable[[], Launch], opened: Callable[[], Launch]
) -> Launch:
    """What runs a backward graph: ``as_captured``, or ``opened`` when a gradient lies in another way.

    Both write a graph for the interpreter; the second is written when it is first needed. It cannot be of a graph that
    has strides written into it (``as_strided``): there, gradients are laid out as they were captured.
    """
    graph = graph_module.graph
    inputs = graph.find_nodes(op="placeholder")
    places = [(inputs.index(node), node.meta["val"].stride()) for node in gradients(graph)]
    expected = [(place, stride) for place, stride in places if all(isinstance(number, int) for number in stride)]
    of_dtensors = _outputs_of_dtensors(graph)
    told = [node for node in laid_by_gradients(graph) if node.target in OF_STRIDES]
    if len(expected) < len(places) and not of_dtensors:
        if told:
            raise NotExpressible(f"{told[0].format_node()}, of a gradient whose size is not known")
        return opened()
    # of DTensors whose sizes are not known AOTAutograd makes the gradients contiguous
    is_closed = bool(told) or len(expected) < len(places)
    captured = as_captured()
    others: list[Launch] = []

    def launch(given: list[Any]) -> Any:
        for place, stride in expected:
            if not lies_as(given[place], stride):
                break
        else:
            return captured(given)
        if not others:
            others.append(opened())
        results = others[0](given)
        if of_dtensors:  # they are put together with the strides that were captured
            results = list(results)
            for place, stride in of_dtensors:
                results[place] = laid_out(results[place], stride)
        return results

    def launch_closed(given: list[Any]) -> Any:
        for place, stride in expected:
            given[place] = laid_out(given[place], stride)
        return captured(given)

    return launch_closed if is_closed else launch


def _outputs_of_dtensors(graph: fx.Graph) -> list[tuple[int, tuple[int, ...]]]:
    """The places of gradients that become DTensors, and how they were captured."""
    output: Any = graph.output_node()
    return [
        (place, node.meta["val"].stride())
        for place, (node, description) in enumerate(zip(output.args[0], output.meta["desc"], strict=True))
        if isinstance(description, SubclassGetAttrAOTOutput)
        and isinstance(getattr(node, "meta", {}).get("val"), Tensor)
    ]


def lies_as(tensor: Tensor, stride: tuple[int, ...]) -> bool:
    """Whether its elements lie as they would with ``stride``; that of a dimension of size 1 says nothing."""
    own = tensor.stride()
    return own == stride or all(
        size == 1 or here == there for size, here, there in zip(tensor.shape, own, stride, strict=True)
    )


def laid_out(tensor: Tensor, stride: tuple[int, ...]) -> Tensor:
    return tensor if lies_as(tensor, stride) else tensor.new_empty_strided(tensor.shape, stride).copy_(tensor)


class _Anything:
    """Equal to all."""

    __hash__ = None  # type: ignore[assignment]

    def __eq__(self, other: object) -> bool:
        return True


@contextmanager
def gradients_as_they_lie(of_any_size: bool) -> Iterator[None]:
    """Have AOTAutograd's runtime leave the gradients of what is compiled meanwhile where they lie.

    It has no option for that: for each it notes the strides that it was captured with, and copies what lies in another
    way. ``of_any_size`` says whether those whose sizes are not known are left too.
    """
    noted = subclass_utils.maybe_suggest_memory_format

    def note(t: Tensor, with_memory_format: bool) -> MemoryFormatMeta | None:
        if not with_memory_format or (t._has_symbolic_sizes_strides and not of_any_size):
            return noted(t, with_memory_format)
        return MemoryFormatMeta(size=_Anything(), stride=_Anything())  # type: ignore[arg-type]

    subclass_utils.maybe_suggest_memory_format = note
    try:
        yield
    finally:
        subclass_utils.maybe_suggest_memory_format = noted
