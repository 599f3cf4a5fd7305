"""Iteration of the reference kernels over documents and chunks of rows, and the gather of selected keys."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from torchtitan_npu.errors import UsageError
from torchtitan_npu.ops.core.dtypes import compute_dtype
from torchtitan_npu.ops.sparse_flash_attention.checks import check_length_values

CHUNK_ELEMENTS = 2**25
"""The approximate number of elements of all intermediates of one chunk of rows: 128 MiB in float32."""

Index = tuple[int | slice, ...]


@dataclass(frozen=True)
class QueryRows:
    """Some query rows of a document."""

    index: Index
    """Their index in a tensor with the query's layout."""
    visible: Tensor
    """The number of keys that each row may attend to, counted from the document's first: (rows, 1, 1)."""


@dataclass(frozen=True)
class SequenceRanges:
    """A batch row (BSND) or a packed document (TND)."""

    batch: tuple[int, ...]
    """The batch row; empty for packed documents."""
    queries: range
    keys: range
    causal: bool

    @property
    def key_index(self) -> Index:
        """Return the index of its keys in a tensor with the key's layout."""
        return (*self.batch, slice(self.keys.start, self.keys.stop))

    def rows(self, elements: int, device: torch.device) -> Iterator[QueryRows]:
        """Yield its query rows in chunks that fit :data:`CHUNK_ELEMENTS`, if a row needs ``elements``."""
        keys = len(self.keys)
        step = max(1, CHUNK_ELEMENTS // max(1, elements))
        for start in range(0, len(self.queries), step):
            part = self.queries[start : start + step]
            visible = torch.full((len(part),), keys, device=device)
            if self.causal:
                # the last query attends up to the last key, each query before it to one key less
                visible = torch.arange(start, start + len(part), device=device) + 1 + keys - len(self.queries)
            yield QueryRows((*self.batch, slice(part.start, part.stop)), visible.clamp(0, keys)[:, None, None])


def documents(
    layout: str,
    sparse_mode: int,
    query: Tensor,
    key: Tensor,
    query_lengths: Tensor | Sequence[int] | None,
    key_lengths: Tensor | Sequence[int] | None,
) -> list[SequenceRanges]:
    """Return the documents of a batch. ``query`` and ``key`` are in ``layout``; the lengths are optional."""
    causal = sparse_mode == 3
    if layout == "TND":
        cu_seqlens_q = _values(layout, "actual_seq_lengths of the query", query_lengths, query.shape[0], 1)
        cu_seqlens_k = _values(layout, "actual_seq_lengths of the key", key_lengths, key.shape[0], 1)
        return [
            SequenceRanges((), range(*queries), range(*keys), causal)
            for queries, keys in zip(
                zip([0, *cu_seqlens_q], cu_seqlens_q, strict=False),
                zip([0, *cu_seqlens_k], cu_seqlens_k, strict=False),
                strict=True,
            )
        ]
    batch, sequence = query.shape[:2]
    query_counts = _values(layout, "actual_seq_lengths of the query", query_lengths, sequence, batch)
    key_counts = _values(layout, "actual_seq_lengths of the key", key_lengths, key.shape[1], batch)
    return [
        SequenceRanges((row,), range(queries), range(keys), causal)
        for row, (queries, keys) in enumerate(zip(query_counts, key_counts, strict=True))
    ]


def _values(layout: str, name: str, lengths: Tensor | Sequence[int] | None, tokens: int, batch: int) -> list[int]:
    if lengths is None:
        return [tokens] * batch
    values = lengths.tolist() if isinstance(lengths, Tensor) else list(lengths)
    for problem in check_length_values(layout, name, values, tokens):
        raise UsageError(problem)
    return values


class SelectedKeys:
    """The keys that some rows selected, out of the ``keys`` of their document.

    ``indices`` (rows, N2, K), ``visible`` (rows, 1, 1). An entry without a key (-1, or a key that its row may not
    attend to) reads from and writes to a row of zeros that follows the keys. Entries behind the keys of every row are
    left out, so that a short sequence costs little with any top-k.
    """

    def __init__(self, indices: Tensor, visible: Tensor, keys: int):
        if bool(((indices[..., :-1] < 0) & (indices[..., 1:] >= 0)).any()):
            raise UsageError("sparse_indices must have its keys first and -1 after them, in every row")
        self.indices = indices[..., : max(1, int((indices >= 0).sum(-1).max()))]
        """The indices up to the last key of any row: (rows, N2, entries)."""
        self.valid = (self.indices >= 0) & (self.indices < visible)
        """Entries that hold a key: (rows, N2, entries)."""
        heads = torch.arange(indices.shape[1], device=indices.device)[:, None]
        self._rows = (torch.where(self.valid, self.indices, keys) + heads * (keys + 1)).flatten()

    def gather(self, tensor: Tensor) -> Tensor:
        """Return the selected keys (rows, N2, entries, D) of a tensor that :func:`with_zero_row` returned."""
        return tensor.flatten(0, 1).index_select(0, self._rows).view(*self.valid.shape, tensor.shape[-1])

    def scatter_add_(self, total: Tensor, values: Tensor) -> None:
        """Add ``values`` (rows, N2, entries, D) to their keys in ``total``, (N2, keys + 1, D)."""
        total.flatten(0, 1).index_add_(0, self._rows, values.reshape(-1, values.shape[-1]))


def with_zero_row(tensor: Tensor) -> Tensor:
    """Transpose (keys, N2, D) to (N2, keys + 1, D), in the dtype to compute in. The last row is zero."""
    keys, heads, size = tensor.shape
    padded = torch.zeros(heads, keys + 1, size, dtype=compute_dtype(tensor), device=tensor.device)
    padded[:, :keys] = tensor.transpose(0, 1)
    return padded


def without_zero_row(padded: Tensor) -> Tensor:
    """Return the inverse of :func:`with_zero_row`."""
    return padded[:, :-1].transpose(0, 1)


def heads_of(tensor: Tensor, key_heads: int) -> Tensor:
    """Group the heads of (rows, N1, ...) by key head: (rows, N2, N1/N2, ...), in the dtype to compute in."""
    return tensor.to(compute_dtype(tensor)).unflatten(1, (key_heads, -1))
