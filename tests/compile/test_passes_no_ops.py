"""The pass no_ops removes operators that return their argument, except for outputs of the graph."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, fx
from torch.fx.experimental.proxy_tensor import make_fx

from tests._helpers.pass_graphs import compiled
from torchtitan_npu.compile.passes.no_ops import no_ops

NO_OPS: dict[str, Callable[[Tensor], Tensor]] = {
    "view": lambda x: torch.ops.aten.view(x, [4, 6]),
    "slice": lambda x: torch.ops.aten.slice(x, 0, 0, 4),
    "expand": lambda x: torch.ops.aten.expand(x, [4, 6]),
    "permute": lambda x: torch.ops.aten.permute(x, [0, 1]),
    "cast": lambda x: torch.ops.aten._to_copy(x, dtype=torch.float32),
}
CHANGES: dict[str, Callable[[Tensor], Tensor]] = {
    "view": lambda x: torch.ops.aten.view(x, [6, 4]),
    "slice": lambda x: torch.ops.aten.slice(x, 0, 0, 3),
    "transpose": lambda x: torch.ops.aten.permute(x[:, :4], [1, 0]),  # same shape, other strides
    "cast": lambda x: torch.ops.aten._to_copy(x, dtype=torch.float64),
    "offset": lambda x: torch.ops.aten.slice(x, 0, 1, 4),
}


def run(function: Callable[[Tensor], Tensor]) -> tuple[int, int, int]:
    """Return the number of removed operators and of operators before and after. Check the result against eager mode."""
    x = torch.arange(24.0).view(4, 6)
    graphs: list[fx.Graph] = []
    removed: list[int] = []

    def change(graph: fx.Graph) -> int:
        removed.append(no_ops(graph))
        return removed[-1]

    with torch.no_grad():
        assert torch.equal(compiled(function, change, graphs)(x), function(x))
    before, after = (sum(node.op == "call_function" for node in graph.nodes) for graph in graphs)
    return removed[0], before, after


@pytest.mark.parametrize("name", NO_OPS)
def test_a_no_op_is_removed(name: str) -> None:
    removed, before, after = run(lambda x: NO_OPS[name](x.sin()).cos())
    assert (removed, before, after) == (1, 3, 2)


@pytest.mark.parametrize("name", CHANGES)
def test_other_operators_stay(name: str) -> None:
    removed, before, after = run(lambda x: CHANGES[name](x.sin()).cos())
    assert (removed, before) == (0, after)


def test_an_output_stays() -> None:
    removed, before, after = run(lambda x: NO_OPS["cast"](x.sin()))
    assert (removed, before, after) == (0, 2, 2)


def test_a_copy_of_which_a_view_is_returned_stays() -> None:
    """The output would become a view of the copied tensor."""
    removed, before, after = run(lambda x: NO_OPS["cast"](x.sin()).t())
    assert (removed, before, after) == (0, 3, 3)


def test_symbolic_sizes() -> None:
    """The comparison of symbolic sizes adds no guards."""

    def function(x: Tensor) -> Tensor:
        y = x.sin()
        return y.view(y.shape).cos() + y.view(-1).cos().view(y.shape)

    captured = make_fx(function, tracing_mode="symbolic")(torch.ones(4, 6))
    assert no_ops(captured.graph) == 1
    captured.recompile()
    x = torch.randn(3, 5)
    assert torch.equal(captured(x), function(x))
    assert captured.shape_env.guards == []
