"""Rows of the tables of sparse attention and of the indexer: how they are shown, and what a peer that fails leaves."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import triton
from torch import Tensor

Row = dict[str, Any]
PEER_ERRORS = (ImportError, RuntimeError, TypeError, ValueError, triton.TritonError)
"""What a library may raise that lacks a module, refuses a shape, or asks for more memory than there is."""


def of_peer(measure: Callable[..., Row], *arguments: Any, **row: Any) -> Row:
    """The row that ``measure`` makes; of a peer that fails, one that says so."""
    try:
        return measure(*arguments, **row)
    except PEER_ERRORS as problem:
        return row | {"failed": f"{type(problem).__name__}: {problem}".splitlines()[0][:200]}


def mask_of(indices: Tensor) -> Tensor:
    """``indices`` (1, S, 1, K), -1 for none: whether each row selected each key, (S, S)."""
    length = indices.shape[1]
    mask = torch.zeros(length, length + 1, dtype=torch.bool, device=indices.device)
    return mask.scatter_(-1, indices[0, :, 0].long() % (length + 1), True)[:, :length]


def show(row: Row) -> str:
    what = f"{row['what']:56}"
    if "error" in row:
        return f"{what} {row['error']:.2e}"
    if "failed" in row:
        return f"{what} failed: {row['failed']}"
    rate = f"{row['tflops']:6.0f} TFLOP/s" if row["tflops"] else " " * 14
    limit = f"{row['limit_ms'] / row['ms']:4.0%} of the limit" if "limit_ms" in row else ""
    return f"{what} {row['length']:7d} {row['ms']:9.3f} ms {rate} {row['peak_mib']:8.0f} MiB {limit}"
