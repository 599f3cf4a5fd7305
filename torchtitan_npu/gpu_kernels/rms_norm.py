"""RMS normalisation and its gradient in Triton. A row stays in registers, so each tensor is read or written once.

The gradient of ``gamma`` is a sum over all rows. Each program sums its rows in float32, and a second kernel sums
over the programs. There are no atomics: the order of every sum depends only on the shape and the GPU.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from torchtitan_npu.gpu_kernels.launch import blocks_in, in_strides_of, multiprocessors, power_of_2


def backward_config(width: int, element_size: int) -> dict[str, int]:
    """Return the tile, the warps, the pipeline stages of the loads, and the programs per multiprocessor.

    The rows in flight of a multiprocessor take at most ``BYTES_IN_FLIGHT`` of its memory.
    """
    block = power_of_2(width)
    tile_rows = max(1, 4096 // block)
    warps = min(16, max(4, tile_rows * block // 512))
    programs = max(1, 16 // warps)
    stages = min(4, 1 + BYTES_IN_FLIGHT // (2 * programs * tile_rows * block * element_size))
    return {"ROWS": tile_rows, "BLOCK": block, "STAGES": stages, "num_warps": warps, "per_multiprocessor": programs}


BYTES_IN_FLIGHT = 3 << 16
"""For x and dy together."""
SUM = {"ROWS": 32, "BLOCK": 32, "num_warps": 4}
"""The tile of the kernel that sums over programs."""


def npu_rms_norm(input: Tensor, gamma: Tensor, epsilon: float) -> tuple[Tensor, Tensor]:
    y, rstd, _ = _norm(input, None, gamma, epsilon)
    return y, rstd


def npu_add_rms_norm(x1: Tensor, x2: Tensor, gamma: Tensor, epsilon: float) -> tuple[Tensor, Tensor, Tensor]:
    return _norm(x1, x2, gamma, epsilon)


def _norm(input: Tensor, added: Tensor | None, gamma: Tensor, epsilon: float) -> tuple[Tensor, Tensor, Tensor]:
    x = input.contiguous()
    other = x if added is None else added.contiguous()
    width = gamma.numel()
    rows = x.numel() // width
    y = torch.empty_like(x)
    total = y if added is None else torch.empty_like(x)
    rstd = x.new_empty(*input.shape[: input.dim() - gamma.dim()], *[1] * gamma.dim(), dtype=torch.float32)
    block = power_of_2(width)
    tile_rows = max(1, 2048 // block)
    _forward[(blocks_in(rows, tile_rows),)](
        *(x, other, gamma.contiguous(), y, total, rstd, rows, width, epsilon),
        ADD=added is not None,
        ROWS=tile_rows,
        BLOCK=block,
        num_warps=min(16, max(2, tile_rows * block // 1024)),  # 32 elements per thread
    )
    y = in_strides_of(input, y)
    return y, rstd, y if added is None else in_strides_of(input, total)


def npu_rms_norm_backward(
    dy: Tensor, input: Tensor, gamma: Tensor, rstd: Tensor, **config: int
) -> tuple[Tensor, Tensor]:
    x = input.contiguous()
    width = gamma.numel()
    rows = x.numel() // width
    options: dict[str, Any] = dict(config or backward_config(width, x.element_size()))
    per_multiprocessor = options.pop("per_multiprocessor")
    programs = min(blocks_in(rows, options["ROWS"]), per_multiprocessor * multiprocessors(x.device))
    dx = torch.empty_like(x)
    parts = x.new_empty(programs, width, dtype=torch.float32)
    _backward[(programs,)](dy.contiguous(), x, gamma.contiguous(), rstd.contiguous(), dx, parts, rows, width, **options)
    dgamma = torch.empty_like(gamma, dtype=torch.float32, memory_format=torch.contiguous_format)
    _sum_parts[(blocks_in(width, SUM["BLOCK"]),)](parts, dgamma, programs, width, **SUM)
    return in_strides_of(input, dx), in_strides_of(gamma, dgamma)


@triton.jit
def _forward(
    x, other, gamma, y, total, rstd, rows, width, epsilon, ADD: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr
):
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, BLOCK)
    mask = (row < rows)[:, None] & (column < width)[None, :]
    offset = row.to(tl.int64)[:, None] * width + column[None, :]
    value = tl.load(x + offset, mask=mask, other=0.0, eviction_policy="evict_first")
    if ADD:
        addend = tl.load(other + offset, mask=mask, other=0.0, eviction_policy="evict_first")
        # round the sum as a separate addition would
        value = (value.to(tl.float32) + addend.to(tl.float32)).to(x.dtype.element_ty)
        tl.store(total + offset, value, mask=mask)
    gain = tl.load(gamma + column, mask=column < width, other=0.0, eviction_policy="evict_last").to(tl.float32)
    value = value.to(tl.float32)
    mean = tl.div_rn(tl.sum(value * value, 1), tl.full((ROWS,), 0.0, tl.float32) + width)
    r = tl.rsqrt(mean + epsilon)
    tl.store(rstd + row, r, mask=row < rows)
    tl.store(y + offset, (value * r[:, None] * gain[None, :]).to(y.dtype.element_ty), mask=mask)


@triton.jit
def _backward(
    dy, x, gamma, rstd, dx, parts, rows, width, ROWS: tl.constexpr, BLOCK: tl.constexpr, STAGES: tl.constexpr
):
    program = tl.program_id(0)
    column = tl.arange(0, BLOCK)
    gain = tl.load(gamma + column, mask=column < width, other=0.0).to(tl.float32)
    part = tl.full((ROWS, BLOCK), 0.0, tl.float32)
    for first in tl.range(program * ROWS, rows, tl.num_programs(0) * ROWS, num_stages=STAGES):
        row = first + tl.arange(0, ROWS)
        mask = (row < rows)[:, None] & (column < width)[None, :]
        offset = row.to(tl.int64)[:, None] * width + column[None, :]
        value = tl.load(x + offset, mask=mask, other=0.0).to(tl.float32)
        grad = tl.load(dy + offset, mask=mask, other=0.0).to(tl.float32)
        r = tl.load(rstd + row, mask=row < rows, other=0.0)[:, None]
        x_hat = value * r
        part += grad * x_hat
        g = grad * gain[None, :]
        mean = tl.div_rn(tl.sum(g * x_hat, 1), tl.full((ROWS,), 0.0, tl.float32) + width)
        tl.store(dx + offset, (r * (g - x_hat * mean[:, None])).to(dx.dtype.element_ty), mask=mask)
    offset = program.to(tl.int64) * width + column
    tl.store(parts + offset, tl.sum(part, 0), mask=column < width)


@triton.jit
def _sum_parts(parts, out, count, width, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    """Write the sum over the rows of ``parts`` (count, width) to ``out`` (width)."""
    column = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    total = tl.full((ROWS, BLOCK), 0.0, tl.float32)
    for first in range(0, count, ROWS):
        row = first + tl.arange(0, ROWS)
        mask = (row < count)[:, None] & (column < width)[None, :]
        total += tl.load(parts + row[:, None] * width + column[None, :], mask=mask, other=0.0)
    tl.store(out + column, tl.sum(total, 0), mask=column < width)
