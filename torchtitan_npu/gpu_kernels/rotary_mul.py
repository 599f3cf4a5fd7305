"""Rotary position embedding and its gradients in Triton, for tensors of any strides.

A row of cosines and sines is broadcast to several rows of the input, the rows that it *serves*. In the backward, a
program takes one row of angles and loops over the rows it serves. It reads the angles once, and the sums of their
gradients need no second kernel.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from torchtitan_npu.gpu_kernels.launch import blocks_in, in_strides_of, power_of_2


def _tile(served: int, size: int, pairs: int) -> dict[str, int]:
    """Return the tile of a program: as many rows as hold at most ``pairs`` pairs of channels."""
    half = power_of_2(size // 2)
    return {"ROWS": min(power_of_2(served), max(1, pairs // half)), "HALF": half}


def npu_rotary_mul(input: Tensor, r1: Tensor, r2: Tensor, rotary_mode: str, **_: Any) -> Tensor:
    out = torch.empty_like(input, memory_format=torch.contiguous_format)
    if not input.numel():
        return out
    x = _inner_stride_1(input)
    sizes, served = _sizes(x, r1)
    config = _tile(served[0] * served[1] * served[2], x.shape[3], 2048)
    chunks = blocks_in(served[0] * served[1] * served[2], config["ROWS"])
    _forward[(r1.numel() // r1.shape[3] * chunks,)](
        *(x, r1.contiguous(), r2.contiguous(), out, *x.stride()[:3], *out.stride()),
        *(*sizes[1:], chunks, served[0] * served[1] * served[2], *served[1:], x.shape[3] // 2),
        INTERLEAVED=rotary_mode == "interleave",
        **config,
        num_warps=min(4, max(1, config["ROWS"] * config["HALF"] // 512)),
    )
    return out


def npu_rotary_mul_backward(
    grad: Tensor, input: Tensor, r1: Tensor, r2: Tensor, rotary_mode: str
) -> tuple[Tensor, Tensor, Tensor]:
    dx = torch.empty_like(input)
    dr1, dr2 = (torch.empty_like(r, dtype=input.dtype, memory_format=torch.contiguous_format) for r in (r1, r2))
    if not input.numel():
        return dx, torch.zeros_like(r1, dtype=input.dtype), torch.zeros_like(r2, dtype=input.dtype)
    tensors = [_inner_stride_1(tensor) for tensor in (grad, input)]
    sizes, served = _sizes(input, r1)
    _backward[(r1.numel() // r1.shape[3],)](
        *(*tensors, r1.contiguous(), r2.contiguous(), dx, dr1, dr2),
        *(*tensors[0].stride()[:3], *tensors[1].stride()[:3], *dx.stride()),
        *(*sizes[1:], served[0] * served[1] * served[2], *served[1:], input.shape[3] // 2),
        INTERLEAVED=rotary_mode == "interleave",
        **_tile(served[0] * served[1] * served[2], input.shape[3], 1024 if rotary_mode == "interleave" else 256),
        num_warps=1,  # sums within one warp need no shared memory
    )
    return dx, in_strides_of(r1, dr1), in_strides_of(r2, dr2)


def _sizes(x: Tensor, r: Tensor) -> tuple[list[int], list[int]]:
    """Return, for each of the first three dimensions, the rows of angles and the rows of ``x`` that each serves."""
    return list(r.shape[:3]), [1 if n == full else full for n, full in zip(r.shape[:3], x.shape[:3], strict=True)]


def _inner_stride_1(x: Tensor) -> Tensor:
    return x if x.stride(3) == 1 else x.contiguous()


@triton.jit
def _load(x, offset, mask, half, HALF: tl.constexpr, INTERLEAVED: tl.constexpr):
    """Load rows that begin at ``offset`` (ROWS, 1): first and second channel of each pair, (ROWS, HALF) each."""
    if INTERLEAVED:
        column = tl.arange(0, 2 * HALF)[None, :]
        both = tl.load(x + offset + column, mask=mask & (column < 2 * half), other=0.0)
        first, second = tl.split(tl.reshape(both, (offset.shape[0], HALF, 2)))
    else:
        column = tl.arange(0, HALF)[None, :]
        inside = mask & (column < half)
        first = tl.load(x + offset + column, mask=inside, other=0.0)
        second = tl.load(x + offset + half + column, mask=inside, other=0.0)
    return first, second


@triton.jit
def _store(out, offset, stride, mask, half, first, second, HALF: tl.constexpr, INTERLEAVED: tl.constexpr):
    first, second = first.to(out.dtype.element_ty), second.to(out.dtype.element_ty)
    if INTERLEAVED:
        column = tl.arange(0, 2 * HALF)[None, :]
        both = tl.reshape(tl.join(first, second), (offset.shape[0], 2 * HALF))
        tl.store(out + offset + column * stride, both, mask=mask & (column < 2 * half))
    else:
        column = tl.arange(0, HALF)[None, :]
        inside = mask & (column < half)
        tl.store(out + offset + column * stride, first, mask=inside)
        tl.store(out + offset + (half + column) * stride, second, mask=inside)


@triton.jit
def _angles(r, index, half, dtype: tl.constexpr, HALF: tl.constexpr, INTERLEAVED: tl.constexpr):
    """Load row ``index`` of the contiguous cosines or sines, rounded to ``dtype`` as torch_npu does, in float32."""
    row = tl.full((1, 1), 0, tl.int64) + index.to(tl.int64) * (2 * half)
    first, second = _load(r, row, row >= 0, half, HALF, INTERLEAVED)
    return first.to(dtype).to(tl.float32), second.to(dtype).to(tl.float32)


@triton.jit
def _offset(angle, served, size1, size2, served1, served2, stride0, stride1, stride2):
    """Return the offsets of the rows number ``served`` (ROWS, 1) that the row of angles ``angle`` serves."""
    # the angles either index a dimension or are broadcast along it, so one of the two summands is 0
    index0 = angle // (size1 * size2) + served // (served1 * served2)
    index1 = angle // size2 % size1 + served // served2 % served1
    index2 = angle % size2 + served % served2
    return index0.to(tl.int64) * stride0 + index1.to(tl.int64) * stride1 + index2.to(tl.int64) * stride2


@triton.jit
def _forward(
    x,
    r1,
    r2,
    out,
    x0,
    x1,
    x2,
    out0,
    out1,
    out2,
    out3,
    size1,
    size2,
    chunks,
    count,
    served1,
    served2,
    half,
    INTERLEAVED: tl.constexpr,
    ROWS: tl.constexpr,
    HALF: tl.constexpr,
):
    angle = tl.program_id(0) // chunks
    served = (tl.program_id(0) % chunks) * ROWS + tl.arange(0, ROWS)[:, None]
    mask = served < count
    cos_a, cos_b = _angles(r1, angle, half, x.dtype.element_ty, HALF, INTERLEAVED)
    sin_a, sin_b = _angles(r2, angle, half, x.dtype.element_ty, HALF, INTERLEAVED)
    offset = _offset(angle, served, size1, size2, served1, served2, x0, x1, x2)
    a, b = _load(x, offset, mask, half, HALF, INTERLEAVED)
    a, b = a.to(tl.float32), b.to(tl.float32)
    offset = _offset(angle, served, size1, size2, served1, served2, out0, out1, out2)
    _store(out, offset, out3, mask, half, a * cos_a - b * sin_a, b * cos_b + a * sin_b, HALF, INTERLEAVED)


@triton.jit
def _backward(
    grad,
    x,
    r1,
    r2,
    dx,
    dr1,
    dr2,
    grad0,
    grad1,
    grad2,
    x0,
    x1,
    x2,
    dx0,
    dx1,
    dx2,
    dx3,
    size1,
    size2,
    count,
    served1,
    served2,
    half,
    INTERLEAVED: tl.constexpr,
    ROWS: tl.constexpr,
    HALF: tl.constexpr,
):
    angle = tl.program_id(0)
    cos_a, cos_b = _angles(r1, angle, half, x.dtype.element_ty, HALF, INTERLEAVED)
    sin_a, sin_b = _angles(r2, angle, half, x.dtype.element_ty, HALF, INTERLEAVED)
    dcos_a = tl.full((ROWS, HALF), 0.0, tl.float32)
    dcos_b = tl.full((ROWS, HALF), 0.0, tl.float32)
    dsin_a = tl.full((ROWS, HALF), 0.0, tl.float32)
    dsin_b = tl.full((ROWS, HALF), 0.0, tl.float32)
    for first in tl.range(0, count, ROWS):
        served = first + tl.arange(0, ROWS)[:, None]
        mask = served < count
        offset = _offset(angle, served, size1, size2, served1, served2, grad0, grad1, grad2)
        g_a, g_b = _load(grad, offset, mask, half, HALF, INTERLEAVED)
        offset = _offset(angle, served, size1, size2, served1, served2, x0, x1, x2)
        a, b = _load(x, offset, mask, half, HALF, INTERLEAVED)
        g_a, g_b, a, b = g_a.to(tl.float32), g_b.to(tl.float32), a.to(tl.float32), b.to(tl.float32)
        offset = _offset(angle, served, size1, size2, served1, served2, dx0, dx1, dx2)
        _store(dx, offset, dx3, mask, half, g_a * cos_a + g_b * sin_b, g_b * cos_b - g_a * sin_a, HALF, INTERLEAVED)
        dcos_a += g_a * a
        dcos_b += g_b * b
        dsin_a -= g_a * b
        dsin_b += g_b * a
    row = tl.full((1, 1), 0, tl.int64) + angle.to(tl.int64) * (2 * half)
    first, second = tl.sum(dcos_a, 0)[None, :], tl.sum(dcos_b, 0)[None, :]
    _store(dr1, row, 1, row >= 0, half, first, second, HALF, INTERLEAVED)
    first, second = tl.sum(dsin_a, 0)[None, :], tl.sum(dsin_b, 0)[None, :]
    _store(dr2, row, 1, row >= 0, half, first, second, HALF, INTERLEAVED)
