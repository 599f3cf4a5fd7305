"""The backend calls the operators of eager mode and nothing else, so results are bit-identical."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import torch.utils.checkpoint
from torch import Tensor, fx, nn
from torch._inductor import metrics
from torch._inductor.utils import run_and_get_code

import torchtitan_npu.ops  # noqa: F401
from tests._helpers.compiled_training import assert_have_kernels, operator_calls
from tests._helpers.pass_graphs import recorded_graphs
from torchtitan_npu.compile import backend
from torchtitan_npu.compile.cleanup import clean_up


class Network(nn.Module):
    """A fused operator, matmuls, views, a change of dtype, and a value with two users."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.norm = nn.Parameter(torch.rand(8))
        self.up, self.down = nn.Linear(8, 12, bias=False), nn.Linear(6, 8)

    def forward(self, x: Tensor) -> Tensor:
        y, _ = torch.ops.npu.npu_rms_norm(x, self.norm, 1e-5)
        gate, up = self.up(y).chunk(2, dim=-1)
        y = self.down((F.silu(gate) * up).to(torch.float64).to(x.dtype))
        return (x + y).transpose(1, 2).softmax(dim=-1).transpose(1, 2) + y


@pytest.fixture
def graphs() -> Iterator[list[Any]]:
    """The graphs that the interpreter gets in the test: forward, then backward."""
    torch.compiler.reset()
    with recorded_graphs() as recorded:
        yield recorded


def node_kinds(graph: Any) -> Counter[str]:
    return Counter(node.kind() for node in graph.nodes())


def results(call: Any, network: nn.Module, x: Tensor) -> list[Tensor]:
    """Return the output and all gradients."""
    network.zero_grad()
    x = x.clone().requires_grad_()
    output = call(x)
    output.square().sum().backward()
    gradients = [parameter.grad for parameter in network.parameters()]
    return [tensor.detach().clone() for tensor in (output, x.grad, *gradients)]


def test_results_are_bit_identical(graphs: list[Any]) -> None:
    network, x = Network(), torch.randn(2, 4, 8)
    eager = results(network, network, x)
    compiled = results(torch.compile(network, backend=backend.bypass_codegen, fullgraph=True), network, x)
    assert len(graphs) == 2  # forward and backward
    assert len(eager) == 6
    for ours, theirs in zip(compiled, eager, strict=True):
        assert torch.equal(ours, theirs) and ours.stride() == theirs.stride()


def test_only_operators_are_called(graphs: list[Any]) -> None:
    metrics.reset()
    torch._dynamo.utils.counters.clear()
    network = Network()
    results(torch.compile(network, backend=backend.bypass_codegen, fullgraph=True), network, torch.randn(2, 4, 8))
    executed = torch._C._last_executed_optimized_graph()  # the backward graph
    assert node_kinds(executed) == node_kinds(graphs[1][1])
    operators = operator_calls(graph for _, graph in graphs)
    assert {"npu::npu_rms_norm", "npu::npu_rms_norm_backward", "aten::mm"} <= operators.keys()
    assert_have_kernels(operators)
    assert metrics.generated_kernel_count == 0
    assert not torch._dynamo.utils.counters["inductor"]


def test_torch_has_the_same_options_afterwards() -> None:
    torch.compiler.reset()
    network = Network()
    configs = (torch._dynamo.config, torch._functorch.config, torch._inductor.config)
    settings = [config.get_config_copy() for config in configs]  # type: ignore[attr-defined]
    results(torch.compile(network, backend=backend.bypass_codegen, fullgraph=True), network, torch.randn(2, 4, 8))
    assert [config.get_config_copy() for config in configs] == settings  # type: ignore[attr-defined]


@pytest.mark.slow
def test_another_compile_in_the_process_generates_code() -> None:
    torch.compiler.reset()
    network = Network()
    results(torch.compile(network, backend=backend.bypass_codegen, fullgraph=True), network, torch.randn(2, 4, 8))
    metrics.reset()
    _, (code,) = run_and_get_code(torch.compile(lambda x: x.sin() + x.cos()), torch.randn(16))
    assert "cpp_fused" in code and metrics.generated_kernel_count == 1


def test_redundant_views_are_removed(graphs: list[Any]) -> None:
    network = nn.Linear(8, 8, bias=False)
    results(torch.compile(network, backend=backend.bypass_codegen, fullgraph=True), network, torch.randn(2, 4, 8))
    forward, backward = (node_kinds(graph) for _, graph in graphs)
    assert forward["aten::mm"] == 1 and backward["aten::mm"] == 2
    # autograd transposes the weight for the forward pass, and back for the gradient of the input
    assert forward["aten::t"] == 1
    # one for the gradient of the rows, and two for that of the weight, which is an output and stays
    assert backward["aten::t"] == 3


def test_a_reshape_is_not_a_view() -> None:
    """Its schema says view, but a reshape of a transposed matrix copies. The result has the layout of the matrix."""
    x, graph, aten = torch.arange(6.0).view(2, 3), fx.Graph(), torch.ops.aten
    place = graph.placeholder("x")
    transposed = graph.call_function(aten.t.default, (place,))
    reshaped = graph.call_function(aten.reshape.default, (transposed, [2, 3]))
    result = graph.call_function(aten.sin.default, (reshaped,))
    graph.output(result)
    values = (x, x.t(), x.t().reshape(2, 3), x.t().reshape(2, 3).sin())
    for node, value in zip((place, transposed, reshaped, result), values, strict=True):
        node.meta["val"] = value
    module = fx.GraphModule(nn.Module(), graph)
    clean_up(module)
    module.recompile()
    assert torch.equal(module(x), values[-1])


def test_a_missing_gradient_and_other_strides() -> None:

    torch.compiler.reset()

    def two(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return x * 2, x.exp(), x.argmax(dim=-1)

    x = torch.randn(3, 4, requires_grad=True)
    compiled = torch.compile(two, backend=backend.bypass_codegen, fullgraph=True)
    first, second, index = compiled(x)
    assert first.grad_fn is second.grad_fn and not index.requires_grad
    (first.t() * torch.arange(12.0).view(4, 3)).sum().backward()
    assert torch.equal(x.grad, 2 * torch.arange(12.0).view(4, 3).t())  # type: ignore[arg-type]
    with pytest.raises(RuntimeError, match="no second derivative"):
        torch.autograd.grad(compiled(x)[1].sum(), x, create_graph=True)


@pytest.mark.parametrize("dropout", [0.0, 0.5])
def test_recomputed_attention(dropout: float) -> None:
    """Without dropout the graph saves no random state. With dropout it does, which is an error."""
    torch.compiler.reset()

    def attention(x: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(x, x, x, dropout_p=dropout).sin()

    def recomputed(x: Tensor) -> Tensor:
        return torch.utils.checkpoint.checkpoint(attention, x, use_reentrant=False)

    compiled = torch.compile(recomputed, backend=backend.bypass_codegen, fullgraph=True)
    x, network = torch.randn(1, 2, 4, 8), nn.Identity()
    if dropout:
        with pytest.raises(Exception, match=r"npu.bypass_codegen must be false: .*rng_state"):
            results(compiled, network, x)
        return
    for ours, theirs in zip(results(compiled, network, x), results(attention, network, x), strict=True):
        assert torch.equal(ours, theirs)


def test_no_autograd_graph_without_gradients() -> None:
    torch.compiler.reset()
    network, x = Network(), torch.randn(2, 4, 8)
    with torch.no_grad():
        output = torch.compile(network, backend=backend.bypass_codegen, fullgraph=True)(x)
        assert output.grad_fn is None and torch.equal(output, network(x))


def test_autocast() -> None:
    torch.compiler.reset()
    network, x = nn.Linear(8, 8), torch.randn(2, 8)
    compiled = torch.compile(network, backend=backend.bypass_codegen, fullgraph=True)
    with torch.autocast("cpu", torch.bfloat16):
        ours, theirs = (results(call, network, x) for call in (compiled, network))
    assert ours[0].dtype == torch.bfloat16
    assert all(torch.equal(one, other) for one, other in zip(ours, theirs, strict=True))


def test_outputs_that_alias_inputs() -> None:
    torch.compiler.reset()

    def function(x: Tensor) -> tuple[Tensor, Tensor]:
        return x.detach(), x.t().t() * 2

    x = torch.randn(3, 4)
    same, doubled = torch.compile(function, backend=backend.bypass_codegen, fullgraph=True)(x)
    assert same.data_ptr() == x.data_ptr() and torch.equal(doubled, x * 2)


def test_the_same_computation_with_and_without_gradient() -> None:
    """Two equal results, one with a gradient, must not become one tensor."""
    torch.compiler.reset()

    def two(x: Tensor) -> tuple[Tensor, Tensor]:
        with torch.no_grad():
            constant = x.sin()
        return x.sin(), constant

    x = torch.randn(4, requires_grad=True)
    varying, constant = torch.compile(two, backend=backend.bypass_codegen, fullgraph=True)(x)
    assert varying.requires_grad and not constant.requires_grad and varying.data_ptr() != constant.data_ptr()
    varying.sum().backward()
    assert torch.equal(x.grad, x.detach().cos())  # type: ignore[arg-type]


def test_random_operators_are_not_merged() -> None:
    torch.compiler.reset()
    drawn: list[int] = []

    @torch.library.custom_op("torchtitan_npu_test::draw", mutates_args=(), tags=(torch.Tag.nondeterministic_seeded,))
    def draw(x: Tensor) -> Tensor:
        drawn.append(1)
        return torch.rand_like(x)

    draw.register_fake(torch.empty_like)
    with torch.no_grad():
        difference = torch.compile(lambda x: draw(x) - draw(x), backend=backend.bypass_codegen, fullgraph=True)(
            torch.ones(8)
        )
    assert len(drawn) == 2 and difference.count_nonzero()


def test_an_in_place_update_of_a_saved_input_is_an_error() -> None:
    torch.compiler.reset()

    def function(x: Tensor, w: Tensor) -> Tensor:
        return x.view(6, 2) @ w

    x, w = torch.randn(3, 4), torch.randn(2, 2, requires_grad=True)
    result = torch.compile(function, backend=backend.bypass_codegen, fullgraph=True)(x, w)
    x.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        result.sum().backward()


def test_a_new_size_compiles_dynamic_graphs_once(graphs: list[Any]) -> None:
    network = Network()
    compiled = torch.compile(network, backend=backend.bypass_codegen, fullgraph=True)
    for tokens in (4, 5, 6, 9, 17):
        x = torch.randn(2, tokens, 8)
        for ours, theirs in zip(results(compiled, network, x), results(network, network, x), strict=True):
            assert torch.equal(ours, theirs)
    assert len(graphs) == 4  # for the first size, and dynamic
