"""The graph interpreter calls the operators of a graph, nothing else, and frees tensors after their last use."""

from __future__ import annotations

import math
import operator
import struct
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, fx
from torch.fx.experimental.proxy_tensor import make_fx

from torchtitan_npu.torch_internals.graph_interpreter import UnsupportedGraph, interpret

ARGUMENTS: dict[str, Callable[[Tensor], Any]] = {
    "a view of another dtype": lambda x: x.view(torch.int32),
    "several outputs": lambda x: x.topk(2, dim=-1),
    "a list of outputs": lambda x: x.split([1, 3], dim=-1),
    "a list of tensors": lambda x: torch.cat([x, x], dim=-1),
    "optional tensors in a list": lambda x: x[:, torch.tensor([0, 2])],
    "numbers for tensors": lambda x: (x + 1, 2 * x, x / 3, 1 - x, x**2, x > 0),
    "a boolean for a number": lambda x: (x > 0).scatter(1, torch.tensor([[0], [1], [2]]), False),
    "an integer for a float": lambda x: torch.nn.functional.leaky_relu(x, 1),
    "dtype, device, memory format": lambda x: x.to(torch.float64, memory_format=torch.contiguous_format).cpu(),
    "no tensor": lambda x: torch.arange(4, dtype=torch.int32) + x,
    "an empty list": lambda x: x.sum().view([]),
    "a string": lambda x: torch.nn.functional.gelu(x, approximate="tanh"),
    "None for a tensor": lambda x: torch.nn.functional.layer_norm(x, (4,)),
}


@pytest.mark.parametrize("what", ARGUMENTS)
def test_arguments(what: str) -> None:
    def function(x: Tensor) -> tuple[Tensor, ...]:
        result = ARGUMENTS[what](x)
        return tuple(result) if isinstance(result, (tuple, list)) else (result,)

    x = torch.randn(3, 4)
    launch = interpret(make_fx(function, tracing_mode="fake")(x))
    for ours, theirs in zip(launch([x]), function(x), strict=True):
        assert torch.equal(ours, theirs) and ours.dtype == theirs.dtype and ours.stride() == theirs.stride()


def test_float_arguments_are_bit_identical() -> None:
    """A graph pass may write an integer for a float; the operator gets a float."""
    values = [1, 0.1, -0.0, 1e-38, 5e-324, 1 + 2**-52, math.inf, -math.inf]
    received: list[float] = []

    @torch.library.custom_op("torchtitan_npu_test::receive", mutates_args=())
    def receive(x: Tensor, value: float) -> Tensor:
        received.append(value)
        return x.clone()

    graph = fx.Graph()
    x = graph.placeholder("x")
    x.meta["val"] = torch.ones(2)
    graph.output(tuple(graph.call_function(torch.ops.torchtitan_npu_test.receive.default, (x, v)) for v in values))
    interpret(fx.GraphModule({}, graph))([torch.ones(2)])
    assert [struct.pack("d", value) for value in received] == [struct.pack("d", value) for value in values]
    assert all(isinstance(value, float) for value in received)


def test_tensors_are_freed_after_their_last_use() -> None:
    alive: list[list[bool]] = []
    refs: list[weakref.ref[Tensor]] = []

    @torch.library.custom_op("torchtitan_npu_test::look", mutates_args=())
    def look(x: Tensor) -> Tensor:
        refs.append(weakref.ref(x))
        alive.append([ref() is not None for ref in refs])
        return x.clone()

    look.register_fake(torch.empty_like)

    def chain(x: Tensor, y: Tensor) -> tuple[Tensor, ...]:
        kept = look(x.sin())
        return look(look(kept).cos()), kept, y

    launch = interpret(make_fx(chain, tracing_mode="fake")(torch.randn(4), torch.randn(4)))
    x, y = torch.randn(4), torch.randn(4)
    refs.append(weakref.ref(x))
    given = [x, y]
    del x
    results = launch(given)
    assert given == [] and results[2] is y
    # the input is freed with the first operator, each value with its user; ``kept`` is returned and stays
    assert alive == [[False, True], [False, False, True], [False, False, True, True]]


def test_every_call_runs_the_graph_as_written() -> None:
    """With optimization on, TorchScript would profile two calls and then run a graph with merged or fused operators."""
    calls: list[str] = []

    @torch.library.custom_op("torchtitan_npu_test::count", mutates_args=())
    def count(x: Tensor) -> Tensor:
        calls.append("count")
        return x.clone()

    count.register_fake(torch.empty_like)
    launch = interpret(make_fx(lambda x: (count(x) + count(x),), tracing_mode="fake")(torch.ones(3)))
    for _ in range(4):
        launch([torch.ones(3)])
        executed = [node.kind() for node in torch._C._last_executed_optimized_graph().nodes()]
        assert executed.count("torchtitan_npu_test::count") == 2
    assert len(calls) == 8
    assert torch._C._get_graph_executor_optimize()  # the thread's setting is as before


def test_sums_and_products_of_several_sizes() -> None:
    """torch writes what DTensor computes from symbolic sizes as one call with all operands."""
    graph = fx.Graph()
    x, *sizes = (graph.placeholder(name) for name in ("x", "batch", "sequence", "features"))
    for node, value in zip((x, *sizes), (torch.ones(24), 2, 3, 4), strict=True):
        node.meta["val"] = value
    product = graph.call_function(operator.mul, (*sizes,))
    added = [graph.call_function(torch.sym_sum, args) for args in ((*sizes,), ((*sizes,),))]
    views = [graph.call_function(torch.ops.aten.view.default, (x, [size, -1])) for size in (product, sizes[0])]
    slices = [graph.call_function(torch.ops.aten.slice.Tensor, (x, 0, 0, size)) for size in added]
    graph.output((*views, *slices))
    launch = interpret(fx.GraphModule({}, graph))
    shapes = [tuple(result.shape) for result in launch([torch.ones(24), 2, 3, 4])]
    assert shapes == [(24, 1), (2, 12), (9,), (9,)]


def test_a_call_of_a_python_function_is_an_error() -> None:
    graph = fx.Graph()
    x = graph.placeholder("x")
    x.meta["val"] = torch.ones(2)
    graph.output((graph.call_function(len, (x,)),))
    with pytest.raises(UnsupportedGraph, match="len"):
        interpret(fx.GraphModule({}, graph))
