"""Device, dtypes and stride checks of the tests of Triton kernels."""

from __future__ import annotations

import dataclasses

import torch
from hypothesis import strategies as st
from torch import Tensor

from tests._helpers.sparse_oracle import ARRANGEMENTS, Documents, documents

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def dtype_on(device: str, dtype: torch.dtype) -> torch.dtype:
    """Return ``dtype``, or float16 for bfloat16 on the CPU.

    Triton's interpreter truncates float32 to bfloat16 where a GPU rounds, and does not multiply bfloat16 matrices.
    """
    return torch.float16 if device == "cpu" and dtype == torch.bfloat16 else dtype


HALF_TYPES = [torch.float16, torch.bfloat16] if DEVICE == "cuda" else [torch.float16]
"""The half-precision types that the kernels compute here."""


def docs_of(
    layout: str,
    sizes: list[tuple[int, int]],
    dtype: torch.dtype,
    causal: bool = True,
    arranged: str = "contiguous",
) -> Documents:
    """Return documents with ``sizes`` of queries and keys, the same ones in every run."""
    return Documents(layout, sizes, causal, dtype, torch.Generator().manual_seed(0), ARRANGEMENTS[arranged])


def kernel_documents(causal: bool | None = None, uneven: bool = True) -> st.SearchStrategy[Documents]:
    """Draw ``documents`` with float32 instead of float64, for which the reference runs."""

    def in_kernel_dtype(docs: Documents) -> Documents:
        dtype = torch.float32 if docs.dtype == torch.float64 else dtype_on(DEVICE, docs.dtype)
        return dataclasses.replace(docs, dtype=dtype)

    return documents(causal, uneven).map(in_kernel_dtype)


def on(device: str, tensor: Tensor) -> Tensor:
    return tensor.to(device, dtype_on(device, tensor.dtype))


def has_strides_of(result: Tensor, tensor: Tensor) -> bool:
    """Return whether ``result`` has the strides of ``torch.empty_like(tensor)``, except in dimensions of size 1."""
    expected = torch.empty_like(tensor)
    strides = zip(result.shape, result.stride(), expected.stride(), strict=True)
    return result.shape == tensor.shape and all(not result.numel() or n == 1 or a == b for n, a, b in strides)
