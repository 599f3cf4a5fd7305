"""The wrapped dispatcher functions behave as expected."""

import torch

from torchtitan_npu.torch_internals.dispatch import (
    OpOverload,
    TorchDispatchMode,
    below_autograd,
    cpp_function,
    has_kernel,
    op_schema,
    parse_schema,
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


def test_the_function_of_an_operator() -> None:
    """It takes the operator's arguments, defaults included. A function of Python is returned as it is."""
    function = cpp_function(ADD)
    assert not isinstance(function, OpOverload)
    assert torch.equal(function(torch.ones(2), 3, alpha=2), torch.full((2,), 7.0))
    assert cpp_function(torch.add) is torch.add


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
