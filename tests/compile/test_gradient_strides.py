"""Backward graphs for gradients of any strides: bit-identical to eager mode, with no more copies."""

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
from torchtitan_npu.torch_internals.dispatch import TorchDispatchMode

RUNTIMES = {
    "ours": "RegionBackward",
    "AOTAutograd's": "CompiledFunctionBackward",
    "dynamic": "CompiledFunctionBackward",
}
LAYOUTS: dict[str, Callable[[Tensor], Tensor]] = {
    "as traced": lambda gradient: gradient,
    "transposed": lambda gradient: gradient.transpose(1, 2).contiguous().transpose(1, 2),
    "last dimension first": lambda gradient: gradient.movedim(-1, 0).contiguous().movedim(0, -1),
    "slice": lambda gradient: torch.cat((gradient, gradient), dim=-1)[..., gradient.shape[-1] :],
    "expanded": lambda gradient: gradient[:, :1].expand_as(gradient),
    "for one of two outputs": lambda gradient: gradient,
}


class Network(nn.Module):
    """Operators whose gradient formulas depend on strides: views and their inverses, complex numbers, matmuls."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.up, self.down = nn.Linear(8, 16, bias=False), nn.Linear(16, 8)
        self.angles = nn.Buffer(torch.randn(4, 2, dtype=torch.complex64))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        heads = self.up(x).unflatten(-1, (4, 2, 2))
        rotated = torch.view_as_real(torch.view_as_complex(heads) * self.angles).flatten(-2)
        y = rotated.transpose(1, 2)
        y = (y @ y.mT).softmax(dim=-1) @ y
        return self.down(y.transpose(1, 2).flatten(2)), rotated


def region(network: nn.Module, runtime: str) -> Callable[[Tensor], Any]:
    def function(x: Tensor) -> Any:
        # a region that returns an alias of its input needs AOTAutograd's runtime
        return (*network(x), x.detach()) if runtime == "AOTAutograd's" else network(x)

    return torch.compile(function, backend=backend.bypass_codegen, fullgraph=True, dynamic=runtime == "dynamic")


def backward(call: Callable[[Tensor], Any], network: nn.Module, layout: str) -> tuple[list[Tensor], int, str]:
    """Return the gradients of a second backward pass, its number of copies, and the name of its autograd node."""
    x = torch.randn(2, 6, 8, generator=torch.Generator().manual_seed(1)).requires_grad_()
    for _ in range(2):
        outputs = call(x)[: 1 if layout == "for one of two outputs" else 2]
        seed = torch.Generator().manual_seed(2)
        gradients = [LAYOUTS[layout](torch.randn(output.shape, generator=seed)) for output in outputs]
        with profile() as profiled:
            result = torch.autograd.grad(outputs, [x, *network.parameters()], gradients)
    copies = sum(event.name == "aten::copy_" for event in profiled.events() or ())
    return [*result], copies, outputs[0].grad_fn.name()


@pytest.mark.parametrize("runtime", RUNTIMES)
def test_gradients_are_not_copied_for_their_strides(runtime: str) -> None:
    torch.compiler.reset()
    network = Network()
    compiled = region(network, runtime)
    for layout in LAYOUTS:
        theirs, eager_copies, _ = backward(network, network, layout)
        ours, copies, node = backward(compiled, network, layout)
        assert node == RUNTIMES[runtime]
        for one, other in zip(ours, theirs, strict=True):
            assert torch.equal(one, other) and one.stride() == other.stride(), layout
        assert copies <= eager_copies, layout


class Transpose(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.mT.contiguous() * 2

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient.mT.contiguous() * 2


FORMULAS: dict[str, tuple[Callable[[Tensor], Tensor], Tensor]] = {
    # the reshape in the formula copies in tracing; for this gradient it is a view
    "reshape": (
        lambda x: x.flatten(1).unflatten(1, (6, 8)).transpose(1, 2).contiguous(),
        torch.randn(2, 12, 8)[:, :6].mT,
    ),
    "contiguous": (Transpose.apply, torch.randn(2, 6, 8).mT),
    # the two views cancel out in tracing; for this gradient the first copies
    "two views": (lambda x: (x * 2).flatten(1).unflatten(1, (6, 8)) * 3, torch.randn(8, 6, 2).permute(2, 1, 0)),
}


@pytest.mark.parametrize("what", FORMULAS)
def test_a_formula_copies_as_often_as_in_eager_mode(what: str) -> None:
    torch.compiler.reset()
    function, gradient = FORMULAS[what]
    x = torch.randn(2, 6, 8, requires_grad=True)
    results = []
    for call in (function, torch.compile(function, backend=backend.bypass_codegen, fullgraph=True)):
        output = call(x)
        with profile() as profiled:
            (result,) = torch.autograd.grad(output, x, gradient)
        results.append((result, sum(event.name == "aten::clone" for event in profiled.events() or ())))
    (theirs, eager_copies), (ours, copies) = results
    assert torch.equal(ours, theirs) and ours.stride() == theirs.stride()
    assert copies == eager_copies == (what == "two views")


@torch.library.custom_op("strides::double_memory", mutates_args=())
def double_memory(x: Tensor) -> Tensor:
    """Double the first ``numel`` elements in memory, as a kernel does that takes a pointer and a count."""
    return (x.as_strided((x.numel(),), (1,)) * 2).view(x.shape)


double_memory.register_fake(lambda x: x.new_empty(x.shape))


class DoubleMemory(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return double_memory(x.contiguous())

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return double_memory(gradient.contiguous())


@pytest.mark.parametrize("dynamic", [False, True])
def test_a_users_operator_gets_a_contiguous_gradient(dynamic: bool) -> None:
    """The traced graph does not contain the formula's ``contiguous()``, which did nothing in tracing."""
    torch.compiler.reset()
    x, gradient = torch.randn(3, 4, requires_grad=True), torch.randn(4, 3).t()
    compiled = torch.compile(
        lambda x: DoubleMemory.apply(x) * 1, backend=backend.bypass_codegen, fullgraph=True, dynamic=dynamic
    )
    assert torch.equal(torch.autograd.grad(compiled(x), x, gradient)[0], 2 * gradient)
    if dynamic:
        with torch.compiler.set_stance("fail_on_recompile"):
            compiled(torch.randn(5, 6, requires_grad=True))


class ScaledMatmuls(TorchDispatchMode):
    """Records the strides of the arguments of float8 matmuls."""

    def __init__(self) -> None:
        super().__init__()
        self.strides: list[tuple[Any, Any]] = []

    def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(hasattr(cls, "__tensor_flatten__") for cls in types):
            return NotImplemented  # the subclass calls the operator again with its inner tensors
        if op is torch.ops.aten._scaled_mm.default:
            self.strides.append((args[0].stride(), args[1].stride()))
        return op(*args, **(kwargs or {}))


def test_a_float8_matmul_gets_the_strides_it_needs() -> None:
    """Rows on the left, columns on the right. torchao copies only arguments that need it, which tracing hides."""
    from torchao.float8 import convert_to_float8_training

    torch.compiler.reset()
    network = convert_to_float8_training(nn.Sequential(nn.Linear(32, 64, bias=False))).bfloat16()
    compiled = torch.compile(network, backend=backend.bypass_codegen, fullgraph=True)
    x = torch.randn(1, 16, 32, dtype=torch.bfloat16, requires_grad=True)
    gradient = torch.randn(1, 64, 16, dtype=torch.bfloat16).mT
    results = []
    for call in (network, compiled):
        output = call(x)
        with ScaledMatmuls() as matmuls:
            results.append(torch.autograd.grad(output, [x, *network.parameters()], gradient))
        assert len(matmuls.strides) == 2 and all(left[1] == right[0] == 1 for left, right in matmuls.strides)
    assert all(torch.equal(ours, theirs) for theirs, ours in zip(*results, strict=True))


def test_the_stride_of_a_dimension_of_size_1_is_ignored(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.compiler.reset()
    rewritten: list[Any] = []
    monkeypatch.setattr(backend, "make_stride_agnostic", rewritten.append)
    x = torch.randn(3, 1, 4, requires_grad=True)
    result = torch.compile(lambda x: x * 2, backend=backend.bypass_codegen, fullgraph=True)(x)
    gradient = torch.empty_strided((3, 1, 4), (4, 7, 1)).fill_(3)
    assert torch.equal(torch.autograd.grad(result, x, gradient)[0], torch.full((3, 1, 4), 6.0)) and not rewritten


class AsStrided(torch.autograd.Function):
    """Reads the gradient with fixed strides."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient.as_strided((3, 4), (4, 1)) * 2


@pytest.mark.parametrize("dynamic", [False, True])
def test_strides_as_arguments(dynamic: bool) -> None:
    """The gradient is copied into the strides seen in tracing. With dynamic sizes this is an error."""
    torch.compiler.reset()
    x, gradient = torch.randn(3, 4, requires_grad=True), torch.randn(4, 3).t()
    compiled = torch.compile(AsStrided.apply, backend=backend.bypass_codegen, fullgraph=True, dynamic=dynamic)
    if dynamic:
        with pytest.raises(Exception, match=r"npu.bypass_codegen must be false: .*as_strided.*with a dynamic size"):
            compiled(x)
        return
    assert torch.equal(torch.autograd.grad(compiled(x), x, gradient)[0], 2 * gradient)


def doubled_dtensor() -> tuple[bool, Any, Any, Any]:
    mesh = init_device_mesh("cpu", (1,))
    x, gradient = (
        DTensor.from_local(tensor, mesh, [Shard(0)]) for tensor in (torch.randn(3, 4), torch.randn(4, 3).t())
    )
    x.requires_grad_()
    compiled = torch.compile(lambda x: x * 2, backend=backend.bypass_codegen, fullgraph=True)
    (result,) = torch.autograd.grad(compiled(x), x, gradient)
    equal = torch.equal(result.to_local(), 2 * gradient.to_local())
    return equal, gradient.stride(), result.stride(), result.to_local().stride()


def test_a_dtensor_has_the_strides_of_its_local_tensor() -> None:
    assert run_on_ranks(1, doubled_dtensor) == [(True, (1, 3), (4, 1), (4, 1))]
