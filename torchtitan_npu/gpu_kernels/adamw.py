"""The update of AdamW in Triton: one launch for a list of parameters."""

from __future__ import annotations

from functools import cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from torchtitan_npu.gpu_kernels.launch import blocks_in
from torchtitan_npu.torch_internals.tensors import increment_all

CHUNK = 8192
"""Elements per program, all of one parameter."""
TILES = {"BLOCK": 4096, "num_warps": 8}
DTYPES = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}


def update(
    parameters: list[Tensor],
    gradients: list[Tensor],
    first: list[Tensor],
    second: list[Tensor],
    steps: list[Tensor],
    *,
    lr: float,
    beta1: float,
    beta2: float,
    eps: float,
    weight_decay: float,
    gradient_factor: Tensor | None,
) -> None:
    """Update ``parameters``, their moments ``first`` and ``second``, and the counts of ``steps`` in place.

    The four tensors of a parameter have one dtype, one device and the same strides, without gaps. The arithmetic is in
    float32.
    """
    device = parameters[0].device
    increment_all(steps, 1)
    # in float64: 1 - beta ** step cancels in the first steps
    counts = torch.stack(steps).double()
    corrections = torch.stack([lr / (1 - beta1**counts), (1 - beta2**counts).rsqrt()], dim=1).float()
    pointers = [tensor.data_ptr() for row in zip(parameters, gradients, first, second, strict=True) for tensor in row]
    addresses = torch.tensor(pointers, dtype=torch.int64)
    if device.type != "cpu":
        addresses = addresses.pin_memory().to(device, non_blocking=True)
    sizes, chunks = _chunks(tuple(parameter.numel() for parameter in parameters), device)
    if len(chunks):
        _update[(len(chunks),)](
            *(addresses, sizes, chunks, corrections, gradient_factor, lr * weight_decay),
            # in float64: the float32 number next to 0.999 is 1e-5 off in its distance from 1
            *(beta1, 1 - beta1, beta2, 1 - beta2, eps),
            DTYPE=DTYPES[parameters[0].dtype],
            ALIGNED=all(pointer % 16 == 0 for pointer in pointers),
            CHUNK=CHUNK,
            **TILES,
        )


@cache
def _chunks(sizes: tuple[int, ...], device: torch.device) -> tuple[Tensor, Tensor]:
    """Return the sizes (parameters,), and the parameter and number in it of each chunk (chunks, 2) int32."""
    counts = torch.tensor([blocks_in(size, CHUNK) for size in sizes])
    parameter = torch.repeat_interleave(torch.arange(len(sizes)), counts)
    number = torch.arange(len(parameter)) - (counts.cumsum(0) - counts)[parameter]
    return torch.tensor(sizes, device=device), torch.stack([parameter, number], dim=1).int().to(device)


@triton.jit
def _update(
    addresses,
    sizes,
    chunks,
    corrections,
    gradient_factor,
    decay,
    beta1,
    rest1,
    beta2,
    rest2,
    eps,
    DTYPE: tl.constexpr,
    ALIGNED: tl.constexpr,
    CHUNK: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Update one chunk."""
    chunks += tl.program_id(0) * 2
    tensor = tl.load(chunks)
    start = tl.load(chunks + 1).to(tl.int64) * CHUNK
    size = tl.minimum(tl.load(sizes + tensor) - start, CHUNK).to(tl.int32)
    parameter = _pointer(addresses + 4 * tensor, DTYPE, ALIGNED) + start
    gradient = _pointer(addresses + 4 * tensor + 1, DTYPE, ALIGNED) + start
    first = _pointer(addresses + 4 * tensor + 2, DTYPE, ALIGNED) + start
    second = _pointer(addresses + 4 * tensor + 3, DTYPE, ALIGNED) + start
    step_size = tl.load(corrections + 2 * tensor)
    correction = tl.load(corrections + 2 * tensor + 1)
    factor = 1.0
    if gradient_factor is not None:
        factor = tl.load(gradient_factor)
    offset = tl.arange(0, BLOCK)
    options = (factor, step_size, correction, decay, beta1, rest1, beta2, rest2, eps)
    if size == CHUNK:  # without a mask, a thread loads 16 bytes at once
        for begin in range(0, CHUNK, BLOCK):
            _update_block(parameter, gradient, first, second, begin + offset, None, options)
    else:
        for begin in range(0, size, BLOCK):
            at = begin + offset
            _update_block(parameter, gradient, first, second, at, at < size, options)


@triton.jit
def _pointer(address, DTYPE: tl.constexpr, ALIGNED: tl.constexpr):
    pointer = tl.load(address).to(tl.pointer_type(DTYPE))
    return tl.multiple_of(pointer, 16) if ALIGNED else pointer


@triton.jit
def _update_block(parameter, gradient, first, second, at, mask, options):
    factor, step_size, correction, decay, beta1, rest1, beta2, rest2, eps = options
    p = tl.load(parameter + at, mask=mask).to(tl.float32)
    g = tl.load(gradient + at, mask=mask).to(tl.float32) * factor
    m = tl.load(first + at, mask=mask).to(tl.float32)
    v = tl.load(second + at, mask=mask).to(tl.float32)
    p -= decay * p
    m = beta1 * m + rest1 * g
    v = beta2 * v + rest2 * (g * g)
    p -= step_size * m / (tl.sqrt(v) * correction + eps)
    tl.store(parameter + at, p.to(parameter.dtype.element_ty), mask=mask)
    tl.store(first + at, m.to(first.dtype.element_ty), mask=mask)
    tl.store(second + at, v.to(second.dtype.element_ty), mask=mask)
