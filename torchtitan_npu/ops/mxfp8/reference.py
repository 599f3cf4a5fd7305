"""MXFP8 in plain PyTorch: blocks of 32 float8 elements with one E8M0 scale, and the product of such matrices.

The rules are those of CANN's documents and public kernels (hicann/ops-nn, ``quant/dynamic_mx_quant``, arch35). With the
largest magnitude *m* of a block, and *emax* and *max* of the element type (E4M3: 8 and 448, E5M2: 15 and 57344), the
scale is 2^s:

- ``scale_alg`` 0 (OCP, torchao's FLOOR): s = floor(log2 *m*) - *emax*. Elements above *max* saturate.
- ``scale_alg`` 1 (cuBLAS, torchao's RCEIL): s = ceil(log2(*m* · (1 / *max*))), the product rounded to float32. Nothing
  saturates.

An element is the value divided by the scale, rounded to nearest, ties to even (``round_mode`` "rint"), subnormal
elements included. Special blocks:

- A NaN or an infinity: the scale is NaN (code 255) and the elements are 0, so that the product is NaN.
- A scale below 2^-126 with ``scale_alg`` 0, and only zeros with any: the scale code and the elements are 0.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from torchtitan_npu.errors import UsageError

BLOCK = 32
"""Elements that share a scale."""
E5M2, E4M3 = 23, 24
"""PyTorch's numbers of the element types, as ``dst_type``."""
ELEMENTS = {E5M2: torch.float8_e5m2, E4M3: torch.float8_e4m3fn, 291: torch.float8_e5m2, 292: torch.float8_e4m3fn}
"""Element types by ``dst_type``: PyTorch's numbers, and torch_npu's."""
E8M0 = 293
"""torch_npu's number of the scales' type, ``torch_npu.float8_e8m0fnu``."""
EMAX = {torch.float8_e4m3fn: 8, torch.float8_e5m2: 15}


def npu_dynamic_mx_quant(
    input: Tensor, *, axis: int, dst_type: int, scale_alg: int | None, max_low_bound: float, **_: Any
) -> tuple[Tensor, Tensor]:
    """Quantize blocks of 32 values along ``axis``; see the module for the formula.

    Returns the elements, shaped like ``input``, and the scale codes, uint8: shaped like ``input`` with
    ceil(blocks / 2) along ``axis`` and a last dimension of 2, which holds the two scales of a pair of blocks. The
    second scale of a last, single block is 0. A last block of fewer than 32 values is filled up with zeros.
    """
    axis %= input.dim()
    blocks = _filled(input.movedim(axis, -1), BLOCK).unflatten(-1, (-1, BLOCK))
    elements, codes = quantized(blocks, ELEMENTS[dst_type], scale_alg or 0, max_low_bound)
    y = torch.empty_like(input, dtype=elements.dtype)  # in the strides of torch_npu's meta kernel
    y.copy_(elements.flatten(-2)[..., : input.shape[axis]].movedim(-1, axis))
    pairs = _filled(codes, 2).unflatten(-1, (-1, 2))
    return y, pairs.movedim(-2, axis).contiguous()


def npu_grouped_dynamic_mx_quant(
    x: Tensor, group_index: Tensor, *, dst_type: int, scale_alg: int | None, **_: Any
) -> tuple[Tensor, Tensor]:
    """Quantize blocks of 32 rows of ``x`` (T, N); a block holds rows of one group, which end at ``group_index`` (E).

    Returns the elements (T, N) and the scale codes (T // 64 + E, N, 2). The codes of group i begin in row
    ends[i - 1] // 64 + i. The last group ends at T. The second code of a last, single block is 0, and rows
    between two groups hold 127 (scale 1).
    """
    y = torch.empty_like(x, dtype=ELEMENTS[dst_type])
    codes = x.new_full((len(x) // 64 + len(group_index), x.shape[1], 2), 127, dtype=torch.uint8)
    start, ends = 0, group_index.tolist()
    if (ends or [0])[-1] != len(x):
        raise UsageError(f"npu_grouped_dynamic_mx_quant: group_index must end at the {len(x)} rows of x, not be {ends}")
    for group, end in enumerate(ends):
        if end > start:
            rows, pairs = npu_dynamic_mx_quant(
                x[start:end], axis=0, dst_type=dst_type, scale_alg=scale_alg, max_low_bound=0.0
            )
            y[start:end] = rows
            first = start // 64 + group
            codes[first : first + len(pairs)] = pairs
        start = end
    return y, codes


def npu_quant_matmul(
    x1: Tensor,
    x2: Tensor,
    scale: Tensor,
    *,
    pertoken_scale: Tensor,
    bias: Tensor | None,
    output_dtype: int,
    factors: torch.dtype = torch.float32,
    **_: Any,
) -> Tensor:
    """Multiply ``x1`` (M, K) by ``x2`` (K, N), quantized along K with the codes ``pertoken_scale`` and ``scale``.

    The codes are (M, ceil(K / 64), 2) and (ceil(K / 64), N, 2). Both are dequantized to ``factors``; float32 is
    exact, and so are then their products. The sums are float32, in the order of torch's matmul: CANN documents sums
    over blocks of 32, and no order within them.
    """
    y = dequantized(x1, pertoken_scale, -1, factors) @ dequantized(x2, scale, 0, factors)
    return (y if bias is None else y + bias).to(OUTPUTS[output_dtype])


OUTPUTS = {5: torch.float16, 6: torch.float32, 15: torch.bfloat16}
"""Types of a product by ``output_dtype``: PyTorch's numbers."""


def quantized(
    blocks: Tensor, element: torch.dtype, scale_alg: int, max_low_bound: float = 0.0
) -> tuple[Tensor, Tensor]:
    """Return the elements of ``blocks`` (..., 32) and their scale codes (...)."""
    values = blocks.float()
    bits = values.abs().amax(-1).view(torch.int32)  # NaN is the largest
    special = bits >= 0xFF << 23
    if scale_alg == 0:
        codes = ((bits >> 23) - EMAX[element]).clamp(min=0)
        flushed = codes == 0
    else:
        largest = torch.where(special, 0, bits).view(torch.float32)
        zero = largest == 0
        inverse = torch.tensor(1 / torch.finfo(element).max, dtype=torch.float32)  # rounded, as CANN's constant is
        bits = (largest.clamp(min=max_low_bound) * inverse.to(largest.device)).view(torch.int32)
        exponent, mantissa = bits >> 23, bits & 0x7FFFFF
        above = torch.where(exponent > 0, mantissa > 0, mantissa > 0x400000)
        codes = torch.where(zero, 0, exponent + above.int())
        flushed = zero
    # 2^-s, with s = code - 127: the code 0 gives 2^127
    inverse_scale = ((254 - codes) << 23).view(torch.float32).masked_fill(flushed | special, 0.0)
    scaled = torch.where(special.unsqueeze(-1), 0.0, values * inverse_scale.unsqueeze(-1))
    largest_element = torch.finfo(element).max
    elements = scaled.clamp(-largest_element, largest_element).to(element)
    return elements, torch.where(special, 255, codes).to(torch.uint8)


def dequantized(data: Tensor, scale: Tensor, axis: int, dtype: torch.dtype) -> Tensor:
    """Return the values of ``data`` (any shape) with the ``scale`` codes of :func:`npu_dynamic_mx_quant`.

    bfloat16 holds them exactly if the scale code is at least 3 (E4M3) or 10 (E5M2): then the smallest element, 2^-9 or
    2^-16, times the scale is not below 2^-133, the smallest subnormal bfloat16.
    """
    axis %= data.dim()
    codes = scale.movedim(axis, -2).flatten(-2)  # (..., blocks), the blocked dimension last
    codes = codes.repeat_interleave(BLOCK, -1)[..., : data.shape[axis]].movedim(-1, axis)
    return data.to(dtype) * codes.view(torch.float8_e8m0fnu).to(dtype)


def dequantized_groups(data: Tensor, scale: Tensor, ends: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the values of ``data`` (T, N) with the ``scale`` codes of :func:`npu_grouped_dynamic_mx_quant`."""
    row = torch.arange(len(data), device=data.device)
    group = torch.searchsorted(ends, row, right=True)
    starts = torch.cat((ends.new_zeros(1), ends[:-1]))[group]
    block = 2 * (starts // 64 + group) + (row - starts) // BLOCK
    codes = scale.transpose(1, 2).flatten(0, 1)[block]  # (T, N)
    return data.to(dtype) * codes.view(torch.float8_e8m0fnu).to(dtype)


def _filled(x: Tensor, multiple: int) -> Tensor:
    """Return ``x`` with zeros appended to its last dimension, up to a ``multiple``."""
    return torch.nn.functional.pad(x, (0, -x.shape[-1] % multiple))
