"""The wrapped functions of the dispatcher; fake tensors have no values, and their limits are recognised."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensor

from torchtitan_npu.torch_internals.dispatch import (
    OpOverload,
    TorchDispatchMode,
    below_autograd,
    fake_tensor_limit,
    fake_tensor_mode,
    has_kernel,
    op_schema,
    parse_schema,
    real_tensor_mode,
    without_autocast,
)

ADD = torch.ops.aten.add.Tensor


def test_an_overload_and_its_schema() -> None:
    assert isinstance(ADD, OpOverload)
    schema = op_schema(ADD)
    assert schema.name == "aten::add"
    assert [(argument.name, argument.kwarg_only) for argument in schema.arguments] == [
        ("self", False),
        ("other", False),
        ("alpha", True),
    ]


def test_a_parsed_schema_knows_its_predecessors() -> None:
    one, more = (parse_schema(f"npu::f({arguments}) -> Tensor") for arguments in ("Tensor x", "Tensor x, int dim=-1"))
    assert str(one) == "npu::f(Tensor x) -> Tensor"
    assert more.is_backward_compatible_with(one) and not one.is_backward_compatible_with(more)


def test_a_dispatch_mode_sees_operators() -> None:
    class Names(TorchDispatchMode):
        def __init__(self) -> None:
            super().__init__()
            self.names: list[str] = []

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
            self.names.append(op_schema(func).name)
            return func(*args, **(kwargs or {}))

    with Names() as seen:
        torch.ones(2) + 1
    assert seen.names == ["aten::ones", "aten::add"]


def test_below_autograd_records_nothing() -> None:
    x = torch.ones(2, requires_grad=True)
    with below_autograd():
        assert (x * 2).grad_fn is None
    assert (x * 2).grad_fn is not None


def test_without_autocast_keeps_the_dtype() -> None:
    x = torch.ones(2, 2)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert (x @ x).dtype == torch.bfloat16
        with without_autocast():
            assert (x @ x).dtype == torch.float32


def test_has_kernel() -> None:
    assert has_kernel(ADD, "CPU")
    assert not has_kernel(ADD, "PrivateUse1")


LIBRARY = torch.library.Library("test_fake_tensors", "DEF")
LIBRARY.define("twice(Tensor x) -> Tensor")
LIBRARY.impl("twice", lambda x: 2 * x, "CPU")  # without a fake kernel


def test_tensors_are_fake_in_the_mode_only() -> None:
    real = torch.ones(2)
    with fake_tensor_mode():
        fake = torch.ones(2) + real
        assert isinstance(fake, FakeTensor) and fake.shape == (2,)
        with real_tensor_mode():
            assert (torch.ones(2) + 1).tolist() == [2, 2]
    assert not isinstance(torch.ones(2), FakeTensor)


@pytest.mark.parametrize(
    ("call", "limit"),
    [
        (lambda x: x.sum().item(), "the model reads a tensor's value"),
        (lambda x: x.nonzero(), "the model reads a tensor's value"),
        (lambda x: torch.ops.test_fake_tensors.twice(x), "an operator has no fake kernel"),
    ],
)
def test_limits(call: Callable[[torch.Tensor], object], limit: str) -> None:
    with fake_tensor_mode(), pytest.raises(RuntimeError) as raised:
        call(torch.ones(2))
    assert fake_tensor_limit(raised.value) == limit


def test_other_errors_are_no_limits() -> None:
    assert fake_tensor_limit(RuntimeError("sizes do not match")) == ""
