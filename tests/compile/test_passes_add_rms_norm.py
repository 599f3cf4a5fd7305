"""The pass add_rms_norm fuses in inference graphs, with equal results, and leaves training graphs unchanged."""

from __future__ import annotations

import copy
import operator
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.checkpoint import checkpoint

import torchtitan_npu.ops  # noqa: F401
from tests._helpers.pass_graphs import compiled
from torchtitan_npu.compile.backend import make_backend
from torchtitan_npu.compile.passes import GraphPasses
from torchtitan_npu.compile.passes.add_rms_norm import add_rms_norm
from torchtitan_npu.compile.passes.graph_utils import call

EPSILON = 1e-5
DIM = 8


def npu_norm(x: Tensor, gamma: Tensor) -> Tensor:
    return torch.ops.npu.npu_rms_norm(x, gamma, EPSILON)[0]


def run(function: Callable[..., Any], *inputs: Tensor, training: bool = False) -> tuple[list[Tensor], list[str], int]:
    graphs: list[fx.Graph] = []
    fused: list[int] = []

    def change(graph: fx.Graph) -> int:
        fused.append(add_rms_norm(graph))
        return fused[-1]

    with torch.set_grad_enabled(training):
        results = compiled(function, change, graphs)(*inputs)
    names = [str(node.target) for node in graphs[-1].nodes if node.op == "call_function"]
    return list(results), [name for name in names if "norm" in name or "add" in name], fused[0]


def operands(dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    x, y = (torch.randn(2, 3, DIM, generator=generator, dtype=torch.float32).to(dtype) for _ in range(2))
    return x, y, torch.rand(DIM, generator=generator).to(dtype)


def residual(norm: Callable[[Tensor, Tensor], Tensor]) -> Callable[..., tuple[Tensor, Tensor]]:
    def function(x: Tensor, y: Tensor, gamma: Tensor) -> tuple[Tensor, Tensor]:
        total = x + y
        return norm(total, gamma).sin(), total.cos()

    return function


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_fused_in_inference(dtype: torch.dtype) -> None:
    function = residual(npu_norm)
    results, names, fused = run(function, *operands(dtype))
    assert (names, fused) == (["npu.npu_add_rms_norm.default"], 1)
    # the reference kernel rounds the sum as the addition does, so the results are bit-identical
    assert all(torch.equal(one, other) for one, other in zip(results, function(*operands(dtype)), strict=True))


NAMED: dict[Any, tuple[list[Any], tuple[str, ...]]] = {
    torch.ops.aten._fused_rms_norm.default: ([[DIM]], ("weight", "eps")),
    torch.ops.aten.rms_norm.default: ([[DIM]], ("weight", "eps")),
    torch.ops.npu.npu_rms_norm.default: ([], ("gamma", "epsilon")),
}
"""The arguments between input and gamma, and the names of gamma and epsilon, by operator."""


@pytest.mark.parametrize("by", ["position", "name", "name in another order"])
@pytest.mark.parametrize("target", NAMED)
def test_norms_with_positional_and_named_arguments(target: Any, by: str) -> None:
    """The graph is written by hand: tracing on a CPU decomposes aten's norms and makes arguments positional."""
    graph = fx.Graph()
    with FakeTensorMode() as mode:
        inputs = [graph.placeholder(name) for name in ("x", "y", "gamma")]
        for node, tensor in zip(inputs, operands(), strict=True):
            node.meta["val"] = mode.from_tensor(tensor)
        x, y, gamma = inputs
        between, names = NAMED[target]
        given: list[Any] = [call(torch.ops.aten.add.Tensor, x, y, like=x), *between]
        named: dict[str, Any] = {}
        if by == "position":
            given += [gamma, EPSILON]
        else:
            named = dict(zip(names, (gamma, EPSILON), strict=True))
            if by == "name in another order":
                named = dict(reversed(named.items()))
        normalised = call(target, *given, like=x, **named)
        if target is not torch.ops.aten.rms_norm.default:
            normalised = call(operator.getitem, normalised, 0, like=x)
        graph.output(normalised)
        expected = fx.GraphModule({}, copy.deepcopy(graph))
        assert add_rms_norm(graph) == 1
    assert [node.target for node in graph.nodes][3] is torch.ops.npu.npu_add_rms_norm.default
    actual = fx.GraphModule({}, graph)(*operands())
    # a mean of DIM squares, summed in another order
    torch.testing.assert_close(actual, expected(*operands()), rtol=DIM * 2**-23, atol=0)


def test_not_in_training() -> None:
    leaves = [tensor.requires_grad_() for tensor in operands()]
    _, names, fused = run(residual(npu_norm), *leaves, training=True)
    assert fused == 0
    assert "npu.npu_rms_norm.default" in names


def test_not_with_activation_checkpointing() -> None:
    """The first norm then has no gradient in the graph; only the recomputed one does."""
    torch.compiler.reset()
    passes = GraphPasses(["add_rms_norm"])
    changed: list[int] = []

    def recomputed(*inputs: Tensor) -> tuple[Tensor, Tensor]:
        return checkpoint(residual(npu_norm), *inputs, use_reentrant=False)

    backend = make_backend([lambda graph_module: changed.append(passes(graph_module))])
    gradients = []
    for function in (recomputed, torch.compile(recomputed, backend=backend, fullgraph=True)):
        leaves = [tensor.requires_grad_() for tensor in operands()]
        sum(result.sum() for result in function(*leaves)).backward()  # type: ignore[union-attr]
        gradients.append([leaf.grad for leaf in leaves])
    assert changed == [0]
    assert all(torch.equal(one, other) for one, other in zip(*gradients, strict=True))
    with torch.no_grad():
        torch.compile(recomputed, backend=backend, fullgraph=True)(*operands())
    assert changed == [0, 1]


def test_not_if_rstd_is_used() -> None:
    def function(x: Tensor, y: Tensor, gamma: Tensor) -> tuple[Tensor, Tensor]:
        return torch.ops.npu.npu_rms_norm(x + y, gamma, EPSILON)

    assert run(function, *operands())[2] == 0


@pytest.mark.parametrize("other", ["broadcast", "promoted", "scaled"])
def test_not_if_the_operator_does_not_support_the_addition(other: str) -> None:
    x, y, gamma = operands()
    functions: dict[str, Callable[..., Any]] = {
        "broadcast": lambda x, y, gamma: (npu_norm(x + y[0, 0], gamma),),
        "promoted": lambda x, y, gamma: (npu_norm(x + y.bfloat16(), gamma),),
        "scaled": lambda x, y, gamma: (npu_norm(torch.add(x, y, alpha=2), gamma),),
    }
    results, _, fused = run(functions[other], x, y, gamma)
    assert fused == 0
    assert torch.equal(results[0], functions[other](x, y, gamma)[0])


def test_norm_without_addition() -> None:
    assert run(lambda x, y, gamma: (npu_norm(x * y, gamma),), *operands())[2] == 0


def test_two_norms_of_one_sum() -> None:
    def function(x: Tensor, y: Tensor, gamma: Tensor) -> tuple[Tensor, Tensor]:
        total = x + y
        return npu_norm(total, gamma).sin(), npu_norm(F.silu(total), gamma)

    results, names, fused = run(function, *operands())
    assert (names, fused) == (["npu.npu_add_rms_norm.default", "npu.npu_rms_norm.default"], 1)
    assert all(torch.equal(one, other) for one, other in zip(results, function(*operands()), strict=True))
