"""The backend: eager's numbers to the bit, by calling the same operators and nothing else."""

from __future__ import annotations

import dataclasses
import operator
import weakref
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import torch.utils.checkpoint
from torch import Tensor, fx, nn
from torch._functorch._aot_autograd import schemas
from torch._inductor import metrics
from torch._inductor.utils import run_and_get_code
from torch.fx.experimental.proxy_tensor import make_fx

import torchtitan_npu.ops  # noqa: F401
from tests._helpers.compiled_training import PACKING, assert_have_kernels, called
from torchtitan_npu.compile import backend, interpreter
from torchtitan_npu.compile.tidy import tidy
from torchtitan_npu.errors import UsageError


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
def written(monkeypatch: pytest.MonkeyPatch) -> list[torch._C.Graph]:
    """Every graph that is written for the interpreter in the test: forward, then backward."""
    graphs: list[torch._C.Graph] = []
    write = interpreter.write

    def keep(graph_module: fx.GraphModule) -> torch._C.Graph:
        graphs.append(write(graph_module))
        return graphs[-1]

    monkeypatch.setattr(interpreter, "write", keep)
    torch._dynamo.reset()
    return graphs


def kinds(graph: torch._C.Graph) -> Counter[str]:
    return Counter(node.kind() for node in graph.nodes())


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


def test_only_operators_are_called(written: list[Any]) -> None:
    metrics.reset()
    torch._dynamo.utils.counters.clear()
    network = Network()
    results(torch.compile(network, backend=backend.bypassed, fullgraph=True), network, torch.randn(2, 4, 8))
    run = torch._C._last_executed_optimized_graph()  # the backward's, as the interpreter ran it
    assert kinds(run) == kinds(written[1])
    operators = called(written)
    assert {"npu::npu_rms_norm", "npu::npu_rms_norm_backward", "aten::mm"} <= operators.keys()
    assert_have_kernels(operators)
    assert metrics.generated_kernel_count == 0
    assert not torch._dynamo.utils.counters["inductor"]


def test_another_compile_in_the_process_still_generates_code() -> None:
    torch._dynamo.reset()
    network = Network()
    configs = (torch._dynamo.config, torch._functorch.config, torch._inductor.config)
    settings = [config.get_config_copy() for config in configs]  # type: ignore[attr-defined]
    results(torch.compile(network, backend=backend.bypassed, fullgraph=True), network, torch.randn(2, 4, 8))
    metrics.reset()
    _, (code,) = run_and_get_code(torch.compile(lambda x: x.sin() + x.cos()), torch.randn(16))
    assert "cpp_fused" in code and metrics.generated_kernel_count == 1
    assert [config.get_config_copy() for config in configs] == settings  # type: ignore[attr-defined]


def test_views_that_lead_nowhere_are_not_made(written: list[Any]) -> None:
    network = nn.Linear(8, 8, bias=False)
    results(torch.compile(network, backend=backend.bypassed, fullgraph=True), network, torch.randn(2, 4, 8))
    forward, backward = map(kinds, written)
    assert forward["aten::mm"] == 1 and backward["aten::mm"] == 2
    # as autograd writes it, the weight is transposed for the forward, and back again for the gradient of the input
    assert forward["aten::t"] == 1
    # of the rows' gradient; then of the weight's, twice: what a graph returns is left as it is
    assert backward["aten::t"] == 3


def test_what_may_copy_is_no_view() -> None:
    """By its schema a reshape is one; of a transposed matrix it has the first one's layout, and other elements."""
    x, graph, aten = torch.arange(6.0).view(2, 3), fx.Graph(), torch.ops.aten
    place = graph.placeholder("x")
    turned = graph.call_function(aten.t.default, (place,))
    reshaped = graph.call_function(aten.reshape.default, (turned, [2, 3]))
    result = graph.call_function(aten.sin.default, (reshaped,))
    graph.output(result)
    values = (x, x.t(), x.t().reshape(2, 3), x.t().reshape(2, 3).sin())
    for node, value in zip((place, turned, reshaped, result), values, strict=True):
        node.meta["val"] = value
    module = fx.GraphModule(nn.Module(), graph)
    tidy(module)
    module.recompile()
    assert torch.equal(module(x), values[-1])


def test_values_are_let_go_after_their_last_use() -> None:
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

    launch = interpreter.interpreted(make_fx(chain, tracing_mode="fake")(torch.randn(4), torch.randn(4)))
    x, y = torch.randn(4), torch.randn(4)
    refs.append(weakref.ref(x))
    given = [x, y]
    del x
    results = launch(given)
    assert given == [] and results[2] is y
    # the input is gone with the first operator, each value with the one that used it, but for what is returned
    assert alive == [[False, True], [False, False, True], [False, False, True, True]]


def test_the_interpreter_runs_what_is_written_every_time() -> None:
    """TorchScript would watch two calls, and then run a graph of its own making, on a GPU with kernels of its own."""

    def twice(x: Tensor, y: Tensor) -> tuple[Tensor]:
        return (torch.ops.aten.mul(x, y) + torch.ops.aten.mul(x, y),)

    launch = interpreter.interpreted(make_fx(twice, tracing_mode="fake")(torch.ones(3), torch.ones(3)))
    for _ in range(4):
        launch([torch.ones(3), torch.ones(3)])
        ran = kinds(torch._C._last_executed_optimized_graph())
        assert {kind for kind in ran if kind not in PACKING} == {"aten::mul", "aten::add"} and ran["aten::mul"] == 2
    assert torch._C._get_graph_executor_optimize()


ARGUMENTS: dict[str, Callable[[Tensor], Any]] = {
    "a view of another dtype": lambda x: x.view(torch.int32),
    "several outputs": lambda x: x.topk(2, dim=-1),
    "a list of outputs": lambda x: x.split([1, 3], dim=-1),
    "a list of tensors": lambda x: torch.cat([x, x], dim=-1),
    "optional tensors in a list": lambda x: x[:, torch.tensor([0, 2])],
    "numbers for tensors": lambda x: (x + 1, 2 * x, x / 3, 1 - x, x**2, x > 0),
    "a truth value for a number": lambda x: (x > 0).scatter(1, torch.tensor([[0], [1], [2]]), False),
    "an integer for a float": lambda x: torch.nn.functional.leaky_relu(x, 1),
    "dtype, device, memory format": lambda x: x.to(torch.float64, memory_format=torch.contiguous_format).cpu(),
    "no tensor": lambda x: torch.arange(4, dtype=torch.int32) + x,
    "an empty list": lambda x: x.sum().view([]),
    "text": lambda x: torch.nn.functional.gelu(x, approximate="tanh"),
    "nothing in place of a tensor": lambda x: torch.nn.functional.layer_norm(x, (4,)),
}


@pytest.mark.parametrize("what", ARGUMENTS)
def test_arguments_of_every_kind(what: str) -> None:
    def function(x: Tensor) -> tuple[Tensor, ...]:
        result = ARGUMENTS[what](x)
        return tuple(result) if isinstance(result, (tuple, list)) else (result,)

    x = torch.randn(3, 4)
    launch = interpreter.interpreted(make_fx(function, tracing_mode="fake")(x))
    for ours, theirs in zip(launch([x]), function(x), strict=True):
        assert torch.equal(ours, theirs) and ours.dtype == theirs.dtype and ours.stride() == theirs.stride()


def test_sizes_of_several_factors() -> None:
    """What DTensor computes while nothing is recorded, torch writes down afterwards as one product, or sum, of all."""
    graph = fx.Graph()
    x, *sizes = (graph.placeholder(name) for name in ("x", "batch", "sequence", "features"))
    for node, value in zip((x, *sizes), (torch.ones(24), 2, 3, 4), strict=True):
        node.meta["val"] = value
    product = graph.call_function(operator.mul, (*sizes,))
    added = [graph.call_function(torch.sym_sum, args) for args in ((*sizes,), ((*sizes,),))]
    views = [graph.call_function(torch.ops.aten.view.default, (x, [size, -1])) for size in (product, sizes[0])]
    slices = [graph.call_function(torch.ops.aten.slice.Tensor, (x, 0, 0, size)) for size in added]
    graph.output((*views, *slices))
    launch = interpreter.interpreted(fx.GraphModule({}, graph))
    shapes = [tuple(result.shape) for result in launch([torch.ones(24), 2, 3, 4])]
    assert shapes == [(24, 1), (2, 12), (9,), (9,)]


def test_what_the_interpreter_cannot_say_is_an_error() -> None:
    graph = fx.Graph()
    x = graph.placeholder("x")
    x.meta["val"] = torch.ones(2)
    graph.output((graph.call_function(len, (x,)),))
    with pytest.raises(UsageError, match=r"npu.bypass_codegen must be false: a compiled graph holds .*len"):
        interpreter.interpreted(fx.GraphModule({}, graph))


def test_gradients_of_other_strides_and_none(written: list[Any]) -> None:
    """What reaches the backward pass is not always as the forward's results lie in memory, or there at all."""

    def two(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return x * 2, x.exp(), x.argmax(dim=-1)

    x = torch.randn(3, 4, requires_grad=True)
    compiled = torch.compile(two, backend=backend.bypassed, fullgraph=True)
    first, second, index = compiled(x)
    assert first.grad_fn is second.grad_fn and not index.requires_grad
    (first.t() * torch.arange(12.0).view(4, 3)).sum().backward()
    assert torch.equal(x.grad, 2 * torch.arange(12.0).view(4, 3).t())  # type: ignore[arg-type]
    with pytest.raises(RuntimeError, match="no second derivative"):
        torch.autograd.grad(compiled(x)[1].sum(), x, create_graph=True)


@pytest.mark.parametrize("dropout", [0.0, 0.5])
def test_attention_that_is_computed_again(dropout: float) -> None:
    """Without dropout it is just called; with it, the generator's state would have to be put back."""
    torch._dynamo.reset()

    def attention(x: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(x, x, x, dropout_p=dropout).sin()

    def again(x: Tensor) -> Tensor:
        return torch.utils.checkpoint.checkpoint(attention, x, use_reentrant=False)

    compiled = torch.compile(again, backend=backend.bypassed, fullgraph=True)
    x, network = torch.randn(1, 2, 4, 8), nn.Identity()
    if dropout:
        with pytest.raises(Exception, match=r"npu.bypass_codegen must be false: .*rng_state"):
            results(compiled, network, x)
        return
    for ours, theirs in zip(results(compiled, network, x), results(attention, network, x), strict=True):
        assert torch.equal(ours, theirs)


def test_in_evaluation_there_is_no_graph() -> None:
    torch._dynamo.reset()
    network, x = Network(), torch.randn(2, 4, 8)
    with torch.no_grad():
        output = torch.compile(network, backend=backend.bypassed, fullgraph=True)(x)
        assert output.grad_fn is None and torch.equal(output, network(x))


def test_casts_of_autocast_are_in_the_graph() -> None:
    torch._dynamo.reset()
    network, x = nn.Linear(8, 8), torch.randn(2, 8)
    compiled = torch.compile(network, backend=backend.bypassed, fullgraph=True)
    with torch.autocast("cpu", torch.bfloat16):
        ours, theirs = (results(call, network, x) for call in (compiled, network))
    assert ours[0].dtype == torch.bfloat16
    assert all(torch.equal(one, other) for one, other in zip(ours, theirs, strict=True))


def test_outputs_that_alias_inputs_still_do() -> None:
    torch._dynamo.reset()

    def turn(x: Tensor) -> tuple[Tensor, Tensor]:
        return x.detach(), x.t().t() * 2

    x = torch.randn(3, 4)
    same, doubled = torch.compile(turn, backend=backend.bypassed, fullgraph=True)(x)
    assert same.data_ptr() == x.data_ptr() and torch.equal(doubled, x * 2)


def test_the_same_computation_with_and_without_gradient() -> None:
    """Two results, of which one has a gradient: one tensor for both would have none."""
    torch._dynamo.reset()

    def two(x: Tensor) -> tuple[Tensor, Tensor]:
        with torch.no_grad():
            constant = x.sin()
        return x.sin(), constant

    x = torch.randn(4, requires_grad=True)
    varying, constant = torch.compile(two, backend=backend.bypassed, fullgraph=True)(x)
    assert varying.requires_grad and not constant.requires_grad and varying.data_ptr() != constant.data_ptr()
    varying.sum().backward()
    assert torch.equal(x.grad, x.detach().cos())  # type: ignore[arg-type]


def test_random_numbers_are_drawn_as_often_as_written() -> None:
    torch._dynamo.reset()
    drawn: list[int] = []

    @torch.library.custom_op("torchtitan_npu_test::draw", mutates_args=(), tags=(torch.Tag.nondeterministic_seeded,))
    def draw(x: Tensor) -> Tensor:
        drawn.append(1)
        return torch.rand_like(x)

    draw.register_fake(torch.empty_like)
    with torch.no_grad():
        difference = torch.compile(lambda x: draw(x) - draw(x), backend=backend.bypassed, fullgraph=True)(torch.ones(8))
    assert len(drawn) == 2 and difference.count_nonzero()


def test_an_input_that_was_changed_before_the_backward_pass_is_an_error() -> None:
    """As in eager mode: what was saved of it is not what it was."""
    torch._dynamo.reset()

    def function(x: Tensor, w: Tensor) -> Tensor:
        return x.view(6, 2) @ w

    x, w = torch.randn(3, 4), torch.randn(2, 2, requires_grad=True)
    result = torch.compile(function, backend=backend.bypassed, fullgraph=True)(x, w)
    x.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        result.sum().backward()


METADATA = """
    input_info output_info num_intermediate_bases keep_input_mutations traced_tangents traced_tangents_descs
    subclass_inp_meta subclass_fw_graph_out_meta subclass_tangent_meta traced_tangent_metas num_symints_saved_for_bw
    num_tensors_saved_with_no_vc_check num_opaque_objects_saved_for_bw grad_enabled_mutation deterministic
    static_input_indices tokens indices_of_inputs_that_requires_grad_with_mutations_in_bw bw_donated_idxs
    num_backward_tokens num_graphsafe_rng_states graphsafe_rng_state_index mutated_inp_stream_indices
"""
OF_SOME_VERSIONS = "is_train act_input_indices graphsafe_rng_device compile_id_str tangent_source_stack_traces"
"""``is_train`` torch 2.11 has, which a region without gradients is not: it then has one graph. The others 2.13."""
OUTPUTS = """
    non_alias alias_of_input is_input alias_of_intermediate_save_as_output alias_of_intermediate
    alias_of_intermediate_base_is_user_output unsafe_view_alias custom_function_view
"""


def test_all_that_aot_autograd_knows_of_a_region_is_known_here() -> None:
    """What is new may be something that a plain region has to leave to AOTAutograd: see runtime._is_plain."""
    fields = {field.name for field in dataclasses.fields(schemas.ViewAndMutationMeta)}
    assert fields >= {*METADATA.split()}
    assert fields <= {*METADATA.split(), *OF_SOME_VERSIONS.split()}
    assert set(schemas.OutputType.__members__) == set(OUTPUTS.split())


def test_a_changed_size_gives_its_own_numbers_and_then_none_more_are_compiled(written: list[Any]) -> None:
    network = Network()
    compiled = torch.compile(network, backend=backend.bypassed, fullgraph=True)
    for tokens in (4, 5, 6, 9, 17):
        x = torch.randn(2, tokens, 8)
        for ours, theirs in zip(results(compiled, network, x), results(network, network, x), strict=True):
            assert torch.equal(ours, theirs)
    assert len(written) == 4  # for the first size, and then for any
