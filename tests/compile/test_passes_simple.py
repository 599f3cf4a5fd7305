"""The passes no_ops, all_gather_chunk (on two ranks) and add_rms_norm: what they change, and what stays."""

from __future__ import annotations

import copy
import operator
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, fx
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils.checkpoint import checkpoint

import torchtitan_npu.ops  # noqa: F401
from tests._helpers.multirank import run_on_ranks
from tests._helpers.pass_graphs import calls, gather, rewrite
from torchtitan_npu.compile.backend import make_backend
from torchtitan_npu.compile.passes import GraphPasses
from torchtitan_npu.compile.passes.graph_utils import call
from torchtitan_npu.compile.passes.simple import add_rms_norm, all_gather_chunk, no_ops

EPSILON = 1e-5
DIM = 8


# no_ops

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


def removed(function: Callable[[Tensor], Tensor]) -> tuple[int, int]:
    """Return the number of no-ops removed and the operators fewer in the graph. Check the result against eager mode."""
    x = torch.arange(24.0).view(4, 6)
    with torch.no_grad():
        made = rewrite(function, no_ops, x)
        assert torch.equal(made.results, function(x))
    before, after = (sum(node.op == "call_function" for node in graph.nodes) for graph in (made.before, made.after))
    return made.changed, before - after


@pytest.mark.parametrize("name", NO_OPS)
def test_a_no_op_is_removed(name: str) -> None:
    assert removed(lambda x: NO_OPS[name](x.sin()).cos()) == (1, 1)


@pytest.mark.parametrize("name", CHANGES)
def test_other_operators_stay(name: str) -> None:
    assert removed(lambda x: CHANGES[name](x.sin()).cos()) == (0, 0)


def test_a_copy_that_is_returned_stays() -> None:
    """Also if a view of it is returned: the output would become a view of the copied tensor."""
    assert removed(lambda x: NO_OPS["cast"](x.sin())) == (0, 0)
    assert removed(lambda x: NO_OPS["cast"](x.sin()).t()) == (0, 0)


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


# all_gather_chunk


def rows(x: Tensor, rank: int) -> Tensor:
    return torch.ops.aten.slice(x, 0, rank * 4, rank * 4 + 4)


REMOVED = (True, 1, {"AG": 1}, {})
LEFT = (True, 0, {"AG": 1}, {"AG": 1})
CHUNKS: dict[str, tuple[Callable[[Tensor, int], Tensor], Any]] = {
    "slice": (lambda x, rank: rows(gather(x), rank), REMOVED),
    "split": (lambda x, rank: gather(x).chunk(2)[rank], REMOVED),
    # gathered along dimension 1 as functional collectives do
    "dimension 1": (lambda x, rank: torch.cat(gather(x).chunk(2), dim=1).chunk(2, dim=1)[rank], REMOVED),
    "with another user": (lambda x, rank: rows(gather(x), rank) + gather(x).sum(), (True, 1, {"AG": 2}, {"AG": 1})),
    "returned": (lambda x, rank: rows(gather(x), rank), LEFT),
    "returned as a view": (lambda x, rank: rows(gather(x), rank).t(), LEFT),
    "another rank's": (lambda x, rank: rows(gather(x), 1 - rank), LEFT),
    "another dimension": (lambda x, rank: gather(x).chunk(2, dim=1)[rank], LEFT),
    "half of it": (lambda x, rank: gather(x)[rank * 4 : rank * 4 + 2], LEFT),
}
"""Chunks of an all-gather: whether results are equal, the number removed, and the collectives before and after."""


def run_chunks() -> dict[str, tuple[bool, int, Counter[str], Counter[str]]]:
    rank, found = dist.get_rank(), {}
    x = torch.arange(24.0).view(4, 6) + 100 * rank
    for name, (model, _) in CHUNKS.items():

        def function(x: Tensor, name: str = name, model: Callable[..., Tensor] = model) -> Tensor:
            return model(x, rank) if name.startswith("returned") else model(x.sin(), rank).cos()

        with torch.no_grad():
            made = rewrite(function, all_gather_chunk, x)
        same = torch.equal(made.results, function(x)) and made.results.data_ptr() != x.data_ptr()
        found[name] = same, made.changed, calls(made.before), calls(made.after)
    return found


@pytest.fixture(scope="module")
def chunks() -> list[dict[str, Any]]:
    return run_on_ranks(2, run_chunks)


@pytest.mark.parametrize("name", CHUNKS)
def test_own_chunks_of_an_all_gather(name: str, chunks: list[dict[str, Any]]) -> None:
    for outcome in chunks:
        assert outcome[name] == CHUNKS[name][1]


# add_rms_norm


def npu_norm(x: Tensor, gamma: Tensor) -> Tensor:
    return torch.ops.npu.npu_rms_norm(x, gamma, EPSILON)[0]


def operands(dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    x, y = (torch.randn(2, 3, DIM, generator=generator, dtype=torch.float32).to(dtype) for _ in range(2))
    return x, y, torch.rand(DIM, generator=generator).to(dtype)


def residual(x: Tensor, y: Tensor, gamma: Tensor) -> tuple[Tensor, Tensor]:
    total = x + y
    return npu_norm(total, gamma).sin(), total.cos()


def two_norms(x: Tensor, y: Tensor, gamma: Tensor) -> tuple[Tensor, Tensor]:
    total = x + y
    return npu_norm(total, gamma).sin(), npu_norm(F.silu(total), gamma)


def fused(
    function: Callable[..., tuple[Tensor, ...]], *inputs: Tensor, training: bool = False
) -> tuple[int, list[str]]:
    """Return the number of fused norms, and the norms and additions left. Check the results against eager mode."""
    with torch.set_grad_enabled(training):
        made = rewrite(function, add_rms_norm, *inputs)
        # the reference kernel rounds the sum as the addition does, so the results are bit-identical
        assert all(torch.equal(one, other) for one, other in zip(made.results, function(*inputs), strict=True))
    names = [str(node.target) for node in made.after.nodes if node.op == "call_function"]
    return made.changed, [name for name in names if "norm" in name or "add" in name]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_fused_in_inference(dtype: torch.dtype) -> None:
    assert fused(residual, *operands(dtype)) == (1, ["npu.npu_add_rms_norm.default"])


def test_two_norms_of_one_sum() -> None:
    assert fused(two_norms, *operands()) == (1, ["npu.npu_add_rms_norm.default", "npu.npu_rms_norm.default"])


def test_not_in_training() -> None:
    number, names = fused(residual, *(tensor.requires_grad_() for tensor in operands()), training=True)
    assert number == 0 and "npu.npu_rms_norm.default" in names


@pytest.mark.parametrize(
    "function",
    [
        pytest.param(lambda x, y, gamma: torch.ops.npu.npu_rms_norm(x + y, gamma, EPSILON), id="rstd is used"),
        pytest.param(lambda x, y, gamma: (npu_norm(x + y[0, 0], gamma),), id="broadcast"),
        pytest.param(lambda x, y, gamma: (npu_norm(x + y.bfloat16(), gamma),), id="promoted"),
        pytest.param(lambda x, y, gamma: (npu_norm(torch.add(x, y, alpha=2), gamma),), id="scaled"),
        pytest.param(lambda x, y, gamma: (npu_norm(x * y, gamma),), id="no addition"),
    ],
)
def test_not_fused(function: Callable[..., tuple[Tensor, ...]]) -> None:
    assert fused(function, *operands())[0] == 0


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


def test_not_with_activation_checkpointing() -> None:
    """The first norm then has no gradient in the graph; only the recomputed one does."""
    torch.compiler.reset()
    passes = GraphPasses(["add_rms_norm"])
    changed: list[int] = []

    def recomputed(*inputs: Tensor) -> tuple[Tensor, Tensor]:
        return checkpoint(residual, *inputs, use_reentrant=False)

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
