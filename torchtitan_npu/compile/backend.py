"""A torch.compile backend that generates no code: compiled regions launch the kernels of eager mode.

AOTAutograd traces the forward and backward graphs, graph passes rewrite them, and the graph interpreter runs them.
Inductor is not used. If every operator is an extern call, its wrapper code costs the host more time than eager mode.
On an NPU it also loads torch_npu's part of Inductor, which changes compilation in the whole process.
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from functorch.compile import config as functorch_config
from torch import fx

from torchtitan_npu.compile.cleanup import clean_up
from torchtitan_npu.compile.gradient_strides import copy_graph, make_stride_agnostic, select_by_gradient_strides
from torchtitan_npu.compile.partition import partition
from torchtitan_npu.compile.passes.graph_utils import has_backward
from torchtitan_npu.compile.region_function import CompiledGraph, region_function
from torchtitan_npu.errors import UsageError
from torchtitan_npu.torch_internals.aot_autograd import (
    accept_any_gradient_strides,
    eliminate_common_subexpressions,
    is_tensor_subclass,
    region_metadata,
    takes_list,
)
from torchtitan_npu.torch_internals.dispatch import OpOverload
from torchtitan_npu.torch_internals.dynamo import aot_autograd
from torchtitan_npu.torch_internals.graph_interpreter import Launch, UnsupportedGraph, interpret

Pass = Callable[[fx.GraphModule], Any]
"""Rewrites a graph in place."""


def make_backend(
    passes: Sequence[Pass] = (),
    on_compiled: Callable[[float], None] = lambda seconds: None,
) -> Callable[..., Any]:
    """Return a backend for :func:`torch.compile` that bypasses code generation.

    ``passes`` run on the joint graph of forward and backward, or on the graph of a region without gradients. They do
    not run on the two halves of a joint graph, in which the origin and the use of saved values are not visible.
    ``on_compiled`` is called once per region with the seconds that it took to compile.
    """

    def partition_joint(joint: fx.GraphModule, *args: Any, **kwargs: Any) -> tuple[fx.GraphModule, fx.GraphModule]:
        for change in passes:
            change(joint)
        clean_up(joint, any_gradient_strides=True)
        joint.recompile()
        return partition(joint, *args, **kwargs)

    def compile_region(graph_module: fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        started = time.perf_counter()
        compiled: list[CompiledGraph] = []  # forward, and backward if there is one
        metadata: list[Any] = []
        # with tensor subclasses AOTAutograd's runtime copies gradients into the strides seen in tracing
        traced_strides = any(map(is_tensor_subclass, inputs))

        def compile_graph(graph_module: fx.GraphModule, _: Any) -> Launch:
            count = len(graph_module.graph.find_nodes(op="placeholder"))
            metadata.append(region_metadata())
            accept_any_gradient_strides(metadata[-1])
            if traced_strides or not has_backward(graph_module.graph):
                launch = _clean_and_interpret(graph_module)
            else:
                launch = _for_any_gradient_strides(graph_module)
            compiled.append(CompiledGraph(launch, count))
            return takes_list(launch)

        def compile_inference_graph(graph_module: fx.GraphModule, inputs: Any) -> Launch:
            for change in passes:
                change(graph_module)
            return compile_graph(graph_module, inputs)

        # the backward graph is compiled now, not at its first use, because region_function calls it directly
        with functorch_config.patch(force_non_lazy_backward_lowering=True):
            called_by_aot_autograd = aot_autograd(
                fw_compiler=compile_graph, inference_compiler=compile_inference_graph, partition_fn=partition_joint
            )(graph_module, inputs)
        region = region_function(inputs, metadata[0], compiled)
        on_compiled(time.perf_counter() - started)
        return region or _allow_aliasing_operators(called_by_aot_autograd)

    return compile_region


@contextmanager
def _errors_name_the_key() -> Iterator[None]:
    """Raise a :class:`UsageError` for a graph that the interpreter cannot run. Only compiling it shows that."""
    try:
        yield
    except UnsupportedGraph as error:
        raise UsageError(f"npu.bypass_codegen must be false: a compiled graph contains {error}") from error


@_errors_name_the_key()
def _for_any_gradient_strides(backward: fx.GraphModule) -> Launch:
    """Compile a backward graph as traced, and on demand a version for gradients with other strides."""
    copy = copy_graph(backward)

    def compile_stride_agnostic() -> Launch:
        make_stride_agnostic(copy.graph)
        return _clean_and_interpret(copy, any_gradient_strides=True)

    return select_by_gradient_strides(backward, lambda: _clean_and_interpret(backward), compile_stride_agnostic)


@_errors_name_the_key()
def _clean_and_interpret(graph_module: fx.GraphModule, any_gradient_strides: bool = False) -> Launch:
    clean_up(graph_module, any_gradient_strides)
    if not _repeats_random_operator(graph_module.graph):
        graph_module.graph = eliminate_common_subexpressions(graph_module.graph)
    clean_up(graph_module, any_gradient_strides)
    return interpret(graph_module)


def _repeats_random_operator(graph: fx.Graph) -> bool:
    """Return whether a random operator occurs twice.

    Merging the calls would be wrong, and torch's CSE knows only aten's random operators.
    """
    random = [
        node.target
        for node in graph.nodes
        if isinstance(node.target, OpOverload) and torch.Tag.nondeterministic_seeded in node.target.tags
    ]
    return len(set(random)) < len(random)


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
        option = "error_on_custom_op_aliasing"  # not in torch 2.11
        options = {option: False} if hasattr(functorch_config, option) else {}
        with functorch_config.patch(options), warnings.catch_warnings():
            warnings.filterwarnings("ignore", "npu::_npu_moe_token_unpermute ")
            return region(*inputs)

    return call


bypass_codegen = make_backend()
