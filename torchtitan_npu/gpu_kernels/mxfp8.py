"""MXFP8 quantization in Triton, in one pass over the memory: along any dimension, and by groups. Products in torch."""

from __future__ import annotations

import math
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from torchtitan_npu.gpu_kernels.launch import blocks_in, in_strides_of, power_of_2
from torchtitan_npu.ops.mxfp8 import reference

BLOCK = tl.constexpr(32)
COLUMNS = 128
"""Columns of a program that quantizes along another dimension than the last."""


def npu_dynamic_mx_quant(
    input: Tensor, axis: int, dst_type: int, scale_alg: int | None, max_low_bound: float, **_: Any
) -> tuple[Tensor, Tensor]:
    axis %= input.dim()
    x, length = input.contiguous(), input.shape[axis]
    blocks, config = blocks_in(length, 32), _config(dst_type, scale_alg)
    y = torch.empty_like(x, dtype=config.pop("element"))
    shape = [*x.shape, 2]
    shape[axis] = blocks_in(blocks, 2)
    # the second code of a last, single block is 0
    codes = (x.new_zeros if blocks % 2 else x.new_empty)(shape, dtype=torch.uint8)
    outer, inner = math.prod(x.shape[:axis]), math.prod(x.shape[axis + 1 :])
    if not x.numel():
        return in_strides_of(input, y), codes
    if inner == 1:
        _along_rows[(blocks_in(outer * blocks, 32),)](
            x, y, codes, outer * blocks, length, blocks, max_low_bound, **config
        )
    else:
        _along_columns[(outer * blocks, blocks_in(inner, COLUMNS))](
            x, y, codes, length, inner, blocks, max_low_bound, COLUMNS=COLUMNS, **config
        )
    return in_strides_of(input, y), codes


def npu_quant_matmul(
    x1: Tensor, x2: Tensor, scale: Tensor, pertoken_scale: Tensor, bias: Tensor | None, output_dtype: int, **_: Any
) -> Tensor:
    """Dequantize and multiply with torch. The sums are float32, in cuBLAS's order.

    The factors of a bfloat16 product without a bias are bfloat16, which rounds E4M3 below 2^-116 and E5M2 below 2^-102
    (see ``dequantized``). Other factors are float32.
    """
    plain = bias is None and reference.OUTPUTS[output_dtype] == torch.bfloat16
    scales = {"scale": scale, "pertoken_scale": pertoken_scale}
    factors = torch.bfloat16 if plain else torch.float32
    return reference.npu_quant_matmul(x1, x2, **scales, bias=bias, output_dtype=output_dtype, factors=factors)


def npu_grouped_dynamic_mx_quant(
    x: Tensor, group_index: Tensor, dst_type: int, scale_alg: int | None, **_: Any
) -> tuple[Tensor, Tensor]:
    rows, width = x.shape
    groups, config = group_index.shape[0], _config(dst_type, scale_alg)
    y = torch.empty_like(x, dtype=config.pop("element"), memory_format=torch.contiguous_format)
    codes = x.new_empty((rows // 64 + groups, width, 2), dtype=torch.uint8)
    if codes.numel():
        grid = (2 * codes.shape[0], blocks_in(width, COLUMNS))
        config |= {"COLUMNS": COLUMNS, "GROUPS": power_of_2(groups)}
        _by_groups[grid](x.contiguous(), group_index.contiguous(), y, codes, rows, width, groups, **config)
    return in_strides_of(x, y), codes


def _config(dst_type: int, scale_alg: int | None) -> dict[str, Any]:
    element = torch.float8_e5m2 if dst_type in (23, 291) else torch.float8_e4m3fn
    emax, largest = (15, 57344.0) if element == torch.float8_e5m2 else (8, 448.0)
    return {"element": element, "EMAX": emax, "LARGEST": largest, "SCALE_ALG": scale_alg or 0}


@triton.jit
def _quantized(
    values, low_bound, AXIS: tl.constexpr, EMAX: tl.constexpr, LARGEST: tl.constexpr, SCALE_ALG: tl.constexpr
):
    """Return the scaled ``values``, rounded to float8, and the scale codes of the blocks along ``AXIS``."""
    bits = tl.max(values.to(tl.int32, bitcast=True) & 0x7FFFFFFF, AXIS)  # NaN is the largest
    special = bits >= 0x7F800000
    if SCALE_ALG == 0:
        code = tl.maximum((bits >> 23) - EMAX, 0)
        flushed = code == 0
    else:
        largest = tl.where(special, 0, bits).to(tl.float32, bitcast=True)
        flushed = largest == 0.0
        ratio = (tl.maximum(largest, low_bound) * (1.0 / LARGEST)).to(tl.int32, bitcast=True)
        mantissa = ratio & 0x7FFFFF
        above = tl.where((ratio >> 23) > 0, mantissa > 0, mantissa > 0x400000)
        code = tl.where(flushed, 0, (ratio >> 23) + above.to(tl.int32))
    inverse = ((254 - code) << 23).to(tl.float32, bitcast=True)
    inverse = tl.where(flushed | special, 0.0, inverse)
    scaled = values * tl.expand_dims(inverse, AXIS)
    scaled = tl.where(tl.expand_dims(special, AXIS), 0.0, scaled)
    # Round to nearest even here: Triton's interpreter truncates. Adding 1.5 · 2^23 steps of float8 rounds to a step.
    MANTISSA: tl.constexpr = 3 if EMAX == 8 else 2
    SMALLEST: tl.constexpr = 121 if EMAX == 8 else 113  # biased exponent of the smallest normal element
    exponent = tl.maximum((scaled.to(tl.int32, bitcast=True) & 0x7FFFFFFF) >> 23, SMALLEST)
    shift = (((exponent + 23 - MANTISSA) << 23) | 0x400000).to(tl.float32, bitcast=True)
    rounded = (scaled + shift) - shift
    rounded = tl.where(rounded == 0.0, scaled * 0.0, rounded)  # keep the sign of zero
    return tl.minimum(tl.maximum(rounded, -LARGEST), LARGEST), tl.where(special, 255, code).to(tl.uint8)


@triton.jit
def _along_rows(
    x,
    y,
    codes,
    all_blocks,
    length,
    blocks,
    low_bound,
    EMAX: tl.constexpr,
    LARGEST: tl.constexpr,
    SCALE_ALG: tl.constexpr,
):
    index = tl.program_id(0).to(tl.int64) * 32 + tl.arange(0, 32)  # of a block
    row, block = index // blocks, index % blocks
    element = block[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :]
    inside = (index < all_blocks)[:, None] & (element < length)
    offset = row[:, None] * length + element
    values = tl.load(x + offset, mask=inside, other=0.0).to(tl.float32)
    scaled, code = _quantized(values, low_bound, 1, EMAX, LARGEST, SCALE_ALG)
    tl.store(y + offset, scaled.to(y.dtype.element_ty), mask=inside)
    tl.store(codes + row * (blocks + blocks % 2) + block, code, mask=index < all_blocks)


@triton.jit
def _along_columns(
    x,
    y,
    codes,
    length,
    inner,
    blocks,
    low_bound,
    COLUMNS: tl.constexpr,
    EMAX: tl.constexpr,
    LARGEST: tl.constexpr,
    SCALE_ALG: tl.constexpr,
):
    outer, block = (tl.program_id(0) // blocks).to(tl.int64), tl.program_id(0) % blocks
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    element = block * BLOCK + tl.arange(0, BLOCK)
    inside = (element < length)[:, None] & (column < inner)[None, :]
    offset = (outer * length + element)[:, None] * inner + column[None, :]
    values = tl.load(x + offset, mask=inside, other=0.0).to(tl.float32)
    scaled, code = _quantized(values, low_bound, 0, EMAX, LARGEST, SCALE_ALG)
    tl.store(y + offset, scaled.to(y.dtype.element_ty), mask=inside)
    pair = (outer * ((blocks + 1) // 2) + block // 2) * inner + column
    tl.store(codes + pair * 2 + block % 2, code, mask=column < inner)


@triton.jit
def _by_groups(
    x,
    ends,
    y,
    codes,
    rows,
    width,
    groups,
    COLUMNS: tl.constexpr,
    GROUPS: tl.constexpr,
    EMAX: tl.constexpr,
    LARGEST: tl.constexpr,
    SCALE_ALG: tl.constexpr,
):
    row = tl.program_id(0)  # of the codes: two of them are a pair
    number = tl.arange(0, GROUPS)
    end = tl.load(ends + number, mask=number < groups, other=0)
    start = tl.load(ends + number - 1, mask=(number > 0) & (number < groups), other=0)
    first = 2 * (start // 64 + number)
    mine = (number < groups) & (first <= row)
    group = tl.sum(mine.to(tl.int32), 0) - 1
    chosen = number == group
    start, end = tl.sum(tl.where(chosen, start, 0), 0), tl.sum(tl.where(chosen, end, 0), 0)
    block = row - tl.sum(tl.where(chosen, first, 0), 0)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    token = start + block * BLOCK + tl.arange(0, BLOCK)
    inside = (token < end)[:, None] & (column < width)[None, :]
    offset = token.to(tl.int64)[:, None] * width + column[None, :]
    values = tl.load(x + offset, mask=inside, other=0.0).to(tl.float32)
    scaled, code = _quantized(values, 0.0, 0, EMAX, LARGEST, SCALE_ALG)
    # rows after the last group are 0
    stored = token < tl.where(group == groups - 1, rows, end)
    tl.store(y + offset, scaled.to(y.dtype.element_ty), mask=stored[:, None] & (column < width)[None, :])
    # between two groups the scale is 1; the second code of a group's last, single block is 0
    used = tl.cdiv(end - start, BLOCK)
    code = tl.where(block < used + used % 2, code, 127).to(tl.uint8)
    pair = (row // 2).to(tl.int64) * width + column
    tl.store(codes + pair * 2 + row % 2, code, mask=column < width)
