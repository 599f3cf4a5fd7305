"""Argument checks that several operators share. Each yields an error message, or nothing."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

NPU_FLOATS = (torch.float16, torch.bfloat16, torch.float32)
FLOATS = (*NPU_FLOATS, torch.float64)
"""Floating dtypes that the reference kernels take: float64, which an NPU does not take, is for oracles."""
MATRIX_INNER_LIMIT = 65536
"""The innermost dimension of each matrix of the NPU's products is smaller."""
MAX_DIMS = 8
"""CANN's kernels take no tensor with more dimensions."""


def longest_document(ends: Sequence[int]) -> int:
    """Return the length of the longest of the documents that end at ``ends``."""
    return max(end - start for start, end in pairwise((0, *ends)))


def inner_size(tensor: Tensor) -> int:
    """Return the size of the innermost dimension: the last one or, in a transposed view, the one before it."""
    return tensor.shape[-1 if tensor.is_contiguous() else -2]


def check_dim(name: str, tensor: Tensor, *allowed: int) -> Iterator[str]:
    """Check the number of dimensions."""
    if tensor.dim() not in allowed:
        noun = "dimension" if allowed == (1,) else "dimensions"
        yield f"{name} must have {' or '.join(map(str, allowed))} {noun}, not {tensor.dim()}"


def check_dtype(name: str, tensor: Tensor, *allowed: torch.dtype) -> Iterator[str]:
    """Check the dtype. The message does not mention float64."""
    if tensor.dtype not in allowed:
        names = [str(dtype).removeprefix("torch.") for dtype in allowed if dtype != torch.float64]
        yield f"{name} must be {', '.join(names[:-1])}{' or ' if names[1:] else ''}{names[-1]}, not {tensor.dtype}"


def check_shape(name: str, tensor: Tensor, *shape: Any) -> Iterator[str]:
    """Check the shape."""
    if tuple(tensor.shape) != shape:
        yield f"{name} must have the shape {shape}, not {tuple(tensor.shape)}"


def check_alike(name: str, tensor: Tensor, other_name: str, other: Tensor) -> Iterator[str]:
    """Check that ``tensor`` has the shape and dtype of ``other``."""
    if (tensor.shape, tensor.dtype) != (other.shape, other.dtype):
        yield (
            f"{name} must have the shape and dtype of {other_name}, {tuple(other.shape)} and {other.dtype}, "
            f"not {tuple(tensor.shape)} and {tensor.dtype}"
        )


def check_is(name: str, tensor: Tensor, dtype: torch.dtype, shape: Any, why: str = "") -> Iterator[str]:
    """Check dtype and shape. ``why`` explains them in the message."""
    if (tensor.dtype, list(tensor.shape)) != (dtype, list(shape)):
        found = f"{tensor.dtype} of shape {tuple(tensor.shape)}"
        yield f"{name} must be {dtype} of shape {tuple(shape)}{why and f', {why}'}, not {found}"
