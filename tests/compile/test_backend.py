"""The backend: eager's numbers to the bit, by calling the same operators and nothing else."""

from __future__ import annotations

import ast
import types
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn
from torch._inductor import metrics
from torch._inductor.utils import run_and_get_code

import torchtitan_npu.ops  # noqa: F401
from torchtitan_npu.compile import backend, launcher

BINDINGS = (types.BuiltinFunctionType, types.MethodDescriptorType)
"""What torch's own bindings of operators are, and what an operator is without its Python frame."""


class Network(nn.Module):
    """Something of everything: a fused operator, products, views, a change of dtype, a value used twice."""

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
def written(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, dict[str, Any]]]:
    """The source of every function that is written in the test, with its scope: forward, then backward."""
    functions: list[tuple[str, dict[str, Any]]] = []
    write = launcher.write

    def keep(graph_module: fx.GraphModule) -> tuple[str, dict[str, Any]]:
        functions.append(write(graph_module))
        return functions[-1]

    monkeypatch.setattr(launcher, "write", keep)
    torch._dynamo.reset()
    return functions


def results(call: Any, network: nn.Module, x: Tensor) -> list[Tensor]:
    """The output and every gradient."""
    network.zero_grad()
    x = x.clone().requires_grad_()
    output = call(x)
    output.square().sum().backward()
    gradients = [parameter.grad for parameter in network.parameters()]
    return [tensor.detach().clone() for tensor in (output, x.grad, *gradients)]


def test_numbers_are_eagers_to_the_bit(written: list[Any]) -> None:
    network, x = Network(), torch.randn(2, 4, 8)
    eager = results(network, network, x)
    compiled = results(torch.compile(network, backend=backend.bypassed, fullgraph=True), network, x)
    assert len(written) == 2  # forward and backward
    assert len(eager) == 6
    for ours, theirs in zip(compiled, eager, strict=True):
        assert torch.equal(ours, theirs) and ours.stride() == theirs.stride()


def test_the_code_only_calls_operators(written: list[Any]) -> None:
    metrics.reset()
    network = Network()
    results(torch.compile(network, backend=backend.bypassed, fullgraph=True), network, torch.randn(2, 4, 8))
    called = []
    for source, scope in written:
        tree = ast.parse(source)
        (function,) = tree.body
        assert isinstance(function, ast.FunctionDef)
        assert {type(line) for line in function.body} <= {ast.Assign, ast.Delete, ast.Expr, ast.Return}
        for call in (node for node in ast.walk(function) if isinstance(node, ast.Call)):
            if isinstance(call.func, ast.Attribute):
                assert ast.unparse(call) == "inputs.clear()"
            else:
                assert isinstance(call.func, ast.Name)
                if scope[call.func.id] is torch.device:  # a literal, among the arguments
                    continue
                assert isinstance(scope[call.func.id], BINDINGS), call.func.id
                called.append(call.func.id)
    assert {"npu_npu_rms_norm_default", "npu_npu_rms_norm_backward_default", "aten_mm_default"} <= set(called)
    assert metrics.generated_kernel_count == 0


def test_another_compile_in_the_process_still_generates_code() -> None:
    torch._dynamo.reset()
    network, x = Network(), torch.randn(2, 4, 8)
    torch.compile(network, backend=backend.bypassed, fullgraph=True)(x)
    settings = torch._inductor.config.get_config_copy()
    metrics.reset()
    _, (code,) = run_and_get_code(torch.compile(lambda x: x.sin() + x.cos()), torch.randn(16))
    assert "cpp_fused" in code and metrics.generated_kernel_count == 1
    assert torch._inductor.config.get_config_copy() == settings


def test_views_that_lead_nowhere_are_not_made(written: list[Any]) -> None:
    network = nn.Linear(8, 8, bias=False)
    results(torch.compile(network, backend=backend.bypassed, fullgraph=True), network, torch.randn(2, 4, 8))
    forward, backward = (source for source, _ in written)
    assert forward.count("aten_mm_default(") == 1 and backward.count("aten_mm_default(") == 2
    # as autograd writes it, the weight is transposed for the forward, and back again for the gradient of the input
    assert forward.count("aten_t_default(") == 1
    # of the rows' gradient; then of the weight's, twice: what a graph returns is left as it is
    assert backward.count("aten_t_default(") == 3


def test_values_are_let_go_after_their_last_use(written: list[Any]) -> None:
    def chain(x: Tensor) -> Tensor:
        return x.sin().cos().tan().exp()

    torch.compile(chain, backend=backend.bypassed, fullgraph=True)(torch.randn(4))
    ((source, _),) = written
    assert source.count("del ") == 4  # the input and three values in between; the last is returned


def test_outputs_that_alias_inputs_still_do() -> None:
    torch._dynamo.reset()

    def turn(x: Tensor) -> tuple[Tensor, Tensor]:
        return x.detach(), x.t().t() * 2

    x = torch.randn(3, 4)
    same, doubled = torch.compile(turn, backend=backend.bypassed, fullgraph=True)(x)
    assert same.data_ptr() == x.data_ptr() and torch.equal(doubled, x * 2)


def test_a_changed_size_gives_its_own_numbers_and_then_none_more_are_compiled(written: list[Any]) -> None:
    network = Network()
    compiled = torch.compile(network, backend=backend.bypassed, fullgraph=True)
    for tokens in (4, 5, 6, 9, 17):
        x = torch.randn(2, tokens, 8)
        for ours, theirs in zip(results(compiled, network, x), results(network, network, x), strict=True):
            assert torch.equal(ours, theirs)
    assert len(written) == 4  # for the first size, and then for any
