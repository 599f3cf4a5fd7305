"""Which keys a query row may see: the documents of a batch as two integers a row, found on the device."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

Lengths = Tensor | Sequence[int] | None


@dataclass(frozen=True)
class Rows:
    """All query rows, one after another: (T1,) int32, where T1 is B · S1 (BSND) or the packed tokens (TND)."""

    first: Tensor
    """Where the keys of the row's document begin, among all keys one after another."""
    visible: Tensor
    """How many of them the row may see, counted from the first; 0 for a row of padding."""


def rows_of(
    layout: str, sparse_mode: int, query: Tensor, key: Tensor, query_lengths: Lengths, key_lengths: Lengths
) -> Rows:
    """``query`` and ``key`` are in ``layout``, the lengths as the ops take them. Nothing waits for the device, so what
    the lengths say is not checked; but no row sees a key past the last one."""
    tokens = query.shape[0] if layout == "TND" else query.shape[0] * query.shape[1]
    row = torch.arange(tokens, device=query.device)
    query_start, query_count = _documents(layout, query, query_lengths)
    key_start, key_count = _documents(layout, key, key_lengths)
    if layout == "TND":
        ends = (query_start + query_count).contiguous()
        document = torch.searchsorted(ends, row, right=True).clamp_(max=len(ends) - 1)
    else:
        document = row // query.shape[1]
    place, first, keys, queries = (
        row - query_start[document],
        key_start[document],
        key_count[document],
        query_count[document],
    )
    # causal: the last query sees the last key, the one before it one key less
    visible = torch.minimum(place + 1 + keys - queries, keys) if sparse_mode == 3 else keys
    visible = torch.where(place < queries, visible, 0).clamp(min=0)
    return Rows(first.to(torch.int32), visible.to(torch.int32))


def _documents(layout: str, tensor: Tensor, lengths: Lengths) -> tuple[Tensor, Tensor]:
    """Where each document's tokens begin and how many they are: (documents,) int64."""
    if layout == "TND":
        assert lengths is not None  # the contract
        ends = _on_device(lengths, tensor).clamp(0, tensor.shape[0])
        start = torch.nn.functional.pad(ends[:-1], (1, 0))
        return start, (ends - start).clamp_(min=0)
    batch, sequence = tensor.shape[:2]
    start = torch.arange(batch, device=tensor.device) * sequence
    if lengths is None:
        return start, torch.full_like(start, sequence)
    return start, _on_device(lengths, tensor).clamp(0, sequence)


def _on_device(lengths: Tensor | Sequence[int], tensor: Tensor) -> Tensor:
    """int64, on the device of ``tensor``. A list goes through pinned memory: from other memory the copy waits."""
    if isinstance(lengths, Tensor):
        return lengths.to(tensor.device, torch.int64)
    held = torch.tensor(lengths, dtype=torch.int64, pin_memory=tensor.is_cuda)
    return held.to(tensor.device, non_blocking=True)
