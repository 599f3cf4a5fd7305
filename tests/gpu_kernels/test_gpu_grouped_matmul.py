"""Grouped matrix products in Triton, against a loop in float64, and their fallback to the reference."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from tests._helpers.error_budget import assert_within, rounding_budget
from tests.gpu_kernels.kernel_checks import dtype_on
from tests.ops.test_grouped_matmul import Problem, by_rows, by_summed_dimension, group_list, problem
from torchtitan_npu.gpu_kernels import grouped_matmul as kernels
from torchtitan_npu.gpu_kernels.grouped_matmul import warn_of_synchronisation
from torchtitan_npu.ops import OPS

COUNTS = [[5, 0, 33, 16, 1], [0, 0, 20], [7], [0, 0, 0], [16, 16]]
"""Groups without rows, smaller than a tile, of several tiles, of full tiles only; one group; no rows at all."""


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


def test_groups_that_do_not_add_up_to_the_rows(device: str) -> None:
    """Test the kernel alone: the operator's assertion would end the device context of all tests."""
    for numbers, cumulative in (([5, 0, 3], False), ([5, 5, 8], True)):
        groups = torch.tensor([[number, -1] for number in numbers], device=device)[:, 0]
        for length in (7, 8, 9):
            ends, adds_up = kernels.ends_of(groups, cumulative, length)
            assert ends.tolist() == [5, 5, 8] and ends.dtype == torch.int32
            assert adds_up.item() is (length == 8)


@pytest.mark.parametrize("counts", COUNTS, ids=str)
@pytest.mark.parametrize("unused", [0, 3])
def test_accumulates_in_place(device: str, counts: list[int], unused: int) -> None:
    """Rows beyond the last group are ignored."""
    x, _, dy, _ = problem([*counts, unused], 40, 24, torch.float16)
    before = torch.randn(len(counts), 40, 24)
    after = before.to(device, copy=True)
    groups = {"group_list": group_list(counts, 1).to(device), "group_list_type": 1}
    result = OPS["npu_grouped_matmul_add_"].cuda(input=after, x=x.to(device), weight=dy.to(device), **groups)
    assert result is after
    oracle, budget = by_summed_dimension(x, dy, counts)
    oracle = oracle + before.double()
    assert_within("sum", after.cpu(), oracle, budget + rounding_budget(oracle, torch.float32))


@pytest.mark.parametrize("counts", COUNTS[:3], ids=str)
def test_the_kernel_of_torch(device: str, counts: list[int]) -> None:
    """The operator selects it on Hopper GPUs only."""
    case: Problem = problem(counts, 64, 24, dtype_on(device, torch.bfloat16))
    x, weight, dy = (tensor.to(device) for tensor in case[:3])
    ends = group_list(counts, 0).int().to(device)
    agrees("y", kernels.torch_product(x, weight, ends), *by_rows(case[0], case[1], counts))
    agrees("dweight", kernels.torch_product(x.t(), dy, ends), *by_summed_dimension(case[0], case[2], counts))


def test_rows_that_are_not_multiples_of_16_bytes(device: str) -> None:
    """torch's kernel pads such rows, and the fake kernel does not."""
    case = problem([3, 5], 64, 20, dtype_on(device, torch.bfloat16))
    x, weight = case[0].to(device), case[1].to(device).mT.contiguous().mT
    groups = {"group_list": group_list([3, 5], 1).to(device), "group_list_type": 1}
    (y,) = OPS["npu_grouped_matmul"].cuda(x=[x], weight=[weight], bias=None, group_type=0, **groups)
    assert y.is_contiguous()
    agrees("y", y, *by_rows(case[0], case[1], [3, 5]))


@pytest.mark.parametrize("layout", ["contiguous", "transposed"])
def test_tiles_in_every_direction(device: str, layout: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Several tiles of rows, columns and summed features, for GPU and interpreter tiles, and several per program.

    With a transposed weight, the last tile of summed features is partial.
    """
    monkeypatch.setattr(kernels, "multiprocessors", lambda _: 3)
    config = kernels.CONFIG if device == "cuda" else kernels.SMALL_CONFIG
    rows, columns, summed = (int(config[name]) for name in ("BLOCK_M", "BLOCK_N", "BLOCK_K"))
    counts = [rows + 5, 0, 2 * summed + 3]
    k = 2 * summed + (8 if layout == "transposed" else 0)
    case = problem(counts, k, columns + 8, dtype_on(device, torch.bfloat16))
    x, weight, dy = (tensor.to(device) for tensor in case[:3])
    weight = weight.mT.contiguous().mT if layout == "transposed" else weight
    ends = group_list(counts, 0).int().to(device)
    agrees("y", kernels.rows_product(x, weight, ends), *by_rows(case[0], case[1], counts))
    agrees("dweight", kernels.sums_product(dy.t(), x, ends).mT, *by_summed_dimension(case[0], case[2], counts))
    total = torch.zeros(len(counts), k, columns + 8, device=device)
    kernels.sums_product(x.t(), dy, ends, out=total)
    agrees("sum", total, *by_summed_dimension(case[0], case[2], counts))


@pytest.mark.parametrize(("rows", "k", "n"), [(0, 64, 8), (4, 0, 8), (4, 64, 0)])
def test_nothing_to_multiply(device: str, rows: int, k: int, n: int) -> None:
    """Without rows, summed features or columns, the result has the reference's shape and zeros."""
    x, weight, dy = (tensor.to(device) for tensor in problem([rows, 0], k, n, torch.float16)[:3])
    groups = {"group_list": group_list([rows, 0], 1).to(device), "group_list_type": 1}
    op = OPS["npu_grouped_matmul"]
    for group_type, left, right in ((0, x, weight), (0, x, weight.mT.contiguous().mT), (2, x.t(), dy), (2, dy.t(), x)):
        call = {"x": [left], "weight": [right], "bias": None, "group_type": group_type, **groups}
        (got,), (expected,) = op.cuda(**call), op.reference(**call)
        assert got.dtype == expected.dtype and torch.equal(got, expected)
    before = torch.randn(2, k, n, device=device)
    after = OPS["npu_grouped_matmul_add_"].cuda(input=before.clone(), x=x, weight=dy, **groups)
    assert torch.equal(after, before)


@pytest.mark.parametrize(
    ("case", "sums_too"),
    [
        (problem([2, 3], 7, 5, torch.float16), True),
        (problem([2, 3], 72, 8, torch.float16), False),
        (problem([2, 3], 64, 8, torch.float32), True),
    ],
    ids=["odd sizes", "tiles that hold two groups", "float32"],
)
def test_matrices_without_tiles_use_the_reference(
    device: str, case: Problem, sums_too: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """The reference synchronises, and a warning says so once for any number of rows."""
    warn_of_synchronisation.cache_clear()
    x, weight, dy = (tensor.to(device) for tensor in case[:3])
    groups = {"group_list": group_list(case[3], 1).to(device), "group_list_type": 1}
    (y,) = OPS["npu_grouped_matmul"].cuda(x=[x], weight=[weight], bias=None, group_type=0, **groups)
    agrees("y", y, *by_rows(case[0], case[1], case[3]))
    none = {"group_list": torch.zeros_like(groups["group_list"]), "group_list_type": 1}
    OPS["npu_grouped_matmul"].cuda(x=[x[:0]], weight=[weight], bias=None, group_type=0, **none)
    total = torch.zeros(weight.shape, device=device)
    OPS["npu_grouped_matmul_add_"].cuda(input=total, x=x, weight=dy, **groups)
    agrees("sum", total, *by_summed_dimension(case[0], case[2], case[3]))
    features = f"{weight.shape[1]} and {weight.shape[2]} features in {x.dtype}"
    names = ["npu_grouped_matmul", "npu_grouped_matmul_add_"] if sums_too else ["npu_grouped_matmul"]
    warnings = [message.partition(" has no GPU kernel:")[0] for message in caplog.messages]
    assert warnings == [f"{name} with {features}" for name in names]
