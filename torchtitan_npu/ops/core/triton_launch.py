"""What the kernels' wrappers share: sizes of blocks and grids, and results in the strides of an argument."""

from __future__ import annotations

from functools import cache

import torch
import triton.language as tl
from torch import Tensor

LOG2_E = tl.constexpr(1.4426950408889634)


def power_of_2(size: int) -> int:
    """The least power of 2 that holds ``size``. Triton's own function takes the host 4 µs, and so does its division."""
    return 1 << max(0, size - 1).bit_length()


def blocks_in(size: int, block: int) -> int:
    """How many blocks hold ``size``."""
    return -(-size // block)


def part_of(tensor: Tensor, rows: int, start: int, count: int) -> Tensor:
    """So many of the ``rows`` that the contiguous ``tensor`` has, from ``start`` on, for a kernel that takes their
    address; itself if they are all, as they mostly are: a view takes the host 3 µs."""
    return tensor if count == rows else tensor.view(rows, -1)[start : start + count]


def multiprocessors(device: torch.device) -> int:
    """How many multiprocessors ``device`` has; a few for the interpreter, so that its programs loop as on a GPU."""
    return _multiprocessors(device.index or 0) if device.type == "cuda" else 3


@cache
def _multiprocessors(index: int) -> int:
    return torch.cuda.get_device_properties(index).multi_processor_count


def in_strides_of(tensor: Tensor, result: Tensor) -> Tensor:
    """The contiguous ``result``, of the shape of ``tensor``, in the strides that ``torch.empty_like`` of it has."""
    if tensor.is_contiguous():
        return result
    like = torch.empty_like(tensor, dtype=result.dtype)
    return result if like.is_contiguous() else like.copy_(result)
