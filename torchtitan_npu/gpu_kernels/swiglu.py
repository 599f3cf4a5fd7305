"""SwiGLU and its gradient in Triton, in one pass over the memory.

A contiguous tensor is a matrix: the dimensions before ``dim`` are its rows, ``dim`` and those after it its columns. The
two halves along ``dim`` are the two halves of each row.
"""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from torchtitan_npu.gpu_kernels.launch import blocks_in, exact_sigmoid, in_strides_of, power_of_2


def npu_swiglu(input: Tensor, dim: int) -> Tensor:
    shape = list(input.shape)
    shape[dim] //= 2
    y = input.new_empty(shape)
    if y.numel():
        width = math.prod(shape[dim % len(shape) :])
        grid, config = _launch(y.numel() // width, width)
        _forward[grid](input.contiguous(), y, width, **config)
    return y


def npu_swiglu_backward(grad_output: Tensor, input: Tensor, dim: int) -> Tensor:
    dx = torch.empty_like(input, memory_format=torch.contiguous_format)
    if dx.numel():
        width = math.prod(grad_output.shape[dim % input.dim() :])
        grid, config = _launch(grad_output.numel() // width, width)
        _backward[grid](grad_output.contiguous(), input.contiguous(), dx, width, **config)
    return in_strides_of(input, dx)


def _launch(rows: int, width: int) -> tuple[tuple[int], dict[str, int]]:
    block = min(1024, power_of_2(width))  # 16 bytes per thread
    return (rows * blocks_in(width, block),), {"BLOCK": block, "num_warps": 4}


@triton.jit
def _sigmoid(a, EXACT: tl.constexpr):
    """Return the sigmoid of ``a``. A 16-bit result does not show the error of Triton's."""
    return exact_sigmoid(a) if EXACT else tl.sigmoid(a)


@triton.jit
def _forward(x, y, width, BLOCK: tl.constexpr):
    blocks = tl.cdiv(width, BLOCK)
    row = (tl.program_id(0) // blocks).to(tl.int64)
    column = (tl.program_id(0) % blocks) * BLOCK + tl.arange(0, BLOCK)
    inside = column < width
    a = tl.load(x + row * 2 * width + column, mask=inside, other=0.0).to(tl.float32)
    b = tl.load(x + row * 2 * width + width + column, mask=inside, other=0.0).to(tl.float32)
    tl.store(
        y + row * width + column,
        (a * _sigmoid(a, y.dtype.element_ty == tl.float32) * b).to(y.dtype.element_ty),
        mask=inside,
    )


@triton.jit
def _backward(grad, x, dx, width, BLOCK: tl.constexpr):
    blocks = tl.cdiv(width, BLOCK)
    row = (tl.program_id(0) // blocks).to(tl.int64)
    column = (tl.program_id(0) % blocks) * BLOCK + tl.arange(0, BLOCK)
    inside = column < width
    first, second = row * 2 * width + column, row * 2 * width + width + column
    a = tl.load(x + first, mask=inside, other=0.0).to(tl.float32)
    b = tl.load(x + second, mask=inside, other=0.0).to(tl.float32)
    g = tl.load(grad + row * width + column, mask=inside, other=0.0).to(tl.float32)
    s = _sigmoid(a, dx.dtype.element_ty == tl.float32)
    tl.store(dx + first, (g * b * s * (1.0 + a * (1.0 - s))).to(dx.dtype.element_ty), mask=inside)
    tl.store(dx + second, (g * a * s).to(dx.dtype.element_ty), mask=inside)
