"""Grouped matrix products on GPUs: PyTorch's kernel where it is faster, else one in Triton. Neither synchronises.

The Triton kernel is persistent: one program per multiprocessor takes tile after tile of the output and finds the tile's
group among the ends, on the device. It reads tiles through tensor descriptors, so that a row may begin anywhere and
elements beyond a tensor are zero. Elements beyond a group are not written (rows) or are masked (summed dimension).
``npu_grouped_matmul`` asserts on the device that ``group_list`` adds up to the rows.
"""

from __future__ import annotations

import logging
from functools import cache
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.nn.functional import grouped_mm
from triton.tools.tensor_descriptor import TensorDescriptor

from torchtitan_npu.gpu_kernels.launch import multiprocessors, power_of_2
from torchtitan_npu.log import log_on_first_rank
from torchtitan_npu.ops.core import gpu
from torchtitan_npu.ops.core.gpu import is_hopper
from torchtitan_npu.ops.grouped_matmul import reference
from torchtitan_npu.ops.mxfp8.reference import OUTPUTS

CONFIG = {"BLOCK_M": 128, "BLOCK_N": 256, "BLOCK_K": 64, "FLATTEN": True, "num_warps": 8, "num_stages": 3}
"""The fastest on an H200."""
SMALL_CONFIG = {"BLOCK_M": 16, "BLOCK_N": 16, "BLOCK_K": 16, "FLATTEN": True, "num_warps": 4, "num_stages": 2}
"""For Triton's interpreter: a small matrix still has several tiles in each direction."""


def npu_grouped_matmul(
    x: list[Tensor], weight: list[Tensor], group_list: Tensor, group_type: int, group_list_type: int, **_: Any
) -> list[Tensor]:
    (tokens,), (matrices,) = x, weight
    if not tokens.numel() or not matrices.numel():  # neither kernel takes an empty matrix
        groups = [] if group_type == 0 else [len(group_list)]
        return [tokens.new_zeros(*groups, tokens.shape[0], matrices.shape[-1])]
    ends, adds_up = ends_of(group_list, group_list_type == 0, tokens.shape[0 if group_type == 0 else 1])
    # an assertion on the device: reading the value would synchronise
    torch.ops.aten._assert_async.msg(adds_up, "npu_grouped_matmul: group_list must add up to the rows of x")
    if prefers_torch(tokens, matrices, group_type):
        return [torch_product(tokens, matrices, ends)]
    return [(rows_product if group_type == 0 else sums_product)(tokens, matrices, ends)]


def npu_grouped_matmul_add_(
    input: Tensor, x: Tensor, weight: Tensor, group_list: Tensor, group_list_type: int, **_: Any
) -> Tensor:
    if x.numel() and weight.numel():
        sums_product(x.t(), weight, group_list.contiguous(), out=input, cumulative=group_list_type == 0)
    return input


def npu_grouped_matmul_mxfp8(
    x: list[Tensor],
    weight: list[Tensor],
    bias: list[Tensor] | None,
    scale: list[Tensor],
    per_token_scale: list[Tensor],
    output_dtype: int,
    **groups: Any,
) -> list[Tensor]:
    """Dequantize the factors and multiply them.

    They are bfloat16 for a bfloat16 output, and float32 for other outputs, which are rounded once.
    """
    groups = {name: groups[name] for name in ("group_list", "group_type", "group_list_type")}
    dtype = OUTPUTS[output_dtype]
    factors = torch.bfloat16 if dtype == torch.bfloat16 else torch.float32
    left, right = reference.dequantized_factors(
        x[0], weight[0], scale[0], per_token_scale=per_token_scale, dtype=factors, **groups
    )
    product = reference.npu_grouped_matmul
    (y,) = gpu.run("npu_grouped_matmul", product, x=[left], weight=[right], bias=None, **groups)
    return [y.to(dtype)]


def npu_grouped_matmul_by_group(x: list[Tensor], weight: list[Tensor], group_type: int, **options: Any) -> list[Tensor]:
    """Multiply the groups one by one, after reading their sizes from the device, and log once that this is slow.

    For what no kernel takes: float32, a bias, and sizes or strides that are not multiples of 16 bytes.
    """
    summed = x[0].shape[0 if group_type == 2 else 1]
    warn_of_synchronisation("npu_grouped_matmul", (summed, weight[0].shape[-1]), x[0].dtype)
    return reference.npu_grouped_matmul(x, weight, group_type=group_type, **options)


def npu_grouped_matmul_add_by_group(input: Tensor, x: Tensor, weight: Tensor, **options: Any) -> Tensor:
    """Add the products one by one, as :func:`npu_grouped_matmul_by_group` does."""
    warn_of_synchronisation("npu_grouped_matmul_add_", (x.shape[1], weight.shape[1]), x.dtype)
    return reference.npu_grouped_matmul_add_(input, x, weight, **options)


@cache
def warn_of_synchronisation(op: str, features: tuple[int, int], dtype: torch.dtype) -> None:
    """Log once that this product loops over the groups on the host, and which products have a GPU kernel."""
    log_on_first_rank(
        f"{op} with {features[0]} and {features[1]} features in {dtype} has no GPU kernel: every call synchronises to "
        "read the group sizes and multiplies the groups one by one. The kernels take contiguous bfloat16 or float16 "
        "without a bias, and sizes that are multiples of 64: see docs/reference/gpu-kernels.md",
        logging.WARNING,
    )


def ends_of(group_list: Tensor, cumulative: bool, length: int) -> tuple[Tensor, Tensor]:
    """Return where each group ends, (E) int32, and whether the last one ends at ``length``, by one small kernel."""
    groups = len(group_list)
    ends = torch.empty(groups, dtype=torch.int32, device=group_list.device)
    adds_up = torch.empty((), dtype=torch.bool, device=group_list.device)
    size = power_of_2(groups)
    _ends[(1,)](group_list.contiguous(), ends, adds_up, groups, length, GROUPS=size, CUMULATIVE=cumulative, num_warps=1)
    return ends, adds_up


def prefers_torch(x: Tensor, weight: Tensor, group_type: int) -> bool:
    """Return whether to use ``torch.nn.functional.grouped_mm``: bfloat16 on Hopper, except for long sums over features.

    For those, the Triton kernel took 1 to 2 % less time on an H200 with equal groups and 7 to 10 % less with unequal
    ones. For sums over rows it took 4 to 31 % more (docs/benchmarks/ops.json, the peers of the grouped products).

    On other GPUs, PyTorch's kernel loops over the groups and synchronises to read their sizes, or does not write the
    gradient of a group without rows (Blackwell, https://github.com/pytorch/pytorch/issues/172439). If a row is not a
    multiple of 16 bytes, PyTorch pads the rows of the result, which contradicts the operator's fake kernel.
    """
    if x.dtype != torch.bfloat16 or not is_hopper(x):
        return False
    long_sums = group_type == 0 and x.shape[1] >= 2048
    return not long_sums and weight.shape[-1] % 8 == 0


def torch_product(x: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
    return grouped_mm(x, weight, offs=ends)


def rows_product(x: Tensor, weight: Tensor, ends: Tensor, config: dict[str, Any] | None = None) -> Tensor:
    """Multiply each group of rows of ``x`` (T, K) by its matrix of ``weight`` (E, K, N) or of a transposed view.

    Returns (T, N).
    """
    config = config or (CONFIG if x.is_cuda else SMALL_CONFIG)
    groups, summed, columns = weight.shape
    out = x.new_empty(x.shape[0], columns)
    transposed = not weight.is_contiguous()
    flat = weight.mT.flatten(0, 1) if transposed else weight.flatten(0, 1)
    blocks = [config["BLOCK_N"], config["BLOCK_K"]] if transposed else [config["BLOCK_K"], config["BLOCK_N"]]
    _rows[(multiprocessors(x.device),)](
        TensorDescriptor.from_tensor(x, [config["BLOCK_M"], config["BLOCK_K"]]),
        TensorDescriptor.from_tensor(flat, blocks),
        *(out, ends, groups, x.shape[0], summed, columns),
        GROUPS=power_of_2(groups),
        TRANSPOSED=transposed,
        **config,
    )
    return out


def sums_product(
    x: Tensor,
    weight: Tensor,
    group_list: Tensor,
    config: dict[str, Any] | None = None,
    *,
    out: Tensor | None = None,
    cumulative: bool = True,
) -> Tensor:
    """Multiply ``x`` (M, T), the transposed view of a contiguous matrix, by ``weight`` (T, N), for each group of T.

    ``group_list`` holds the ends of the groups, or their sizes if not ``cumulative``. Returns (E, M, N), zero for an
    empty group. With a float32 ``out``, adds to it instead.
    """
    config = config or (CONFIG if x.is_cuda else SMALL_CONFIG)
    groups, rows, columns = len(group_list), x.shape[0], weight.shape[1]
    result = x.new_empty(groups, rows, columns) if out is None else out
    x = x.t()
    _sums[(multiprocessors(x.device),)](
        TensorDescriptor.from_tensor(x, [config["BLOCK_K"], config["BLOCK_M"]]),
        TensorDescriptor.from_tensor(weight, [config["BLOCK_K"], config["BLOCK_N"]]),
        *(x, weight, result, group_list, groups, x.shape[0], rows, columns),
        GROUPS=power_of_2(groups),
        CUMULATIVE=cumulative,
        ADD=out is not None,
        **config,
    )
    return result


@triton.jit
def _ends(group_list, ends, adds_up, groups, length, GROUPS: tl.constexpr, CUMULATIVE: tl.constexpr):
    group = tl.arange(0, GROUPS)
    end = tl.load(group_list + group, mask=group < groups, other=0)
    if not CUMULATIVE:
        end = tl.cumsum(end, 0)
    tl.store(ends + group, end.to(tl.int32), mask=group < groups)
    tl.store(adds_up, _of(group, groups - 1, end) == length)


@triton.jit
def _groups(group_list, groups, length, GROUPS: tl.constexpr, CUMULATIVE: tl.constexpr):
    """Return where each group begins and ends, (GROUPS,) int32, at most ``length``. Groups past the last are empty."""
    group = tl.arange(0, GROUPS)
    if CUMULATIVE:
        end = tl.load(group_list + group, mask=group < groups, other=0).to(tl.int32)
        start = tl.load(group_list + group - 1, mask=(group > 0) & (group < groups), other=0).to(tl.int32)
    else:
        size = tl.load(group_list + group, mask=group < groups, other=0).to(tl.int32)
        end = tl.cumsum(size, 0)
        start = end - size
    return tl.minimum(start, length), tl.minimum(end, length)


@triton.jit
def _of(group, here, values):
    """Return the element of ``values`` at the group ``here``."""
    return tl.sum(tl.where(group == here, values, 0), 0)


@triton.jit
def _rows(
    x,
    weight,
    out,
    ends,
    groups,
    length,
    summed,
    columns,
    GROUPS: tl.constexpr,
    TRANSPOSED: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    FLATTEN: tl.constexpr,
):
    group = tl.arange(0, GROUPS)
    start, end = _groups(ends, groups, length, GROUPS, True)
    tiles = (tl.maximum(end - start, 0) + BLOCK_M - 1) // BLOCK_M
    tile_end = tl.cumsum(tiles, 0)
    across = tl.cdiv(columns, BLOCK_N)
    for tile in tl.range(tl.program_id(0), tl.sum(tiles, 0) * across, tl.num_programs(0), flatten=FLATTEN):
        down = tile // across
        here = tl.sum((tile_end <= down).to(tl.int32), 0)
        last = _of(group, here, end)
        row = (_of(group, here, start) + (down - _of(group, here, tile_end - tiles)) * BLOCK_M).to(tl.int32)
        column = (tile % across) * BLOCK_N
        total = tl.full((BLOCK_M, BLOCK_N), 0.0, tl.float32)
        for k in tl.range(0, summed, BLOCK_K):
            a = x.load([row, k])
            if TRANSPOSED:  # noqa: SIM108 (Triton has no conditional expression of two shapes)
                b = weight.load([here * columns + column, k]).T
            else:
                b = weight.load([here * summed + k, column])
            total = tl.dot(a, b, total)
        rows = row + tl.arange(0, BLOCK_M)
        output_columns = column + tl.arange(0, BLOCK_N)
        mask = (rows < last)[:, None] & (output_columns < columns)[None, :]
        pointers = out + rows.to(tl.int64)[:, None] * columns + output_columns[None, :]
        tl.store(pointers, total.to(out.dtype.element_ty), mask=mask)


@triton.jit
def _sums(
    x,
    weight,
    x_pointer,
    weight_pointer,
    out,
    group_list,
    groups,
    length,
    rows,
    columns,
    GROUPS: tl.constexpr,
    CUMULATIVE: tl.constexpr,
    ADD: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    FLATTEN: tl.constexpr,
):
    group = tl.arange(0, GROUPS)
    start, end = _groups(group_list, groups, length, GROUPS, CUMULATIVE)
    down, across = tl.cdiv(rows, BLOCK_M), tl.cdiv(columns, BLOCK_N)
    for tile in tl.range(tl.program_id(0), groups * down * across, tl.num_programs(0), flatten=FLATTEN):
        here = tile // (down * across)
        row = (tile // across % down) * BLOCK_M
        column = (tile % across) * BLOCK_N
        first, last = _of(group, here, start), _of(group, here, end)
        full_blocks = first + tl.maximum(last - first, 0) // BLOCK_K * BLOCK_K
        total = tl.full((BLOCK_M, BLOCK_N), 0.0, tl.float32)
        for k in tl.range(first, full_blocks, BLOCK_K):
            total = tl.dot(x.load([k, row]).T, weight.load([k, column]), total)
        m = row + tl.arange(0, BLOCK_M)
        n = column + tl.arange(0, BLOCK_N)
        if full_blocks < last:  # the last rows of the group, masked against those of the next
            tail = full_blocks + tl.arange(0, BLOCK_K)
            in_group = (tail < last)[:, None]
            tail = tail.to(tl.int64)[:, None]
            a = tl.load(x_pointer + tail * rows + m[None, :], mask=in_group & (m < rows)[None, :], other=0.0)
            b = tl.load(weight_pointer + tail * columns + n[None, :], mask=in_group & (n < columns)[None, :], other=0.0)
            total = tl.dot(a.T, b, total)
        pointers = out + (here.to(tl.int64) * rows + m[:, None]) * columns
        if ADD:
            halves = tl.split(tl.permute(tl.reshape(total, (BLOCK_M, 2, BLOCK_N // 2)), (0, 2, 1)))
            for half in tl.static_range(2):  # two full tiles would spill registers
                n = column + half * (BLOCK_N // 2) + tl.arange(0, BLOCK_N // 2)
                mask = (m < rows)[:, None] & (n < columns)[None, :]
                there = tl.load(pointers + n[None, :], mask=mask, other=0.0)
                tl.store(pointers + n[None, :], halves[half] + there, mask=mask)
        else:
            mask = (m < rows)[:, None] & (n < columns)[None, :]
            tl.store(pointers + n[None, :], total.to(out.dtype.element_ty), mask=mask)
