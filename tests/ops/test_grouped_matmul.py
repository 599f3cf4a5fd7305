"""``npu_grouped_matmul``, ``npu_grouped_matmul_add_`` and the function with gradients, against a loop in float64."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, distribute_tensor
from torch.utils._python_dispatch import TorchDispatchMode

from tests._helpers.error_budget import assert_within, compute_dtype, rounding_budget, unit_roundoff
from tests._helpers.multirank import run_on_ranks
from torchtitan_npu.errors import UsageError
from torchtitan_npu.ops import OPS
from torchtitan_npu.ops.core.arguments import by_name
from torchtitan_npu.ops.grouped_matmul.op import grouped_matmul

npu_grouped_matmul = torch.ops.npu.npu_grouped_matmul
npu_grouped_matmul_add_ = torch.ops.npu.npu_grouped_matmul_add_


def by_rows(x: Tensor, weight: Tensor, counts: list[int], bias: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Return the product of each group in float64, and its error budget.

    A sum of K products has an error of at most K roundings of the sum of their magnitudes; the bias adds one more.
    """
    u, y, budget, row = unit_roundoff(compute_dtype(x.dtype)), [], [], 0
    for group, count in enumerate(counts):
        for _ in range(count):
            terms = x[row].double()[:, None] * weight[group].double()
            shift = torch.zeros(()) if bias is None else bias[group].double()
            y.append(terms.sum(0) + shift)
            budget.append((terms.abs().sum(0) * (len(terms) + 1) + shift.abs()) * u)
            row += 1
    shape = (0, weight.shape[2])
    return (torch.stack(y), torch.stack(budget)) if y else (torch.empty(shape).double(), torch.empty(shape).double())


def by_summed_dimension(x: Tensor, dy: Tensor, counts: list[int]) -> tuple[Tensor, Tensor]:
    """Return ``x^T dy`` of each group in float64, and its error budget."""
    u, y, budget, row = unit_roundoff(compute_dtype(x.dtype)), [], [], 0
    for count in counts:
        terms = x[row : row + count].double()[:, :, None] * dy[row : row + count].double()[:, None, :]
        y.append(terms.sum(0))
        budget.append(terms.abs().sum(0) * (count + 1) * u)
        row += count
    return torch.stack(y), torch.stack(budget)


LAYOUTS = {
    "contiguous": lambda t: t,
    "transposed": lambda t: t.mT.contiguous().mT,
    "strided": lambda t: torch.stack([t, t], dim=-1)[..., 0],
}
Problem = tuple[Tensor, Tensor, Tensor, list[int]]


def problem(
    counts: list[int], k: int, n: int, dtype: torch.dtype, layout: str = "contiguous", seed: int = 0
) -> Problem:
    """Return ``(x, weight, dy, counts)``."""
    generator = torch.Generator().manual_seed(seed)

    def make(*shape: int) -> Tensor:
        return LAYOUTS[layout](torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype))

    return make(sum(counts), k), make(len(counts), k, n), make(sum(counts), n), counts


problems = st.builds(
    problem,
    st.lists(st.sampled_from([0, 0, 1, 2, 5]), min_size=1, max_size=5),
    st.integers(1, 7),
    st.integers(1, 7),
    st.sampled_from([torch.float16, torch.bfloat16, torch.float32, torch.float64]),
    st.sampled_from(sorted(LAYOUTS)),
    st.integers(0, 2**32 - 1),
)
UGLY = [[0, 0, 0], [1], [0, 7, 0, 0], [3]]


def group_list(counts: list[int], group_list_type: int) -> Tensor:
    sizes = torch.tensor(counts, dtype=torch.int64)
    return sizes if group_list_type == 1 else sizes.cumsum(0)


@settings(max_examples=60, deadline=None)
@given(problems, st.sampled_from([0, 1]), st.sampled_from([2, 3]), st.booleans())
def test_agrees_with_the_oracle(case: Problem, group_list_type: int, split_item: int, with_bias: bool) -> None:
    x, weight, dy, counts = case
    keywords: dict[str, Any] = {"group_list": group_list(counts, group_list_type), "group_list_type": group_list_type}
    keywords["split_item"] = split_item

    bias = torch.randn(len(counts), weight.shape[2], dtype=torch.float64)
    bias = bias.to(torch.float32 if x.dtype == torch.bfloat16 else x.dtype)
    (y,) = npu_grouped_matmul([x], [weight], group_type=0, bias=[bias] if with_bias else None, **keywords)
    oracle, budget = by_rows(x, weight, counts, bias if with_bias else None)
    assert y.dtype == x.dtype
    assert_within("rows", y, oracle, budget + rounding_budget(oracle, y.dtype))

    (y,) = npu_grouped_matmul([x.t()], [dy], group_type=2, **keywords)
    oracle, budget = by_summed_dimension(x, dy, counts)
    assert y.dtype == x.dtype
    assert_within("summed dimension", y, oracle, budget + rounding_budget(oracle, y.dtype))


@settings(max_examples=40, deadline=None)
@given(problems, st.sampled_from([0, 1]), st.integers(0, 2))
def test_accumulates_in_place(case: Problem, group_list_type: int, beyond: int) -> None:
    """Rows beyond the last group are ignored."""
    x, _, dy, counts = case
    oracle, budget = by_summed_dimension(x, dy, counts)
    start = torch.randn(oracle.shape, dtype=compute_dtype(x.dtype), generator=torch.Generator().manual_seed(0))
    x, dy = (torch.cat([rows, rows.new_full((beyond, rows.shape[1]), torch.inf)]) for rows in (x, dy))
    total = start.clone()
    result = npu_grouped_matmul_add_(total, x, dy, group_list(counts, group_list_type), group_list_type=group_list_type)
    assert result is total
    oracle += start.double()
    # the oracle's sum rounds too
    budget = budget + rounding_budget(oracle, total.dtype) + rounding_budget(oracle, oracle.dtype)
    assert_within("sum", total, oracle, budget)


def test_without_groups() -> None:
    generator = torch.Generator().manual_seed(0)
    shapes = [((3, 4), (4, 2)), ((2, 5, 6), (6, 7))]
    x, weight = ([torch.randn(pair[i], generator=generator) for pair in shapes] for i in range(2))
    bias = [torch.randn(w.shape[1], generator=generator) for w in weight]
    outputs = npu_grouped_matmul(x, weight, bias=bias, group_type=-1)
    for y, x_i, w, b in zip(outputs, x, weight, bias, strict=True):
        oracle, budget = by_rows(x_i.flatten(0, -2), w[None], [x_i[..., 0].numel()], b[None])
        assert y.shape == (*x_i.shape[:-1], w.shape[1])
        assert_within("y", y.flatten(0, -2), oracle, budget)


@settings(max_examples=40, deadline=None)
@given(problems)
@example(problem(UGLY[0], 3, 4, torch.float32))
@example(problem(UGLY[1], 3, 4, torch.bfloat16))
@example(problem(UGLY[2], 3, 4, torch.float32, "transposed"))
@example(problem(UGLY[3], 1, 1, torch.float32, "strided"))
def test_the_function_s_gradients_agree_with_the_oracle(case: Problem) -> None:
    x, weight, dy, counts = case
    x, weight = x.detach().requires_grad_(), weight.detach().requires_grad_()
    y = grouped_matmul(x, weight, torch.tensor(counts))
    y.backward(dy)
    for name, actual, (oracle, budget) in (
        ("y", y, by_rows(x.detach(), weight.detach(), counts)),
        ("dx", x.grad, by_rows(dy, weight.detach().mT, counts)),
        ("dweight", weight.grad, by_summed_dimension(x.detach(), dy, counts)),
    ):
        assert actual is not None and actual.dtype == x.dtype
        assert_within(name, actual, oracle, budget + rounding_budget(oracle, actual.dtype))
    for count, grad in zip(counts, weight.grad, strict=True):
        assert count or not grad.any()


@pytest.mark.parametrize("transposed", [False, True])
def test_the_weight_s_gradient_has_its_strides(transposed: bool) -> None:
    """Autograd would copy a gradient with other strides."""
    x, weight, dy, counts = problem([2, 0, 3], 3, 2, torch.float32)
    weight = (weight.mT.contiguous().mT if transposed else weight).requires_grad_()
    (gradient,) = torch.autograd.grad(grouped_matmul(x, weight, torch.tensor(counts)), weight, dy)
    assert gradient.stride() == weight.stride()


def test_the_function_computes_only_the_required_gradients() -> None:
    x, weight, dy, counts = problem([2, 3], 3, 4, torch.float32)
    for leaf, group_types in ((x, [0, 0]), (weight, [0, 2])):
        leaf.requires_grad_()
        with torch.profiler.profile(record_shapes=True) as profile:
            grouped_matmul(x, weight, torch.tensor(counts)).backward(dy)
        assert len([e for e in profile.events() if e.name == "npu::npu_grouped_matmul"]) == len(group_types)
        assert leaf.grad is not None
        leaf.requires_grad_(False)
    assert not grouped_matmul(x, weight, torch.tensor(counts)).requires_grad


@pytest.mark.parametrize("counts", [[2, 3], [5], [0, 0]], ids=str)
@pytest.mark.parametrize("layout", sorted(LAYOUTS))
def test_the_function_stays_within_the_limits(counts: list[int], layout: str) -> None:
    """Strides and group lists are within the limits for inputs of any strides, such as zero strides."""
    refused: list[str] = []
    op = OPS["npu_grouped_matmul"]

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if func is op.overload():
                refused.extend(op.limit_errors(**by_name(func, args, kwargs or {})))
            return func(*args, **(kwargs or {}))

    x, weight, _, _ = problem(counts, 3, 4, torch.bfloat16, layout)
    x, weight = x.requires_grad_(), weight.requires_grad_()
    with Watch():
        grouped_matmul(x, weight, torch.tensor(counts)).sum().backward()
    assert refused == []


def test_the_function_has_no_second_derivative() -> None:
    """The backward calls operators without autograd: an error, not a silently missing gradient."""
    x, weight, _, counts = problem([2, 3], 3, 4, torch.float64)
    y = grouped_matmul(x.requires_grad_(), weight.requires_grad_(), torch.tensor(counts))
    (dx,) = torch.autograd.grad(y.square().sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        dx.sum().backward()


def test_the_function_compiles_fullgraph() -> None:
    x, weight, dy, counts = problem([2, 0, 4], 3, 5, torch.float32)
    inputs = x.requires_grad_(), weight.requires_grad_()

    def layer(x: Tensor, weight: Tensor, counts: Tensor) -> Tensor:
        return grouped_matmul(x * 2, weight, counts).sin()

    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager", dynamic=True)
    for sizes in (counts, [1, 1, 4]):
        plain, traced = (f(*inputs, torch.tensor(sizes)) for f in (layer, compiled))
        assert torch.equal(plain, traced)
        for a, b in zip(*(torch.autograd.grad(y, inputs, dy) for y in (plain, traced)), strict=True):
            assert torch.equal(a, b)


def test_gradients_stop_where_torch_npu_has_none() -> None:
    x, weight, _, counts = problem([2, 3], 3, 4, torch.float32)
    x.requires_grad_()
    keywords = {"group_list": torch.tensor(counts), "group_list_type": 1, "group_type": 0, "split_item": 3}
    (y,) = npu_grouped_matmul([x], [weight], **keywords)
    with pytest.warns(UserWarning, match="npu_grouped_matmul"):  # torch warns about an operator without autograd
        y.sum().backward()
    assert x.grad is None


def summed_dimension_on_a_rank() -> str:
    mesh = init_device_mesh("cpu", (2,))
    x, dy, groups = (
        distribute_tensor(t, mesh, [Replicate()]) for t in (torch.ones(3, 6), torch.ones(6, 4), torch.tensor([6]))
    )
    with pytest.raises(UsageError) as error:
        npu_grouped_matmul([x], [dy], group_list=groups, group_type=2, split_item=3)
    return str(error.value)


def test_group_type_2_is_not_sharded_as_in_torch_npu() -> None:
    for message in run_on_ranks(2, summed_dimension_on_a_rank):
        assert message == "npu_grouped_matmul: torch_npu shards no DTensor with group_type 2; call it on local tensors"
