"""The pass async_tp on two ranks fuses collectives with matmuls, with equal results and gradients."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, fx
from torch.distributed._functional_collectives import AsyncCollectiveTensor, all_gather_tensor, reduce_scatter_tensor

from tests._helpers.multirank import run_on_ranks
from tests._helpers.pass_graphs import calls, compiled
from torchtitan_npu.compile.passes.async_tp import async_tp

LENGTH, DIM, HIDDEN = 6, 4, 10
EPSILON = torch.finfo(torch.float64).eps


def world() -> dist.ProcessGroup:
    assert dist.group.WORLD is not None
    return dist.group.WORLD


def waited(x: Tensor) -> Tensor:
    """Wait for ``x``. Tracing writes the wait into the graph; eager mode returns a pending tensor."""
    return x.trigger_wait() if isinstance(x, AsyncCollectiveTensor) else x


class Gather(torch.autograd.Function):
    """All-gather along ``dim``, with a reduce-scatter of the gradient, as DTensor writes them."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, dim: int) -> Tensor:  # type: ignore[override]
        ctx.dim = dim
        return waited(all_gather_tensor(x, dim, world()))

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        return waited(reduce_scatter_tensor(gradient.contiguous(), "sum", ctx.dim, world())), None


class Scatter(torch.autograd.Function):
    """Reduce-scatter along ``dim``, with an all-gather of the gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, dim: int, op: str) -> Tensor:  # type: ignore[override]
        ctx.dim = dim
        return waited(reduce_scatter_tensor(x.contiguous(), op, dim, world()))

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:  # type: ignore[override]
        return waited(all_gather_tensor(gradient.contiguous(), ctx.dim, world())), None, None


def gather(x: Tensor, dim: int = 1) -> Tensor:
    return Gather.apply(x, dim)


def scatter(x: Tensor, dim: int = 1, op: str = "sum") -> Tensor:
    return Scatter.apply(x, dim, op)


def layer(x: Tensor, w: dict[str, Tensor]) -> Tensor:
    """A tensor-parallel layer with sequence parallelism: (batch, length / ranks, dim) in and out."""
    return scatter(F.linear(F.silu(F.linear(gather(x), w["up"])), w["down"]))


@torch.library.custom_op("test_async_tp::matmul", mutates_args=())
def matmul(x: Tensor, w: Tensor) -> Tensor:
    """Stay one operator in a graph, as aten.matmul does on an NPU. Tracing on a CPU decomposes aten.matmul."""
    return x @ w


@torch.library.custom_op("test_async_tp::matmul_backward", mutates_args=())
def matmul_backward(grad: Tensor, x: Tensor, w: Tensor, mask: list[bool]) -> tuple[Tensor, Tensor]:
    """Compute the gradients selected by ``mask``, as aten.matmul_backward does on an NPU."""
    nothing = grad.new_empty(0)
    of_x = grad @ w.t() if mask[0] else nothing
    return of_x, x.flatten(0, -2).t() @ grad.flatten(0, -2) if mask[1] else nothing


matmul.register_fake(lambda x, w: x.new_empty(*x.shape[:-1], w.shape[1]))
matmul_backward.register_fake(lambda grad, x, w, mask: (torch.empty_like(x), grad.new_empty(w.shape)))
matmul.register_autograd(
    lambda ctx, grad: matmul_backward(grad, *ctx.saved_tensors, [True, True]),
    setup_context=lambda ctx, inputs, output: ctx.save_for_backward(*inputs),
)
ATEN_ON_NPU = {
    torch.ops.test_async_tp.matmul.default: torch.ops.aten.matmul.default,
    torch.ops.test_async_tp.matmul_backward.default: torch.ops.aten.matmul_backward.default,
}


def retarget(graph: fx.Graph, names: dict[Any, Any]) -> None:
    for node in graph.nodes:
        node.target = names.get(node.target, node.target)


def async_tp_as_on_npu(graph: fx.Graph) -> int:
    """Run the pass on the graph as an NPU has it, and then replace its operators by those that run here."""
    retarget(graph, ATEN_ON_NPU)
    changed = async_tp(graph)
    masks = [node.args[3] for node in graph.nodes if node.target is torch.ops.aten.matmul_backward.default]
    assert masks == [[False, True]] * len(masks) and masks  # the fused gradient is not computed twice
    retarget(graph, {ours: name for name, ours in ATEN_ON_NPU.items()})
    return changed


def layer_on_npu(x: Tensor, w: dict[str, Tensor]) -> Tensor:
    return scatter(matmul(F.silu(matmul(gather(x), w["up"].t())), w["down"].t()))


def gated(x: Tensor, w: dict[str, Tensor]) -> Tensor:
    """Two matmuls of one all-gather. Their gradients are added, so the reduce-scatter has no matmul before it."""
    full = gather(x)
    return scatter(F.linear(F.silu(F.linear(full, w["gate"])) * F.linear(full, w["up"]), w["down"]))


def first_dimension(x: Tensor, w: dict[str, Tensor]) -> Tensor:
    return scatter(F.linear(F.silu(F.linear(gather(x, 0), w["up"])), w["down"]), 0)


def scaled(x: Tensor, w: dict[str, Tensor]) -> Tensor:
    return scatter(F.linear(F.silu(F.linear(gather(x), w["up"])), w["down"]) * 3 / 7)


def average(x: Tensor, w: dict[str, Tensor]) -> Tensor:
    return scatter(F.linear(F.silu(F.linear(gather(x), w["up"])), w["down"]) / 7, op="avg")


def maximum(x: Tensor, w: dict[str, Tensor]) -> Tensor:
    """A reduction that the fused operators do not support."""
    return torch.ops._c10d_functional.wait_tensor(
        torch.ops._c10d_functional.reduce_scatter_tensor(
            F.linear(x, w["square"]).flatten(0, 1),
            "max",
            2,
            world().group_name,  # type: ignore[union-attr]
        )
    )


def used_twice(x: Tensor, w: dict[str, Tensor]) -> Tensor:
    """A matmul whose full result has another user cannot be fused with the reduce-scatter."""
    full = F.linear(x, w["square"])
    return scatter(full) + full.sum()


def used_twice_first_dimension(x: Tensor, w: dict[str, Tensor]) -> Tensor:
    full = F.linear(x.transpose(0, 1).contiguous(), w["square"])
    return scatter(full, 0) + full.sum()


def with_bias(x: Tensor, w: dict[str, Tensor]) -> Tensor:
    """``addmm``, for which there is no fused operator."""
    return F.linear(gather(x), w["up"], w["bias"])


FUSED: dict[Callable[..., Tensor], tuple[dict[str, int], dict[str, int]]] = {
    layer: ({"AG": 2, "RS": 2}, {"AG+mm": 2, "mm+RS": 2}),
    gated: ({"AG": 2, "RS": 2}, {"AG+mm": 2, "mm+RS": 1, "RS": 1}),
    first_dimension: ({"AG": 2, "RS": 2}, {"AG+mm": 2, "mm+RS": 2}),
    layer_on_npu: ({"AG": 2, "RS": 2}, {"AG+mm": 2, "mm+RS": 2}),
    scaled: ({"AG": 2, "RS": 2}, {"AG+mm": 1, "mm+RS": 2, "AG": 1}),
    average: ({"AG": 1, "RS": 1}, {"AG+mm": 1, "mm+RS": 1}),
}
"""Collectives before and after. An all-gather is not fused if its result is scaled before the matmul."""
UNCHANGED: dict[Callable[..., Tensor], dict[str, int]] = {
    maximum: {"RS": 1},
    used_twice: {"RS": 1},
    used_twice_first_dimension: {"RS": 1},
    with_bias: {"AG": 1},
}
MODELS = [*FUSED, *UNCHANGED]


def inputs(batch: int) -> tuple[Tensor, dict[str, Tensor]]:
    generator = torch.Generator().manual_seed(dist.get_rank())

    def leaf(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64).requires_grad_()

    shapes = {
        "up": (HIDDEN, DIM),
        "gate": (HIDDEN, DIM),
        "down": (DIM, HIDDEN),
        "square": (DIM, DIM),
        "bias": (HIDDEN,),
    }
    return leaf(batch, LENGTH, DIM), {name: leaf(*shape) for name, shape in shapes.items()}


def run_models(batch: int) -> dict[str, tuple[list[Tensor], list[Tensor], list[Counter[str]]]]:
    """Return by model the results and gradients in eager mode and with the pass, and the collectives of both graphs."""
    outcomes = {}
    for model in MODELS:
        training = model in FUSED and model is not average  # torch has no gradient for it
        graphs: list[fx.Graph] = []
        results: list[Any] = []
        change = async_tp_as_on_npu if model is layer_on_npu else async_tp
        for function in (model, compiled(model, change, graphs)):
            x, w = inputs(batch)
            with torch.set_grad_enabled(training):
                result = function(x, w)
            if training:
                (result * torch.arange(float(result.numel()), dtype=torch.float64).view_as(result)).sum().backward()
            gradients = [leaf.grad for leaf in (x, *w.values()) if leaf.grad is not None]
            results.append([result.detach(), *gradients])
        outcomes[model.__name__] = (*results, [calls(graph) for graph in graphs])
    return outcomes


@pytest.fixture(scope="module", params=[1, 2], ids=lambda batch: f"batch {batch}")
def outcomes(request: pytest.FixtureRequest) -> Any:
    return run_on_ranks(2, run_models, request.param)


@pytest.mark.parametrize("model", FUSED, ids=lambda model: model.__name__)
def test_fused_with_equal_gradients(model: Callable[..., Tensor], outcomes: Any) -> None:
    for outcome in outcomes:
        eager, changed, (before, after) = outcome[model.__name__]
        assert (before, after) == FUSED[model]
        assert len(eager) >= 3 or model is average
        for theirs, ours in zip(eager, changed, strict=True):
            # two layers of sums in another order, each of at most 2 * LENGTH * 2 products
            bound = 8 * LENGTH * HIDDEN * EPSILON * float(theirs.abs().max())
            torch.testing.assert_close(ours, theirs, rtol=0, atol=bound)


@pytest.mark.parametrize("model", UNCHANGED, ids=lambda model: model.__name__)
def test_unchanged(model: Callable[..., Tensor], outcomes: Any) -> None:
    for outcome in outcomes:
        (eager,), (changed,), (before, after) = outcome[model.__name__]
        assert before == after == UNCHANGED[model] and torch.equal(eager, changed)
