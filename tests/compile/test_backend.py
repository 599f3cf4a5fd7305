"""Inductor without code generation calls the operators of eager mode and nothing else: results are bit-identical."""

from __future__ import annotations

import itertools
import math
import operator
import re
import traceback
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import torch.utils.checkpoint
from torch import Tensor, fx, nn
from torch._dynamo.exc import BackendCompilerFailed
from torch._inductor import config as inductor_config
from torch._inductor import metrics
from torch._inductor.async_compile import AsyncCompile
from torch._inductor.utils import run_and_get_code

import torchtitan_npu.ops  # noqa: F401
from tests._helpers.compiled_training import operator_calls
from tests._helpers.pass_graphs import recorded_graphs
from torchtitan_npu.compile import backend
from torchtitan_npu.compile.backend import check_wrapper
from torchtitan_npu.compile.passes.simple import fold_views
from torchtitan_npu.errors import UsageError
from torchtitan_npu.torch_internals import inductor

LIBRARY = torch.library.Library("torchtitan_npu_test", "FRAGMENT")
numbers = itertools.count()


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


@pytest.fixture(autouse=True)
def _nothing_compiled() -> None:
    torch.compiler.reset()


def bypassed(function: Callable[..., Any], **options: Any) -> Callable[..., Any]:
    return torch.compile(function, backend=backend.bypass_codegen, fullgraph=True, **options)


@pytest.fixture
def graphs() -> Iterator[list[fx.Graph]]:
    """The graphs compiled in the test: forward, then backward."""
    with recorded_graphs() as recorded:
        yield recorded


def results(call: Any, network: nn.Module, x: Tensor) -> list[Tensor]:
    """Return the output and all gradients."""
    network.zero_grad()
    x = x.clone().requires_grad_()
    output = call(x)
    output.square().sum().backward()
    gradients = [parameter.grad for parameter in network.parameters()]
    return [tensor.detach().clone() for tensor in (output, x.grad, *gradients)]


def assert_same_results(compiled: Any, network: nn.Module, x: Tensor) -> None:
    for actual, eager in zip(results(compiled, network, x), results(network, network, x), strict=True):
        assert torch.equal(actual, eager) and actual.stride() == eager.stride()


def test_results_are_bit_identical(graphs: list[fx.Graph]) -> None:
    network = Network()
    assert_same_results(bypassed(network), network, torch.randn(2, 4, 8))
    assert len(graphs) == 2  # forward and backward


def test_wrappers_call_only_operators(graphs: list[fx.Graph], monkeypatch: pytest.MonkeyPatch) -> None:
    sources: list[str] = []
    monkeypatch.setattr(backend, "check_wrapper", lambda source: (sources.append(source), check_wrapper(source)))
    metrics.reset()
    network = Network()
    results(bypassed(network), network, torch.randn(2, 4, 8))
    assert metrics.generated_kernel_count == 0
    calls = operator_calls(graphs)
    assert calls["npu::npu_rms_norm"] == calls["npu::npu_rms_norm_backward"] == 1
    assert (calls["aten::mm"], calls["aten::addmm"]) == (5, 1) and not {"aten::view", "aten::t"} & calls.keys()
    for source, graph in zip(sources, graphs, strict=True):
        called = [node for node in graph.nodes if node.op == "call_function" and node.target is not operator.getitem]
        operators = [node for node in called if node.meta.get("custom") != inductor.LOWERED]
        assert len(re.findall(r"^ +buf\d+ = torch\.ops\.", source, re.MULTILINE)) == len(operators) > 5


def test_a_generated_kernel_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """One pointwise operator that Inductor may lower, as an option or a new version of torch might have it."""
    compiled_kernels: list[str] = []

    def let_one_through(graph: fx.Graph) -> None:
        fold_views(graph)
        for node in graph.find_nodes(op="call_function", target=torch.ops.aten.sin.default):
            inductor.lower_as_view(node)

    torch.compiler.reset()
    monkeypatch.setattr(backend, "fold_views", let_one_through)
    # only the wrapper is checked: the kernel itself need not be compiled
    monkeypatch.setattr(AsyncCompile, "cpp_pybinding", lambda self, _, code: compiled_kernels.append(code))
    compiled = torch.compile(lambda x: x.sin().cos(), backend=backend.make_backend(), fullgraph=True)
    with (
        torch.no_grad(),
        inductor_config.patch({"cpp.simdlen": 1}),  # skip the compiled check for vector instructions
        pytest.raises(BackendCompilerFailed, match=r'must be "off": Inductor generated the call cpp_fused_sin_0'),
    ):
        compiled(torch.randn(4))
    assert len(compiled_kernels) == 1 and "sin" in compiled_kernels[0] and "cos" not in compiled_kernels[0]


@pytest.mark.parametrize("call", ["triton_poi_fused_sin_0.run(x, 4, stream=s)", "cpp_fused_sin_0(x)"])
def test_calls_of_kernels_in_a_wrapper(call: str) -> None:
    good = (
        "def call(args):\n    x, = args\n    y = torch.ops.aten.sin.default(reinterpret_tensor(x, (4, ), (1, ), 0))\n"
    )
    check_wrapper(good)
    with pytest.raises(UsageError, match=r"Inductor generated the call (triton_poi_fused_sin_0.run|cpp_fused_sin_0)$"):
        check_wrapper(f"{good}    {call}\n")


@pytest.mark.parametrize(
    "line",
    [
        "x = copy_if_misaligned(x)",  # torch 2.13 on a GPU
        "torch.ops.aten.sin.default(x, max(0, min(s0, math.floor(s1 / 2))), abs(math.ceil(s0)), math.trunc(s1))",
        "s0 = x.size()[0] + x.stride()[0]",
        "y = empty_strided_cuda((4, ), (1, ), torch.float32)\n    extern_kernels.mm(x, x, out=y)",
        "with torch.cuda._DeviceGuard(0):\n        torch.cuda.set_device(0)",
    ],
)
def test_other_calls_in_a_wrapper(line: str) -> None:
    check_wrapper(f"def call(args):\n    x, s0, s1 = args\n    {line}\n")


class SinWithoutDerivative(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.sin()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:  # type: ignore[override]
        return gradient


def test_a_graph_without_calls() -> None:
    """Inductor does not write a wrapper for this backward graph."""
    x = torch.ones(3, requires_grad=True)
    y = bypassed(lambda x: SinWithoutDerivative.apply(x))(x)
    y.backward(torch.arange(3.0))
    assert torch.equal(y, x.sin()) and torch.equal(x.grad, torch.arange(3.0))  # type: ignore[arg-type]


def test_dynamic_sizes() -> None:
    """Wrappers compute sizes with functions of Python."""

    def function(x: Tensor) -> tuple[Tensor, ...]:
        rows = x.shape[0]
        large = x.sin().narrow(0, 0, max(min(rows // 2 + 1, 4), 2))
        return large, x.new_ones(abs(rows - 9), math.floor(rows / 2)), x.new_ones(math.ceil(rows / 3), int(0.5 * rows))

    compiled = bypassed(function, dynamic=True)
    for x in (torch.randn(3, 4), torch.randn(7, 6)):
        for ours, theirs in zip(compiled(x), function(x), strict=True):
            assert torch.equal(ours, theirs)


def test_a_traceback_shows_the_wrapper() -> None:
    """Also after the first call, from which on the assertions are removed."""
    calls: list[int] = []

    @torch.library.custom_op("torchtitan_npu_test::fail_later", mutates_args=())
    def fail_later(x: Tensor) -> Tensor:
        calls.append(1)
        if len(calls) > 1:
            raise RuntimeError("later")
        return x.clone()

    fail_later.register_fake(torch.empty_like)
    compiled = bypassed(lambda x: fail_later(x.sin()))
    with torch.no_grad():
        compiled(torch.ones(2))
        with pytest.raises(RuntimeError, match="later") as raised:
            compiled(torch.ones(2))
    lines = traceback.format_tb(raised.value.__traceback__)
    assert any(re.search(r"buf\d+ = torch.ops.torchtitan_npu_test.fail_later", line) for line in lines)


def test_as_options_of_inductor() -> None:
    """The same graphs by ``torch.compile(options=...)``, without this package's backend."""
    metrics.reset()
    network, x = Network(), torch.randn(2, 4, 8)
    compiled = torch.compile(network, backend="inductor", options=backend.inductor_options(), fullgraph=True)
    assert_same_results(compiled, network, x)
    assert metrics.generated_kernel_count == 0


def operator_with(kernel: Callable[[Tensor], Any], fake: Callable[[Tensor], Any], returns: str = "Tensor") -> Any:
    """Return an operator whose fake kernel may disagree with its kernel."""
    name = f"op_{next(numbers)}"
    LIBRARY.define(f"{name}(Tensor x) -> {returns}")
    LIBRARY.impl(name, kernel, "CPU")
    LIBRARY.impl(name, fake, "Meta")
    return getattr(torch.ops.torchtitan_npu_test, name)


def test_a_result_with_other_strides_is_copied() -> None:
    """A fake kernel that promises other strides would make the folded views wrong."""
    transposed = operator_with(lambda x: x.t().clone(memory_format=torch.contiguous_format).t(), torch.empty_like)
    compiled = bypassed(lambda x: transposed(x).view(-1) * 2)
    with torch.no_grad():
        for rows in (3, 3, 5, 1, 6, 6):  # dynamic sizes from the third on
            x = torch.randn(rows, 4)
            assert torch.equal(compiled(x), x.view(-1) * 2)


def test_a_wrapper_that_torch_has_wrapped_keeps_its_assertions() -> None:
    namespace: dict[str, Any] = {"assert_size_stride": (assertion := lambda *_: None)}
    exec("def call(args):\n    return args\n", namespace)
    for _ in range(2):
        assert backend.compare_results(lambda args: [*namespace["call"](args), 2])([1]) == [1, 2]
    assert namespace["assert_size_stride"] is assertion
    for _ in range(2):  # equal wrappers share a module
        launch = backend.compare_results(namespace["call"])
        assert namespace["assert_size_stride"] is not assertion and launch([]) == []
    assert namespace["inductors_assertion"] is assertion


def test_sizes_are_checked_in_the_first_call() -> None:
    shorter = operator_with(lambda x: x[1:].clone(), torch.empty_like)
    with torch.no_grad(), pytest.raises(AssertionError, match="expected size 2==3"):
        bypassed(lambda x: shorter(x) * 2)(torch.randn(3, 4))


def test_sizes_of_an_absent_result() -> None:
    """The fake kernel of npu_fusion_attention_grad_v3 has other sizes for gradients that are absent."""
    with_nothing = operator_with(
        lambda x: (x.clone(), x.new_empty(0)), lambda x: (torch.empty_like(x), x.new_empty(())), "(Tensor, Tensor)"
    )
    compiled = bypassed(lambda x: with_nothing(x)[0] * 2)
    with torch.no_grad():
        for x in torch.randn(3, 2, 4):
            assert torch.equal(compiled(x), x * 2)


def test_recomputed_attention() -> None:
    """Without dropout the graph saves no random state, and the recomputation of checkpointing is in it."""

    def attention(x: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(x, x, x).sin()

    def recomputed(x: Tensor) -> Tensor:
        return torch.utils.checkpoint.checkpoint(attention, x, use_reentrant=False)

    compiled = bypassed(recomputed)
    x, network = torch.randn(1, 2, 4, 8), nn.Identity()
    with recorded_graphs() as graphs:
        ours = results(compiled, network, x)
    assert all(torch.equal(one, other) for one, other in zip(ours, results(attention, network, x), strict=True))
    attentions = [sum("attention" in str(node.target) for node in graph.nodes) for graph in graphs]
    assert attentions == [1, 2]  # recomputed, and its gradient


def test_gradients_of_other_strides_and_missing_ones() -> None:
    def two(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return x.view(4, 3).t() * 2, x.exp(), x.argmax(dim=-1)

    x, weight = torch.randn(3, 4, requires_grad=True), torch.arange(12.0).view(3, 4)
    first, _, index = bypassed(two)(x)
    assert first.stride() == (1, 3) and not index.requires_grad
    (first * weight).sum().backward()
    assert torch.equal(x.grad, 2 * weight.t().reshape(3, 4))  # type: ignore[arg-type]


def test_torch_has_the_same_options_afterwards() -> None:
    network = Network()
    configs = (torch._dynamo.config, torch._functorch.config, torch._inductor.config)
    settings = [config.get_config_copy() for config in configs]  # type: ignore[attr-defined]
    results(bypassed(network), network, torch.randn(2, 4, 8))
    assert [config.get_config_copy() for config in configs] == settings  # type: ignore[attr-defined]


@pytest.mark.slow
def test_another_compile_in_the_process_generates_code() -> None:
    network = Network()
    results(bypassed(network), network, torch.randn(2, 4, 8))
    metrics.reset()
    _, (code,) = run_and_get_code(torch.compile(lambda x: x.sin() + x.cos()), torch.randn(16))
    assert "cpp_fused" in code and metrics.generated_kernel_count == 1


def test_no_autograd_graph_without_gradients() -> None:
    network, x = Network(), torch.randn(2, 4, 8)
    with torch.no_grad():
        output = bypassed(network)(x)
        assert output.grad_fn is None and torch.equal(output, network(x))


def test_autocast() -> None:
    network, x = nn.Linear(8, 8), torch.randn(2, 8)
    compiled = bypassed(network)
    with torch.autocast("cpu", torch.bfloat16):
        ours, theirs = (results(call, network, x) for call in (compiled, network))
    assert ours[0].dtype == torch.bfloat16
    assert all(torch.equal(one, other) for one, other in zip(ours, theirs, strict=True))


def test_outputs_that_alias_inputs() -> None:
    def function(x: Tensor) -> tuple[Tensor, Tensor]:
        return x.detach(), x.t().t() * 2

    x = torch.randn(3, 4)
    same, doubled = bypassed(function)(x)
    assert same.data_ptr() == x.data_ptr() and torch.equal(doubled, x * 2)


def test_the_same_computation_with_and_without_gradient() -> None:
    """Two equal results, one with a gradient, must not become one tensor."""

    def two(x: Tensor) -> tuple[Tensor, Tensor]:
        with torch.no_grad():
            constant = x.sin()
        return x.sin(), constant

    x = torch.randn(4, requires_grad=True)
    varying, constant = bypassed(two)(x)
    assert varying.requires_grad and not constant.requires_grad and varying.data_ptr() != constant.data_ptr()
    varying.sum().backward()
    assert torch.equal(x.grad, x.detach().cos())  # type: ignore[arg-type]


def test_random_operators_are_not_merged() -> None:
    drawn: list[int] = []

    @torch.library.custom_op("torchtitan_npu_test::draw", mutates_args=(), tags=(torch.Tag.nondeterministic_seeded,))
    def draw(x: Tensor) -> Tensor:
        drawn.append(1)
        return torch.rand_like(x)

    draw.register_fake(torch.empty_like)
    with torch.no_grad():
        difference = bypassed(lambda x: draw(x) - draw(x))(torch.ones(8))
    assert len(drawn) == 2 and difference.count_nonzero()


def test_a_new_size_compiles_dynamic_graphs_once(graphs: list[fx.Graph]) -> None:
    network = Network()
    compiled = bypassed(network)
    for tokens in (4, 5, 6, 9, 17):
        assert_same_results(compiled, network, torch.randn(2, tokens, 8))
    assert len(graphs) == 4  # for the first size, and dynamic
