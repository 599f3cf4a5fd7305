"""Helpers to launch Triton kernels: sizes of blocks and grids, and results in the strides of an argument."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import cache

import torch
import triton.language as tl
from torch import Tensor

LOG2_E = tl.constexpr(1.4426950408889634)


def power_of_2(size: int) -> int:
    """Return the smallest power of 2 not below ``size``. Triton's own function takes the host 4 µs longer."""
    return 1 << max(0, size - 1).bit_length()


def blocks_in(size: int, block: int) -> int:
    """Return the number of blocks that cover ``size``. Triton's ``cdiv`` takes the host 4 µs longer."""
    return -(-size // block)


def part_of(tensor: Tensor, rows: int, start: int, count: int) -> Tensor:
    """Return ``count`` of the ``rows`` of a contiguous tensor, from ``start`` on, for a kernel that takes a pointer.

    All rows are the common case, and return ``tensor`` itself: a view takes the host 3 µs.
    """
    return tensor if count == rows else tensor.view(rows, -1)[start : start + count]


def multiprocessors(device: torch.device) -> int:
    """Return the number of multiprocessors. The interpreter has 3, so that programs loop as they do on a GPU."""
    return _multiprocessors(device.index or 0) if device.type == "cuda" else 3


@cache
def _multiprocessors(index: int) -> int:
    return torch.cuda.get_device_properties(index).multi_processor_count


def uninitialized(shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return an uninitialized tensor, for a workspace. Not for fake tensors.

    With torch's deterministic algorithms, ``torch.empty`` would fill it, which takes 0.7 ms for 2 GiB on an H200.
    """
    storage = torch.UntypedStorage(math.prod(shape) * dtype.itemsize, device=device)
    return torch.empty(0, dtype=dtype, device=device).set_(storage).view(shape)


def in_strides_of(tensor: Tensor, result: Tensor) -> Tensor:
    """Return the contiguous ``result``, shaped like ``tensor``, with the strides of ``torch.empty_like(tensor)``."""
    if tensor.is_contiguous():
        return result
    like = torch.empty_like(tensor, dtype=result.dtype)
    return result if like.is_contiguous() else like.copy_(result)
