"""The backward graph for gradients of any strides: eager's numbers to the bit, and eager's copies."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard
from torch.profiler import profile

from tests._helpers.multirank import run_on_ranks
from torchtitan_npu.compile import backend
from torchtitan_npu.planner.fake_devices import BelowSubclasses

RUNTIMES = {
    "ours": "RegionBackward",
    "AOTAutograd's": "CompiledFunctionBackward",
    "any size": "CompiledFunctionBackward",
}
LAYOUTS: dict[str, Callable[[Tensor], Tensor]] = {
    "as it was captured": lambda gradient: gradient,
    "turned": lambda gradient: gradient.transpose(1, 2).contiguous().transpose(1, 2),
    "last first": lambda gradient: gradient.movedim(-1, 0).contiguous().movedim(0, -1),
    "a part": lambda gradient: torch.cat((gradient, gradient), dim=-1)[..., gradient.shape[-1] :],
    "expanded": lambda gradient: gradient[:, :1].expand_as(gradient),
    "of one output": lambda gradient: gradient,
}


class Network(nn.Module):
    """What autograd's formulas ask strides for: views and what undoes them, complex numbers, products."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.up, self.down = nn.Linear(8, 16, bias=False), nn.Linear(16, 8)
        self.angles = nn.Buffer(torch.randn(4, 2, dtype=torch.complex64))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        heads = self.up(x).unflatten(-1, (4, 2, 2))
        turned = torch.view_as_real(torch.view_as_complex(heads) * self.angles).flatten(-2)
        y = turned.transpose(1, 2)
        y = (y @ y.mT).softmax(dim=-1) @ y
        return self.down(y.transpose(1, 2).flatten(2)), turned


def region(network: nn.Module, runtime: str) -> Callable[[Tensor], Any]:
    def function(x: Tensor) -> Any:
        # a region that returns its input is left to AOTAutograd's runtime
        return (*network(x), x.detach()) if runtime == "AOTAutograd's" else network(x)

    return torch.compile(function, backend=backend.bypassed, fullgraph=True, dynamic=runtime == "any size")


def backward(call: Callable[[Tensor], Any], network: nn.Module, layout: str) -> tuple[list[Tensor], int, str]:
    """The gradients, how many copies they took, and whose backward pass it was; after another, which may compile."""
    x = torch.randn(2, 6, 8, generator=torch.Generator().manual_seed(1)).requires_grad_()
    for _ in range(2):
        outputs = call(x)[: 1 if layout == "of one output" else 2]
        seed = torch.Generator().manual_seed(2)
        gradients = [LAYOUTS[layout](torch.randn(output.shape, generator=seed)) for output in outputs]
        with profile() as profiled:
            result = torch.autograd.grad(outputs, [x, *network.parameters()], gradients)
    copies = sum(event.name == "aten::copy_" for event in profiled.events() or ())
    return [*result], copies, outputs[0].grad_fn.name()


@pytest.mark.parametrize("runtime", RUNTIMES)
def test_gradients_are_taken_as_they_lie(runtime: str) -> None:
    torch._dynamo.reset()
    network = Network()
    compiled = region(network, runtime)
    for layout in LAYOUTS:
        theirs, copies, _ = backward(network, network, layout)
        ours, made, whose = backward(compiled, network, layout)
        assert whose == RUNTIMES[runtime]
        for one, other in zip(ours, theirs, strict=True):
            assert torch.equal(one, other) and one.stride() == other.stride(), layout
        assert made <= copies, layout


class Turned(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.mT.contiguous() * 2

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient.mT.contiguous() * 2


FORMULAS: dict[str, tuple[Callable[[Tensor], Tensor], Tensor]] = {
    # as captured, the reshape in its formula copies; of this gradient it is a view
    "reshape": (
        lambda x: x.flatten(1).unflatten(1, (6, 8)).transpose(1, 2).contiguous(),
        torch.randn(2, 12, 8)[:, :6].mT,
    ),
    "contiguous": (Turned.apply, torch.randn(2, 6, 8).mT),
    # as captured, one undoes the other; of this gradient the first copies
    "two views": (lambda x: (x * 2).flatten(1).unflatten(1, (6, 8)) * 3, torch.randn(8, 6, 2).permute(2, 1, 0)),
}


@pytest.mark.parametrize("what", FORMULAS)
def test_a_formula_copies_what_it_must_of_these_strides(what: str) -> None:
    torch._dynamo.reset()
    function, gradient = FORMULAS[what]
    x = torch.randn(2, 6, 8, requires_grad=True)
    results = []
    for call in (function, torch.compile(function, backend=backend.bypassed, fullgraph=True)):
        output = call(x)
        with profile() as profiled:
            (result,) = torch.autograd.grad(output, x, gradient)
        results.append((result, sum(event.name == "aten::clone" for event in profiled.events() or ())))
    (theirs, copies), (ours, made) = results
    assert torch.equal(ours, theirs) and ours.stride() == theirs.stride()
    assert made == copies == (what == "two views")


@torch.library.custom_op("strides::walked", mutates_args=())
def walked(x: Tensor) -> Tensor:
    """Doubles what lies behind the first element, as a kernel does that is given an address and a count."""
    return (x.as_strided((x.numel(),), (1,)) * 2).view(x.shape)


walked.register_fake(lambda x: x.new_empty(x.shape))


class Walked(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return walked(x.contiguous())

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return walked(gradient.contiguous())


@pytest.mark.parametrize("of_any_size", [False, True])
def test_what_a_users_kernel_is_given(of_any_size: bool) -> None:
    """Of a gradient as it is captured, its formula's contiguous() is in no graph."""
    torch._dynamo.reset()
    x, gradient = torch.randn(3, 4, requires_grad=True), torch.randn(4, 3).t()
    compiled = torch.compile(
        lambda x: Walked.apply(x) * 1, backend=backend.bypassed, fullgraph=True, dynamic=of_any_size
    )
    assert torch.equal(torch.autograd.grad(compiled(x), x, gradient)[0], 2 * gradient)
    if of_any_size:
        with torch.compiler.set_stance("fail_on_recompile"):
            compiled(torch.randn(5, 6, requires_grad=True))


class Products(BelowSubclasses):
    """The strides that float8's product is given."""

    def __init__(self) -> None:
        super().__init__()
        self.strides: list[tuple[Any, Any]] = []

    def call(self, op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if op is torch.ops.aten._scaled_mm.default:
            self.strides.append((args[0].stride(), args[1].stride()))
        return op(*args, **kwargs)


def test_what_float8s_product_is_given() -> None:
    """Rows on the left, columns on the right. torchao lays out what does not lie so; what does, no graph shows."""
    from torchao.float8 import convert_to_float8_training

    torch._dynamo.reset()
    network = convert_to_float8_training(nn.Sequential(nn.Linear(32, 64, bias=False))).bfloat16()
    compiled = torch.compile(network, backend=backend.bypassed, fullgraph=True)
    x = torch.randn(1, 16, 32, dtype=torch.bfloat16, requires_grad=True)
    gradient = torch.randn(1, 64, 16, dtype=torch.bfloat16).mT
    results = []
    for call in (network, compiled):
        output = call(x)
        with Products() as products:
            results.append(torch.autograd.grad(output, [x, *network.parameters()], gradient))
        assert len(products.strides) == 2 and all(left[1] == right[0] == 1 for left, right in products.strides)
    assert all(torch.equal(ours, theirs) for theirs, ours in zip(*results, strict=True))


def test_sizes_of_one_lie_anywhere(monkeypatch: pytest.MonkeyPatch) -> None:
    """Views leave as the stride of such a dimension what they find: the graph is run as it was captured."""
    torch._dynamo.reset()
    opened: list[Any] = []
    monkeypatch.setattr(backend, "open_strides", opened.append)
    x = torch.randn(3, 1, 4, requires_grad=True)
    result = torch.compile(lambda x: x * 2, backend=backend.bypassed, fullgraph=True)(x)
    gradient = torch.empty_strided((3, 1, 4), (4, 7, 1)).fill_(3)
    assert torch.equal(torch.autograd.grad(result, x, gradient)[0], torch.full((3, 1, 4), 6.0)) and not opened


class Told(torch.autograd.Function):
    """Its formula reads the gradient by strides of its own."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient.as_strided((3, 4), (4, 1)) * 2


@pytest.mark.parametrize("of_any_size", [False, True])
def test_strides_that_are_in_a_graph(of_any_size: bool) -> None:
    """They are those of a gradient as it was captured, so that is where it has to lie."""
    torch._dynamo.reset()
    x, gradient = torch.randn(3, 4, requires_grad=True), torch.randn(4, 3).t()
    compiled = torch.compile(Told.apply, backend=backend.bypassed, fullgraph=True, dynamic=of_any_size)
    if of_any_size:
        with pytest.raises(Exception, match=r"npu.bypass_codegen must be false: .*as_strided.*size is not known"):
            compiled(x)
        return
    assert torch.equal(torch.autograd.grad(compiled(x), x, gradient)[0], 2 * gradient)


def doubled_dtensor() -> tuple[bool, Any, Any, Any]:
    mesh = init_device_mesh("cpu", (1,))
    x, gradient = (
        DTensor.from_local(tensor, mesh, [Shard(0)]) for tensor in (torch.randn(3, 4), torch.randn(4, 3).t())
    )
    x.requires_grad_()
    compiled = torch.compile(lambda x: x * 2, backend=backend.bypassed, fullgraph=True)
    (result,) = torch.autograd.grad(compiled(x), x, gradient)
    equal = torch.equal(result.to_local(), 2 * gradient.to_local())
    return equal, gradient.stride(), result.stride(), result.to_local().stride()


def test_a_dtensor_lies_as_it_says() -> None:
    """AOTAutograd puts it together with the strides that were captured."""
    assert run_on_ranks(1, doubled_dtensor) == [(True, (1, 3), (4, 1), (4, 1))]


def test_torch_is_left_as_it_was() -> None:
    from torch._functorch._aot_autograd import subclass_utils

    torch._dynamo.reset()
    noted = subclass_utils.maybe_suggest_memory_format
    compiled = torch.compile(lambda x: x * 2, backend=backend.bypassed, fullgraph=True)
    compiled(torch.randn(3, requires_grad=True)).sum().backward()
    assert subclass_utils.maybe_suggest_memory_format is noted
