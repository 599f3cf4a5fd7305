"""``npu_rms_norm``, its backward and ``npu_add_rms_norm``: against a float64 oracle and ``F.rms_norm``; sharding."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.debug import CommDebugMode

from tests._helpers.error_budget import assert_within, compute_dtype, rounding_budget, unit_roundoff
from tests._helpers.multirank import run_on_ranks

npu_rms_norm = torch.ops.npu.npu_rms_norm
npu_rms_norm_backward = torch.ops.npu.npu_rms_norm_backward
npu_add_rms_norm = torch.ops.npu.npu_add_rms_norm


class Oracle:
    """The formulas in float64, with error budgets for float32 arithmetic.

    Every sum of k terms in any order errs by at most k roundings of the sum of magnitudes, every other operation by
    one; the counts below are first order, rounded up.
    """

    def __init__(self, x: Tensor, gamma: Tensor, epsilon: float, dy: Tensor, compute: torch.dtype = torch.float32):
        tokens, n = tuple(range(x.dim() - gamma.dim())), gamma.numel()
        normalised = tuple(range(x.dim() - gamma.dim(), x.dim()))
        x, gamma, dy = x.double(), gamma.double(), dy.double()
        u = unit_roundoff(compute)

        self.rstd = 1 / (x.pow(2).mean(normalised, keepdim=True) + epsilon).sqrt()
        # n squares and their sum, division by n, epsilon and its sum; the root halves that; root and reciprocal
        self.rstd_budget = self.rstd * (n / 2 + 5) * u
        x_hat = x * self.rstd
        self.y = x_hat * gamma
        self.y_budget = self.y.abs() * (n / 2 + 7) * u

        g = dy * gamma
        magnitude = g.abs() + x_hat.abs() * (g * x_hat).abs().mean(normalised, keepdim=True)
        self.dx = self.rstd * (g - x_hat * (g * x_hat).mean(normalised, keepdim=True))
        # rstd enters three times, the mean has n terms, plus ten other operations
        self.dx_budget = self.rstd * magnitude * (3 * (n / 2 + 5) + n + 10) * u
        per_token = dy * x_hat
        self.dgamma = per_token.sum(tokens) if tokens else per_token
        count = per_token[(..., *(0 for _ in normalised))].numel()
        total = per_token.abs().sum(tokens) if tokens else per_token.abs()
        self.dgamma_budget = total * (n / 2 + 7 + count) * u


LAYOUTS = {
    "contiguous": lambda t: t,
    "transposed": lambda t: t.transpose(0, -1).contiguous().transpose(0, -1),
    "strided": lambda t: torch.stack([t, t], dim=-1)[..., 0],
    "expanded": lambda t: t[:1].expand(t.shape) if t.shape[0] else t,
}


@st.composite
def cases(draw: st.DrawFn) -> tuple[Tensor, Tensor, float, Tensor]:
    """Draw ``(x, gamma, epsilon, dy)``: no, one or several tokens; one or two normalised dimensions; any strides."""
    leading = draw(st.lists(st.integers(0, 4), max_size=3))
    normalised = draw(st.lists(st.integers(1, 9), min_size=1, max_size=2))
    dtype = draw(st.sampled_from([torch.float16, torch.bfloat16, torch.float32, torch.float64]))
    scale = draw(st.sampled_from([0.05, 1.0, 20.0]))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**32 - 1)))

    def make(shape: list[int], scale: float) -> Tensor:
        values = torch.randn(shape, generator=generator, dtype=torch.float64) * scale
        return LAYOUTS[draw(st.sampled_from(sorted(LAYOUTS)))](values.to(dtype))

    epsilon = draw(st.sampled_from([1e-6, 1e-5, 1e-2]))
    return make([*leading, *normalised], scale), make(normalised, 1.0), epsilon, make([*leading, *normalised], 1.0)


@settings(max_examples=150, deadline=None)
@given(cases())
def test_agrees_with_the_oracle(case: tuple[Tensor, Tensor, float, Tensor]) -> None:
    x, gamma, epsilon, dy = case
    compute = compute_dtype(x.dtype)
    oracle = Oracle(x, gamma, epsilon, dy, compute)
    x, gamma = x.detach().requires_grad_(), gamma.detach().requires_grad_()

    y, rstd = npu_rms_norm(x, gamma, epsilon)
    assert (y.dtype, rstd.dtype) == (x.dtype, compute)
    assert_within("y", y, oracle.y, oracle.y_budget + rounding_budget(oracle.y, y.dtype))
    assert_within("rstd", rstd, oracle.rstd, oracle.rstd_budget)

    y.backward(dy)
    assert_within("dx", x.grad, oracle.dx, oracle.dx_budget + rounding_budget(oracle.dx, x.dtype))
    # autograd casts the gradient to gamma's dtype
    budget = oracle.dgamma_budget + rounding_budget(oracle.dgamma, gamma.dtype)
    assert_within("dgamma", gamma.grad, oracle.dgamma, budget)
    dgamma = npu_rms_norm_backward(dy, x.detach(), gamma.detach(), rstd)[1]
    assert dgamma.dtype == compute
    assert_within("dgamma", dgamma, oracle.dgamma, oracle.dgamma_budget)


def example(dtype: torch.dtype = torch.float32, shape: tuple[int, ...] = (2, 16, 64)) -> tuple[Tensor, Tensor, Tensor]:
    """Return ``(x, gamma, dy)``, of which x and gamma require gradients."""
    torch.manual_seed(0)
    x, dy = torch.randn(shape, dtype=dtype), torch.randn(shape, dtype=dtype)
    return x.requires_grad_(), torch.randn(shape[-1], dtype=dtype).requires_grad_(), dy


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32], ids=str)
def test_agrees_with_torch(dtype: torch.dtype) -> None:
    """``F.rms_norm`` rounds within the same budget, so the two differ by at most twice the budget."""
    x, gamma, dy = example(dtype)
    oracle = Oracle(x.detach(), gamma.detach(), 1e-5, dy)
    found = npu_rms_norm(x, gamma, 1e-5)[0]
    expected = F.rms_norm(x, (64,), gamma, 1e-5)
    assert_within("y", found, expected.double(), 2 * (oracle.y_budget + rounding_budget(oracle.y, dtype)))
    (dx, dgamma), (expected_dx, expected_dgamma) = (torch.autograd.grad(y, (x, gamma), dy) for y in (found, expected))
    # in half precision torch's backward rounds intermediate results, so only float32 has this budget
    if dtype == torch.float32:
        assert_within("dx", dx, expected_dx.double(), 2 * oracle.dx_budget)
        assert_within("dgamma", dgamma, expected_dgamma.double(), 2 * oracle.dgamma_budget)
        torch.testing.assert_close(found, expected, rtol=1e-6, atol=0)
    assert (dx.dtype, dgamma.dtype) == (expected_dx.dtype, expected_dgamma.dtype)


def test_default_epsilon_is_the_schema_s() -> None:
    x, gamma = torch.full((1, 4), 1e-4), torch.ones(4)
    assert torch.equal(npu_rms_norm(x, gamma)[0], npu_rms_norm(x, gamma, 1e-6)[0])


def test_gradients_stop_where_torch_npu_has_none() -> None:
    x, gamma, dy = example()
    y, rstd = npu_rms_norm(x, gamma)
    assert y.requires_grad and not rstd.requires_grad
    dx, _ = torch.ops.npu.npu_rms_norm_backward(dy, x, gamma, rstd)
    with pytest.warns(UserWarning, match="npu_rms_norm_backward"):  # torch warns about an operator without autograd
        dx.sum().backward()
    assert x.grad is None and gamma.grad is None


Result = tuple[Tensor, Tensor, Tensor, tuple[Placement, ...], tuple[Placement, ...], int]


def distributed(mesh_shape: tuple[int, ...], placements: list[Placement], shape: tuple[int, ...]) -> Result:
    """Return full y, dx and dgamma, the placements of y and dgamma, and the forward's collectives, from one rank."""
    mesh = init_device_mesh("cpu", mesh_shape)
    x, gamma, dy = (tensor.detach() for tensor in example(shape=shape))
    local_dy = distribute_tensor(dy, mesh, [Shard(1) if p.is_shard(1) else Replicate() for p in placements])
    if Partial() in placements:  # every rank holds an equal part of the sum
        dx = DTensor.from_local(x / 2, mesh, placements).requires_grad_()
    else:
        dx = distribute_tensor(x, mesh, placements).requires_grad_()
    dgamma = distribute_tensor(gamma, mesh, [Replicate() for _ in mesh_shape]).requires_grad_()
    with CommDebugMode() as comm:
        y, rstd = npu_rms_norm(dx, dgamma, 1e-5)
    y.backward(local_dy)
    assert rstd.full_tensor().shape == (*shape[:-1], 1)
    grads = dx.grad.full_tensor(), dgamma.grad.full_tensor()
    return y.full_tensor().detach(), *grads, y.placements, dgamma.grad.placements, comm.get_total_counts()


@pytest.mark.parametrize(
    ("mesh_shape", "placements", "shape", "collectives"),
    [
        ((2,), [Shard(1)], (1, 5, 8), 0),  # shards of different sizes
        ((2,), [Shard(2)], (2, 3, 4, 8), 0),  # heads, as in qwen3's q_norm
        ((2,), [Replicate()], (2, 16, 64), 0),
        ((2,), [Shard(2)], (2, 16, 64), 1),  # the normalised dimension is gathered
        ((2,), [Partial()], (2, 16, 64), 1),
        ((2, 1), [Shard(0), Shard(1)], (2, 16, 64), 0),
    ],
    ids=str,
)
def test_sharded_equals_unsharded(
    mesh_shape: tuple[int, ...], placements: list[Placement], shape: tuple[int, ...], collectives: int
) -> None:
    x, gamma, dy = example(shape=shape)
    oracle = Oracle(x.detach(), gamma.detach(), 1e-5, dy)
    for y, dx, dgamma, y_placements, dgamma_placements, count in run_on_ranks(
        2, distributed, mesh_shape, placements, shape
    ):
        assert_within("y", y, oracle.y, oracle.y_budget)
        assert_within("dx", dx, oracle.dx, oracle.dx_budget)
        assert_within("dgamma", dgamma, oracle.dgamma, oracle.dgamma_budget)
        assert count == collectives
        if not collectives:
            assert y_placements == tuple(placements)
            assert dgamma_placements == tuple(Partial() if p.is_shard() else Replicate() for p in placements)


def bad_gamma_on_a_rank() -> str:
    mesh = init_device_mesh("cpu", (2,))
    x, gamma = torch.ones(2, 4, 8), torch.ones(7)
    with pytest.raises(RuntimeError) as error:
        npu_rms_norm(distribute_tensor(x, mesh, [Shard(1)]), distribute_tensor(gamma, mesh, [Replicate()]))
    return str(error.value)


def test_sharded_names_the_bad_argument() -> None:
    for message in run_on_ranks(2, bad_gamma_on_a_rank):
        assert "gamma must have the trailing shape of input (2, 4, 8), not (7,)" in message


# npu_add_rms_norm: without a gradient, as in torch_npu


@settings(max_examples=100, deadline=None)
@given(cases())
def test_add_agrees_with_the_oracle(case: tuple[Tensor, Tensor, float, Tensor]) -> None:
    """The sum is rounded once, and the rounded sum is normalised."""
    x1, gamma, epsilon, x2 = case
    y, rstd, x = npu_add_rms_norm(x1, x2, gamma, epsilon)
    assert (x.dtype, y.dtype) == (x1.dtype, x1.dtype)
    total = x1.double() + x2.double()
    assert_within("x", x, total, rounding_budget(total, x.dtype))
    compute = compute_dtype(x.dtype)
    oracle = Oracle(x, gamma, epsilon, x, compute)
    assert_within("y", y, oracle.y, oracle.y_budget + rounding_budget(oracle.y, y.dtype))
    assert_within("rstd", rstd, oracle.rstd, oracle.rstd_budget)
    assert torch.equal(x, x1 + x2)


def add_example() -> tuple[Tensor, Tensor, Tensor]:
    torch.manual_seed(0)
    return torch.randn(2, 5, 8), torch.randn(2, 5, 8), torch.randn(8)


@pytest.mark.parametrize("output", range(3))
@pytest.mark.parametrize("needs_gradient", range(3))
def test_add_raises_in_backward(output: int, needs_gradient: int) -> None:
    """As in torch_npu, every output requires a gradient if an input does, and the backward raises."""
    tensors = add_example()
    tensors[needs_gradient].requires_grad_()
    result = npu_add_rms_norm(*tensors)[output]
    assert result.requires_grad
    with pytest.raises(RuntimeError, match="derivative for npu::npu_add_rms_norm is not implemented"):
        result.sum().backward()
    with torch.no_grad():
        assert not npu_add_rms_norm(*tensors)[output].requires_grad
