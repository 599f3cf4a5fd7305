"""What the kernels' wrappers share: how many programs fill the GPU, and results in the strides of an argument."""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor


def multiprocessors(device: torch.device) -> int:
    """How many multiprocessors ``device`` has; a few for the interpreter, so that its programs loop as on a GPU."""
    return _multiprocessors(device.index or 0) if device.type == "cuda" else 3


@cache
def _multiprocessors(index: int) -> int:
    return torch.cuda.get_device_properties(index).multi_processor_count


def in_strides_of(tensor: Tensor, result: Tensor) -> Tensor:
    """The contiguous ``result`` in the shape of ``tensor`` and the strides that ``torch.empty_like`` of it has."""
    if tensor.is_contiguous():
        return result.view(tensor.shape)
    return torch.empty_like(tensor, dtype=result.dtype).copy_(result.view(tensor.shape))
