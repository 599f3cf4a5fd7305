"""Backward graphs for gradients of any strides, so that no gradient is copied for its layout.

The backward graph is traced with a placeholder gradient that has the output's strides. Autograd's formulas depend on
strides, and tracing fixes their choice: a reshape that needs no copy becomes a view, and a ``contiguous()`` that does
nothing disappears. If a gradient has other strides, a second version of the graph runs. It makes these choices at run
time, as eager mode does.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor, fx

from torchtitan_npu.compile.passes.graph_utils import VIEWS, aten, gradients, value, with_gradient_strides
from torchtitan_npu.torch_internals.dispatch import OpOverload
from torchtitan_npu.torch_internals.graph_interpreter import Launch, UnsupportedGraph

NEED_CONTIGUOUS = {
    # made contiguous by autograd's formulas
    "aten.view_as_real.default",
    "aten.view_as_complex.default",
    # by DTensor
    "_c10d_functional.all_gather_into_tensor.default",
    "_c10d_functional.reduce_scatter_tensor.default",
    "_c10d_functional.all_to_all_single.default",
    # by the pass async_tp
    "npu.npu_all_gather_base_mm.default",
    "npu.npu_mm_reduce_scatter_base.default",
    # by torchao
    "aten._scaled_mm.default",
}
"""Operators whose callers make the arguments contiguous. The graph shows no trace of it if they already were."""
ANY_STRIDES_NAMESPACES = ("aten", "prims", "npu", "_c10d_functional")
"""Namespaces whose other operators accept any strides. A user's operator may rely on a ``contiguous()`` before it."""
WITH_STRIDE_ARGUMENTS = (
    aten.as_strided.default,
    aten.as_strided_copy.default,
    aten.as_strided_scatter.default,
    aten._reshape_alias.default,
)
"""Operators with strides as arguments. In a traced graph these are the strides seen in tracing."""


def copy_graph(graph_module: fx.GraphModule) -> fx.GraphModule:
    """Return a graph module with a copy of the graph and the same attributes."""
    graph = fx.Graph()
    graph.output(graph.graph_copy(graph_module.graph, {}))
    return fx.GraphModule(graph_module, graph)


def make_stride_agnostic(graph: fx.Graph) -> None:
    """Rewrite a backward graph so that it is correct for gradients of any strides.

    Views become reshapes, copies into contiguous memory become ``contiguous()``, and operators that need a contiguous
    argument get one.
    """
    affected = with_gradient_strides(graph)
    for node in [node for node in graph.nodes if not affected.isdisjoint(node.all_input_nodes)]:
        first: Any = node.args[0] if node.args else None
        if node.target in VIEWS:
            node.target = aten.reshape.default  # copies only if it must
            if _makes_contiguous(first):  # the reshape copied in tracing
                node.args = (first.args[0], *node.args[1:])
        elif _makes_contiguous(node):
            node.target = aten.contiguous.default
        elif _may_need_contiguous(node.target):
            for argument in node.all_input_nodes:
                if argument in affected and _was_contiguous(value(argument)):
                    with graph.inserting_before(node):
                        contiguous = graph.call_function(aten.contiguous.default, (argument,))
                    node.replace_input_with(argument, contiguous)
    graph.eliminate_dead_code()


def _was_contiguous(traced: Any) -> bool:
    if not isinstance(traced, Tensor):
        return False
    if all(isinstance(number, int) for number in (*traced.shape, *traced.stride())):
        return traced.is_contiguous()
    # symbolic sizes are compared by their text, which adds no guards
    steps = [*accumulate(reversed(traced.shape[1:]), operator.mul, initial=1)]
    return [repr(step) for step in reversed(steps)] == [repr(step) for step in traced.stride()]


def _may_need_contiguous(target: Any) -> bool:
    if not isinstance(target, OpOverload):
        return False
    return str(target) in NEED_CONTIGUOUS or target.namespace not in ANY_STRIDES_NAMESPACES


def _makes_contiguous(node: Any) -> bool:
    """Return whether ``node`` is the copy that ``contiguous()`` makes."""
    return (
        isinstance(node, fx.Node)
        and node.target in (aten.clone.default, aten.contiguous.default)
        and node.kwargs.get("memory_format") is torch.contiguous_format
    )


def select_by_gradient_strides(
    backward: fx.GraphModule, compile_traced: Callable[[], Launch], compile_stride_agnostic: Callable[[], Launch]
) -> Launch:
    """Return a launch function that runs the traced graph, or the stride-agnostic one if a gradient has other strides.

    The stride-agnostic graph is compiled when it is first needed. It cannot exist if an operator has strides as
    arguments (``as_strided``). In that case gradients are copied into the strides seen in tracing.
    """
    inputs = backward.graph.find_nodes(op="placeholder")
    expected = [(inputs.index(node), node.meta["val"].stride()) for node in gradients(backward.graph)]
    fixed = [node for node in with_gradient_strides(backward.graph) if node.target in WITH_STRIDE_ARGUMENTS]
    if not all(isinstance(number, int) for _, stride in expected for number in stride):
        if fixed:
            raise UnsupportedGraph(f"{fixed[0].format_node()} of a gradient with a dynamic size")
        return compile_stride_agnostic()
    traced = compile_traced()
    stride_agnostic: list[Launch] = []

    def launch(given: list[Any]) -> Any:
        for place, stride in expected:
            if not has_strides(given[place], stride):
                break
        else:
            return traced(given)
        if not stride_agnostic:
            stride_agnostic.append(compile_stride_agnostic())
        return stride_agnostic[0](given)

    def launch_with_traced_strides(given: list[Any]) -> Any:
        for place, stride in expected:
            given[place] = with_strides(given[place], stride)
        return traced(given)

    return launch_with_traced_strides if fixed else launch


def has_strides(tensor: Tensor, stride: tuple[int, ...]) -> bool:
    """Return whether ``tensor`` has these strides. The stride of a dimension of size 1 is ignored."""
    own = tensor.stride()
    return own == stride or all(
        size == 1 or here == there for size, here, there in zip(tensor.shape, own, stride, strict=True)
    )


def with_strides(tensor: Tensor, stride: tuple[int, ...]) -> Tensor:
    """Return ``tensor``, copied if its strides differ."""
    return tensor if has_strides(tensor, stride) else tensor.new_empty_strided(tensor.shape, stride).copy_(tensor)
