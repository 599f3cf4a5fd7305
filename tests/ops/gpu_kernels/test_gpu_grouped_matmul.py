"""Grouped matrix products on tensor cores, against a loop in float64; and that what they do not take goes elsewhere."""

from __future__ import annotations

import pytest
import torch
from error_budget import assert_within, rounding_budget
from kernel_checks import dtype_on
from test_grouped_matmul import Problem, by_rows, by_summed_dimension, group_list, problem
from torch import Tensor

from torchtitan_npu.ops import OPS
from torchtitan_npu.ops.triton import grouped_matmul as kernels

COUNTS = [[5, 0, 33, 16, 1], [0, 0, 20], [7], [0, 0, 0], [16, 16]]
"""Groups without rows, of fewer than a tile, of several tiles and of whole tiles; one group; nothing at all."""


def agrees(name: str, y: Tensor, oracle: Tensor, budget: Tensor) -> None:
    assert_within(name, y.cpu(), oracle, budget + rounding_budget(oracle, y.dtype))


@pytest.mark.parametrize("counts", COUNTS, ids=str)
@pytest.mark.parametrize("layout", ["contiguous", "transposed"])
@pytest.mark.parametrize("group_list_type", [0, 1])
def test_agrees_with_the_oracle(device: str, counts: list[int], layout: str, group_list_type: int) -> None:
    dtype = dtype_on(device, torch.bfloat16)
    x, weight, dy, _ = case = problem(counts, 64, 24, dtype)
    groups = {"group_list": group_list(counts, group_list_type).to(device), "group_list_type": group_list_type}
    x, weight, dy = (tensor.to(device) for tensor in (x, weight, dy))
    if layout == "transposed":
        weight = weight.mT.contiguous().mT
    (y,) = OPS["npu_grouped_matmul"].cuda(x=[x], weight=[weight], bias=None, group_type=0, **groups)
    agrees("y", y, *by_rows(case[0], case[1], counts))
    (dx,) = OPS["npu_grouped_matmul"].cuda(x=[dy], weight=[weight.mT], bias=None, group_type=0, **groups)
    agrees("dx", dx, *by_rows(case[2], case[1].mT, counts))
    (dweight,) = OPS["npu_grouped_matmul"].cuda(x=[x.t()], weight=[dy], bias=None, group_type=2, **groups)
    agrees("dweight", dweight, *by_summed_dimension(case[0], case[2], counts))
    (transposed,) = OPS["npu_grouped_matmul"].cuda(x=[dy.t()], weight=[x], bias=None, group_type=2, **groups)
    agrees("dweight, transposed", transposed.mT, *by_summed_dimension(case[0], case[2], counts))
    assert [one.dtype for one in (y, dx, dweight)] == [dtype] * 3


def test_groups_that_do_not_add_up(device: str) -> None:
    """Sizes and ends. The op stops the device then, and with it every test that follows: so the kernel alone."""
    for numbers, cumulative in (([5, 0, 3], False), ([5, 5, 8], True)):
        groups = torch.tensor([[number, -1] for number in numbers], device=device)[:, 0]
        for length in (7, 8, 9):
            ends, adds_up = kernels.ends_of(groups, cumulative, length)
            assert ends.tolist() == [5, 5, 8] and ends.dtype == torch.int32
            assert adds_up.item() is (length == 8)


@pytest.mark.parametrize("counts", COUNTS, ids=str)
@pytest.mark.parametrize("rest", [0, 3])
def test_accumulates_in_place(device: str, counts: list[int], rest: int) -> None:
    """In float32, in place; rows beyond the last group are left out."""
    x, _, dy, _ = problem([*counts, rest], 40, 24, torch.float16)
    before = torch.randn(len(counts), 40, 24)
    after = before.to(device, copy=True)
    result = OPS["npu_grouped_matmul_add_"].cuda(
        input=after,
        x=x.to(device),
        weight=dy.to(device),
        group_list=group_list(counts, 1).to(device),
        group_list_type=1,
    )
    assert result is after
    oracle, budget = by_summed_dimension(x, dy, counts)
    oracle = oracle + before.double()
    assert_within("sum", after.cpu(), oracle, budget + rounding_budget(oracle, torch.float32))


@pytest.mark.parametrize("counts", COUNTS[:3], ids=str)
def test_both_kernels(device: str, counts: list[int]) -> None:
    """Ours and torch's, whichever of them the op chooses here."""
    case: Problem = problem(counts, 64, 24, dtype_on(device, torch.bfloat16))
    x, weight, dy = (tensor.to(device) for tensor in case[:3])
    ends = group_list(counts, 0).int().to(device)
    for product in (kernels.rows_product, kernels.torch_product):
        agrees(product.__name__, product(x, weight, ends), *by_rows(case[0], case[1], counts))
    for product in (kernels.sums_product, kernels.torch_product):
        dweight = product(x.t(), dy, ends)
        agrees(product.__name__, dweight, *by_summed_dimension(case[0], case[2], counts))


@pytest.mark.parametrize(
    "case", [problem([2, 3], 7, 5, torch.float16), problem([2, 3], 64, 8, torch.float32)], ids=["odd sizes", "float32"]
)
def test_what_has_no_tiles_goes_to_the_reference(device: str, case: Problem) -> None:
    x, weight = (tensor.to(device) for tensor in case[:2])
    groups = {"group_list": group_list(case[3], 1).to(device), "group_list_type": 1}
    (y,) = OPS["npu_grouped_matmul"].cuda(x=[x], weight=[weight], bias=None, group_type=0, **groups)
    agrees("y", y, *by_rows(case[0], case[1], case[3]))
