"""The dtype in which the reference kernels compute."""

from __future__ import annotations

import torch
from torch import Tensor


def compute_dtype(tensor: Tensor) -> torch.dtype:
    """Return float32, as torch_npu's statistics have, or float64 for float64 input, which an NPU does not take."""
    return torch.float64 if tensor.dtype == torch.float64 else torch.float32


def upcast(*tensors: Tensor) -> tuple[Tensor, ...]:
    """Return the tensors in the dtype to compute in."""
    return tuple(tensor.to(compute_dtype(tensor)) for tensor in tensors)
