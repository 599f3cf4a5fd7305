"""What the tests of the kernels share: the half precision they can be tested in, and strides that mean something."""

from __future__ import annotations

import torch
from torch import Tensor


def dtype_on(device: str, dtype: torch.dtype) -> torch.dtype:
    """``dtype``, but float16 for bfloat16 on the CPU: Triton's interpreter cuts float32 to it where a GPU rounds."""
    return torch.float16 if device == "cpu" and dtype == torch.bfloat16 else dtype


def on(device: str, tensor: Tensor) -> Tensor:
    return tensor.to(device, dtype_on(device, tensor.dtype))


def has_strides_of(result: Tensor, tensor: Tensor) -> bool:
    """Whether ``result`` has the strides of ``torch.empty_like(tensor)``, where they mean something."""
    expected = torch.empty_like(tensor)
    strides = zip(result.shape, result.stride(), expected.stride(), strict=True)
    return result.shape == tensor.shape and all(not result.numel() or n == 1 or a == b for n, a, b in strides)
