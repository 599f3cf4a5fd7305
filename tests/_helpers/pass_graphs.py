"""Trace functions with AOTAutograd, run passes on the graphs, and count the collectives in them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple
from unittest.mock import patch

import torch
import torch.distributed as dist
from functorch.compile import aot_function, default_partition, make_boxed_func
from torch import Tensor, fx

import torchtitan_npu.ops  # noqa: F401
from torchtitan_npu.compile import backend

collectives = torch.ops._c10d_functional


@contextmanager
def recorded_graphs() -> Iterator[list[fx.Graph]]:
    """Collect every graph that is compiled without code generation in this context, with its views folded."""
    graphs = []
    fold_views = backend.fold_views

    def record(graph: fx.Graph) -> None:
        fold_views(graph)
        graphs.append(fx.Graph())
        graphs[-1].output(graphs[-1].graph_copy(graph, {}))

    with patch.object(backend, "fold_views", record):
        yield graphs


def compiled(
    function: Callable[..., Any], change: Callable[[fx.Graph], int], seen: list[fx.Graph]
) -> Callable[..., Any]:
    """Compile ``function`` with ``change`` run on its joint or inference graph. ``seen`` gets both versions."""

    def changed(graph_module: fx.GraphModule) -> fx.GraphModule:
        before = fx.Graph()
        before.output(before.graph_copy(graph_module.graph, {}))
        change(graph_module.graph)
        graph_module.graph.lint()
        graph_module.recompile()
        seen.extend((before, graph_module.graph))
        return graph_module

    return aot_function(
        function,
        fw_compiler=lambda graph_module, _: make_boxed_func(graph_module),
        inference_compiler=lambda graph_module, _: make_boxed_func(changed(graph_module)),
        partition_fn=lambda joint, *args, **kwargs: default_partition(changed(joint), *args, **kwargs),
    )


class Rewritten(NamedTuple):
    """The first graph of a function before and after a pass."""

    results: Any
    changed: int
    before: fx.Graph
    after: fx.Graph


def rewrite(function: Callable[..., Any], change: Callable[[fx.Graph], int], *inputs: Tensor) -> Rewritten:
    """Run ``function`` with ``change`` on its graph, the joint graph if gradients are enabled and needed."""
    graphs: list[fx.Graph] = []
    changed: list[int] = []

    def counted(graph: fx.Graph) -> int:
        changed.append(change(graph))
        return changed[-1]

    results = compiled(function, counted, graphs)(*inputs)
    return Rewritten(results, changed[0], graphs[0], graphs[1])


def calls(graph: fx.Graph) -> Counter[str]:
    """Count the collectives in a graph, alone or fused with a matmul."""
    names = {"all_reduce": "AR", "reduce_scatter_tensor": "RS", "all_gather_into_tensor": "AG"}
    fused = {"npu_all_gather_base_mm": "AG+mm", "npu_mm_reduce_scatter_base": "mm+RS"}
    found: Counter[str] = Counter()
    for node in graph.nodes:
        for name, short in names.items():
            found[short] += node.target is getattr(collectives, name).default
        for name, short in fused.items():
            found[short] += node.target is getattr(torch.ops.npu, name).default
    return +found


class Reduce(torch.autograd.Function):
    """The end of a row-parallel layer: an all-reduce whose gradient is the identity."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return collectives.wait_tensor(collectives.all_reduce(x, "sum", _group()))

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:  # type: ignore[override]
        return gradient


class Copy(torch.autograd.Function):
    """The start of a column-parallel layer: the identity, whose gradient is all-reduced."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:  # type: ignore[override]
        return collectives.wait_tensor(collectives.all_reduce(gradient.contiguous(), "sum", _group()))


class Gather(torch.autograd.Function):
    """All-gather of a rank's tokens. Each rank takes its chunk of the gradient, which is replicated."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return gather(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:  # type: ignore[override]
        return own_chunk(gradient)


class Own(torch.autograd.Function):
    """This rank's chunk of all tokens. The gradients are all-gathered."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return own_chunk(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:  # type: ignore[override]
        return gather(gradient.contiguous())


def own_chunk(x: Tensor) -> Tensor:
    return x.chunk(dist.get_world_size())[dist.get_rank()].clone()


def gather(x: Tensor) -> Tensor:
    """All-gather ``x`` along dimension 0."""
    return collectives.wait_tensor(collectives.all_gather_into_tensor(x, dist.get_world_size(), _group()))


def _group() -> str:
    return dist.group.WORLD.group_name  # type: ignore[union-attr]
