"""``npu_swiglu`` and its backward: against a float64 oracle and torch."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from tests._helpers.error_budget import assert_within, compute_dtype, rounding_budget, unit_roundoff

npu_swiglu = torch.ops.npu.npu_swiglu
npu_swiglu_backward = torch.ops.npu.npu_swiglu_backward


class Oracle:
    """The formulas in float64, with error budgets for float32 arithmetic.

    A sigmoid is an exponential (two roundings at most), a sum and a division: 4 roundings of its value. It may also
    underflow, hence the smallest normal number.
    """

    def __init__(self, x: Tensor, dim: int, g: Tensor, compute: torch.dtype):
        u, tiny = unit_roundoff(compute), torch.finfo(compute).tiny
        a, b = (half.double() for half in x.tensor_split(2, dim))
        g = g.double()
        s = 1 / (1 + (-a).exp())
        self.y = a * s * b
        self.y_budget = self.y.abs() * 6 * u + (a * b).abs() * tiny  # the sigmoid, two products
        da, db = g * b * s * (1 + a * (1 - s)), g * a * s
        # the sigmoid enters twice; 1 - s and the outer sum cancel; plus six other operations
        da_budget = (g * b * s).abs() * (1 + a.abs()) * 16 * u + (g * b).abs() * (1 + a.abs()) * tiny
        db_budget = db.abs() * 6 * u + (g * a).abs() * tiny
        self.dx, self.dx_budget = torch.cat((da, db), dim), torch.cat((da_budget, db_budget), dim)


@st.composite
def cases(draw: st.DrawFn) -> tuple[Tensor, int, Tensor]:
    """Draw ``(input, dim, grad_output)``: no, one or several elements; halves along any dimension; any strides."""
    halved = draw(st.lists(st.integers(0, 5), min_size=1, max_size=4))
    dim = draw(st.integers(-len(halved), len(halved) - 1))
    whole = list(halved)
    whole[dim] *= 2
    dtype = draw(st.sampled_from([torch.float16, torch.bfloat16, torch.float32, torch.float64]))
    scale = draw(st.sampled_from([0.05, 1.0, 40.0]))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**32 - 1)))

    def make(shape: list[int], scale: float) -> Tensor:
        values = (torch.randn(shape, generator=generator, dtype=torch.float64) * scale).to(dtype)
        return values.transpose(0, -1).contiguous().transpose(0, -1) if draw(st.booleans()) else values

    return make(whole, scale), dim, make(halved, 1.0)


@settings(max_examples=120, deadline=None)
@given(cases())
def test_agrees_with_the_oracle(case: tuple[Tensor, int, Tensor]) -> None:
    x, dim, g = case
    oracle = Oracle(x, dim, g, compute_dtype(x.dtype))
    x = x.detach().requires_grad_()
    y = npu_swiglu(x, dim)
    assert y.dtype == x.dtype and y.is_contiguous()
    assert_within("y", y, oracle.y, oracle.y_budget + rounding_budget(oracle.y, x.dtype))
    y.backward(g)
    assert_within("dx", x.grad, oracle.dx, oracle.dx_budget + rounding_budget(oracle.dx, x.dtype))
    assert torch.equal(x.grad, npu_swiglu_backward(g, x.detach(), dim))


def test_agrees_with_torch() -> None:
    """``silu(a) * b`` in float32 rounds within the same budget."""
    torch.manual_seed(0)
    x, g = torch.randn(5, 16, requires_grad=True), torch.randn(5, 8)
    oracle = Oracle(x.detach(), -1, g, torch.float32)
    a, b = x.chunk(2, -1)
    expected, y = F.silu(a) * b, npu_swiglu(x)
    assert_within("y", y, expected.detach().double(), 2 * oracle.y_budget)
    dx, expected_dx = (torch.autograd.grad(output, x, g)[0] for output in (y, expected))
    assert_within("dx", dx, expected_dx.double(), 2 * oracle.dx_budget)


def test_the_first_half_gates() -> None:
    """A very negative first half closes the gate; a very negative second half passes through."""
    assert npu_swiglu(torch.tensor([-200.0, 3.0])).item() == 0
    assert npu_swiglu(torch.tensor([3.0, -200.0])).item() < -500
