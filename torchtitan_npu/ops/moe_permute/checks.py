"""What the MoE ops check alike: a tensor's number of dimensions, its dtype, and the modes no NPU kernel has yet."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

NPU_FLOATS = (torch.float16, torch.bfloat16, torch.float32)
FLOATS = (*NPU_FLOATS, torch.float64)  # float64 is for oracles: an NPU does not take it
EXACT_INTEGERS = range(16777215)  # the NPU sorts integers as float32, which holds them exactly up to here
TOP_K = range(513)


def has_dim(name: str, tensor: Tensor, *allowed: int) -> Iterator[str]:
    if tensor.dim() not in allowed:
        noun = "dimension" if allowed == (1,) else "dimensions"
        yield f"{name} must have {' or '.join(map(str, allowed))} {noun}, not {tensor.dim()}"


def has_dtype(name: str, tensor: Tensor, *allowed: torch.dtype) -> Iterator[str]:
    if tensor.dtype not in allowed:
        names = [str(dtype).removeprefix("torch.") for dtype in allowed if dtype != torch.float64]
        yield f"{name} must be {', '.join(names[:-1])}{' or ' if names[1:] else ''}{names[-1]}, not {tensor.dtype}"


def has_shape(name: str, tensor: Tensor, *shape: Any) -> Iterator[str]:
    if tuple(tensor.shape) != shape:
        yield f"{name} must have the shape {shape}, not {tuple(tensor.shape)}"


def is_unpadded(padded_mode: bool, restore_shape: Any = None) -> Iterator[str]:
    if padded_mode:
        yield "padded_mode must be False, the only mode the NPU has"
    if restore_shape is not None:
        yield f"restore_shape belongs to padded_mode, which the NPU does not have: it must be None, not {restore_shape}"
