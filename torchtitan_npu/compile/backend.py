"""Inductor without code generation: compiled regions call the operators of eager mode.

Inductor traces the graphs, runs the hooks and writes a Python wrapper, in which each operator is a call of its own.
The wrapper is checked after each compilation. Nothing is set for the process.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx

from torchtitan_npu.compile.fold_views import fold_views
from torchtitan_npu.compile.partition import partition
from torchtitan_npu.compile.passes.graph_utils import aten, collectives
from torchtitan_npu.compile.wrapper_code import Launch, check_wrapper, checked_once
from torchtitan_npu.torch_internals.aot_autograd import aliasing_operators_allowed
from torchtitan_npu.torch_internals.inductor import bypass_options, compile_graph, graph_hook, partition_hook

Pass = Callable[[fx.GraphModule], Any]
"""Rewrites a graph in place."""
PARTITIONED = "torchtitan_npu_partitioned"
"""Mark of the output of a forward or backward graph, whose joint graph the passes have seen."""


def inductor_options(passes: Sequence[Pass] = ()) -> dict[str, Any]:
    """Return options for ``torch.compile(backend="inductor", options=...)`` with which it generates no kernels.

    ``passes`` run on the joint graph of forward and backward, or on the graph of a region without gradients. They do
    not run on the two halves of a joint graph, in which the origin and the use of saved values are not visible.
    """

    def run_passes(graph_module: fx.GraphModule) -> None:
        for change in passes:
            change(graph_module)

    def partition_joint(joint: fx.GraphModule, *args: Any, **kwargs: Any) -> tuple[fx.GraphModule, fx.GraphModule]:
        run_passes(joint)
        joint.recompile()
        halves = partition(joint, *args, **kwargs)
        for half in halves:
            half.graph.output_node().meta[PARTITIONED] = True
        return halves

    def rewrite(graph: fx.Graph) -> None:
        if PARTITIONED not in graph.output_node().meta:
            run_passes(graph.owning_module)  # type: ignore[arg-type]
        fold_views(graph)
        _copy_before_all_reduce(graph)

    return bypass_options(partition_hook(partition_joint), graph_hook(rewrite))


def _copy_before_all_reduce(graph: fx.Graph) -> None:
    """Copy arguments of all-reduces that are not contiguous, as the operator itself does in eager mode.

    Inductor reduces in place where it can. The result then has the strides of the argument, for example of a transposed
    weight gradient, and Inductor would generate a kernel to make an output contiguous.
    """
    for node in graph.find_nodes(op="call_function", target=collectives.all_reduce.default):
        argument = node.args[0]
        if argument.meta["val"].is_contiguous():
            continue
        with graph.inserting_before(node):
            copy = graph.call_function(aten.clone.default, (argument,), {"memory_format": torch.contiguous_format})
        copy.meta["val"] = node.meta["val"].clone()
        node.update_arg(0, copy)


def make_backend(passes: Sequence[Pass] = ()) -> Callable[..., Any]:
    """Return a backend for :func:`torch.compile`: Inductor with :func:`inductor_options`, and its wrappers checked."""

    def change(source: str, call: Launch) -> Launch:
        check_wrapper(source)
        return checked_once(source, call)

    def compile_region(graph_module: fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        return _allow_aliasing_operators(compile_graph(graph_module, inputs, inductor_options(passes), change))

    return compile_region


def _allow_aliasing_operators(region: Callable[..., Any]) -> Callable[..., Any]:
    """Silence torch's check for operators that return their own argument, which runs in a region's first call.

    ``_npu_moe_token_unpermute`` does so in torch_npu and on a GPU, against its schema. torch 2.13 warns about it, and
    raises an error if CI is in the environment. The graphs contain no in-place operators, so the alias is harmless.
    """
    called = False

    def call(*inputs: Any) -> Any:
        nonlocal called
        if called:
            return region(*inputs)
        called = True
        with aliasing_operators_allowed(), warnings.catch_warnings():
            warnings.filterwarnings("ignore", "npu::_npu_moe_token_unpermute ")
            return region(*inputs)

    return call


bypass_codegen = make_backend()
