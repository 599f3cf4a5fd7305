"""The compile backend: a graph is captured, differentiated, cut into forward and backward; the kernels stay eager's.

Of Inductor nothing is used. Its wrapper, with every operator an extern call, takes the host longer than eager does; and
on an NPU torch_npu's part of it, which is loaded with it, changes how all of the process is compiled.
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch
from functorch.compile import default_partition
from torch import fx
from torch._dynamo.backends.common import aot_autograd
from torch._functorch import config as functorch_config
from torch._functorch.compile_utils import fx_graph_cse
from torch._guards import TracingContext
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from torchtitan_npu.compile.interpreter import Launch, interpreted
from torchtitan_npu.compile.passes.graphs import has_backward
from torchtitan_npu.compile.random_state import without_random_state
from torchtitan_npu.compile.runtime import Compiled, plain_region
from torchtitan_npu.compile.strides import copy_of, for_any_strides, gradients_as_they_lie, open_strides
from torchtitan_npu.compile.tidy import tidy
from torchtitan_npu.torch_internals.dispatch import OpOverload

Pass = Callable[[fx.GraphModule], Any]
"""Changes a graph in place."""


def bypassing(
    passes: Sequence[Pass] = (),
    when_compiled: Callable[[float], None] = lambda seconds: None,
) -> Callable[..., Any]:
    """A backend for :func:`torch.compile` that generates no kernels.

    ``passes`` change the graph of forward and backward together, or the one graph of a region without gradients. They
    do not see the halves of the former: there it is no longer to be seen what a value comes from, or what it is saved
    for. ``when_compiled`` is told of every region how long it took.
    """

    def partition(joint: fx.GraphModule, *args: Any, **kwargs: Any) -> tuple[fx.GraphModule, fx.GraphModule]:
        for change in passes:
            change(joint)
        tidy(joint, of_any_strides=True)
        joint.recompile()
        # saves what eager saves. The cut that needs the least memory computes more than once what a generated kernel
        # would compute on the way; here each of these is a launch
        return without_random_state(default_partition, joint, *args, **kwargs)

    def compile_graph(graph_module: fx.GraphModule) -> Launch:
        if not has_backward(graph_module.graph):
            return _written(graph_module)
        again = copy_of(graph_module)

        def opened() -> Launch:
            open_strides(again.graph)
            return _written(again, of_any_strides=True)

        return for_any_strides(graph_module, lambda: _written(graph_module), opened)

    def compile_region(graph_module: fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        started = time.perf_counter()
        compiled: list[Compiled] = []  # forward, and backward where there is one
        metadata: list[Any] = []

        def compile_one(graph_module: fx.GraphModule, _: Any) -> Launch:
            inputs = len(graph_module.graph.find_nodes(op="placeholder"))
            launch = compile_graph(graph_module)
            compiled.append(Compiled(launch, inputs))
            metadata.append(TracingContext.get().fw_metadata)  # type: ignore[union-attr]
            launch._boxed_call = True  # type: ignore[attr-defined]  # AOTAutograd's word for taking a list
            return launch

        def compile_without_gradients(graph_module: fx.GraphModule, inputs: Any) -> Launch:
            for change in passes:
                change(graph_module)
            return compile_one(graph_module, inputs)

        # the backward now, not when it is needed: we call it ourselves
        of_any_size = not any(map(is_traceable_wrapper_subclass, inputs))
        with functorch_config.patch(force_non_lazy_backward_lowering=True), gradients_as_they_lie(of_any_size):
            called_by_torch = aot_autograd(
                fw_compiler=compile_one, inference_compiler=compile_without_gradients, partition_fn=partition
            )(graph_module, inputs)
        region = plain_region(list(inputs), metadata[0], compiled) or _trusting_its_operators(called_by_torch)
        when_compiled(time.perf_counter() - started)
        return region

    return compile_region


def _written(graph_module: fx.GraphModule, of_any_strides: bool = False) -> Launch:
    tidy(graph_module, of_any_strides)
    if not _draws_again(graph_module.graph):
        graph_module.graph = fx_graph_cse(graph_module.graph)
    tidy(graph_module, of_any_strides)
    return interpreted(graph_module)


def _draws_again(graph: fx.Graph) -> bool:
    """Whether an operator draws random numbers more than once: each time others, but CSE knows only some of aten's."""
    drawing = [
        node.target
        for node in graph.nodes
        if isinstance(node.target, OpOverload) and torch.Tag.nondeterministic_seeded in node.target.tags
    ]
    return len(set(drawing)) < len(drawing)


def _trusting_its_operators(region: Callable[..., Any]) -> Callable[..., Any]:
    """``region`` without what torch says at its first call of an operator that returns its own argument.

    ``_npu_moe_token_unpermute`` does, in torch_npu and on a GPU, though its schema does not say so: torch 2.13 warns,
    or raises where CI is in the environment. Nothing in a graph is changed in place, so nothing follows from it.
    """
    called = False

    def call(*given: Any) -> Any:
        nonlocal called
        if called:
            return region(*given)
        called = True
        option = "error_on_custom_op_aliasing"  # torch 2.11 has none
        options = {option: False} if hasattr(functorch_config, option) else {}
        with functorch_config.patch(options), warnings.catch_warnings():
            warnings.filterwarnings("ignore", "npu::_npu_moe_token_unpermute ")
            return region(*given)

    return call


bypassed = bypassing()
