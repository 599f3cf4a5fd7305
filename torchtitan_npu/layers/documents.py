"""Document boundaries in a batch. Tokens attend only to tokens of their document."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

DOCUMENT_ENDS = "document_ends"
"""Entry of a batch, (bsz, seqlen) bool, that marks the last tokens of documents. Without it, eos tokens do."""


class CuSeqlens(NamedTuple):
    """The end of each document, one past its last token, in the concatenated rows of a batch.

    Unlike flash-attention's ``cu_seqlens`` they have no leading 0, as torch_npu's ``actual_seq_qlen``.
    """

    tensor: Tensor
    """(number of documents) int32, on the batch's device."""
    integers: tuple[int, ...]
    """The same values on the host, for operators that take integers."""

    @classmethod
    def from_integers(cls, integers: Sequence[int], device: torch.device) -> CuSeqlens:
        return cls(torch.tensor(integers, dtype=torch.int32, device=device), tuple(integers))

    def numbers(self, bsz: int) -> Tensor:
        """Return the index of each token's document, (bsz, tokens per row)."""
        positions = torch.arange(self.integers[-1], device=self.tensor.device, dtype=torch.int32)
        return torch.searchsorted(self.tensor, positions, right=True).view(bsz, -1)


class Documents(NamedTuple):
    """The documents of a batch, by the ends of their queries and of their keys. A row's end also ends a document."""

    cu_seqlens_q: CuSeqlens
    cu_seqlens_k: CuSeqlens

    @classmethod
    def from_tokens(cls, tokens: Tensor, eos_id: int) -> Documents:
        """Return the documents of ``tokens`` (bsz, seqlen), which end with ``eos_id``. Synchronises with the device."""
        return cls.from_last_tokens(tokens == eos_id)

    @classmethod
    def from_last_tokens(cls, is_last: Tensor) -> Documents:
        """Return the documents whose last tokens ``is_last`` (bsz, seqlen) marks. Synchronises with the device."""
        is_last = is_last.clone()
        is_last[:, -1] = True
        tensor = is_last.flatten().nonzero().squeeze(1).to(torch.int32) + 1
        ends = CuSeqlens(tensor, tuple(tensor.tolist()))
        return cls(ends, ends)

    def numbers(self, bsz: int) -> tuple[Tensor, Tensor]:
        """Return the index of each query's and each key's document, (bsz, queries) and (bsz, keys)."""
        return self.cu_seqlens_q.numbers(bsz), self.cu_seqlens_k.numbers(bsz)

    def split(self, number: int) -> list[Documents]:
        """Split into the documents of ``number`` microbatches with equally many rows."""
        total, device = self.cu_seqlens_k.integers[-1], self.cu_seqlens_k.tensor.device
        tokens, remainder = divmod(total, number)
        assert not remainder, f"{total} tokens in {number} microbatches"
        parts = []
        for first in range(0, total, tokens):
            inside = [end - first for end in self.cu_seqlens_k.integers if first < end <= first + tokens]
            parts.append(Documents(*[CuSeqlens.from_integers(inside, device)] * 2))
        return parts

    def groups(self, most: int) -> list[tuple[slice, slice, Documents]]:
        """Split into groups of at most ``most`` documents, each with the tokens of its queries and of its keys."""
        count = len(self.cu_seqlens_k.integers)
        if count <= most:
            return [(slice(0, self.cu_seqlens_q.integers[-1]), slice(0, self.cu_seqlens_k.integers[-1]), self)]
        device, query, key, groups = self.cu_seqlens_k.tensor.device, 0, 0, []
        for first in range(0, count, most):
            cu_seqlens_q, cu_seqlens_k = (ends.integers[first : first + most] for ends in self)
            group = Documents(
                CuSeqlens.from_integers([end - query for end in cu_seqlens_q], device),
                CuSeqlens.from_integers([end - key for end in cu_seqlens_k], device),
            )
            groups.append((slice(query, cu_seqlens_q[-1]), slice(key, cu_seqlens_k[-1]), group))
            query, key = cu_seqlens_q[-1], cu_seqlens_k[-1]
        return groups

    def part(self, row: int, seqlen: int, first: int, last: int) -> tuple[int, Documents]:
        """Return the first visible key and the documents of the tokens ``first`` to ``last`` (excluded) of one row.

        These tokens are the queries. Their keys start with the document of token ``first`` and end at ``last``.
        """
        ends = [end - row * seqlen for end in self.cu_seqlens_k.integers if row * seqlen < end <= (row + 1) * seqlen]
        start = max((end for end in ends if end <= first), default=0)
        inside = [min(end, last) for end in ends if end > first]
        inside = inside[: inside.index(last) + 1]
        device = self.cu_seqlens_k.tensor.device
        queries, keys = (CuSeqlens.from_integers([end - begin for end in inside], device) for begin in (first, start))
        return start, Documents(queries, keys)


def positions_in_documents(document_ends: Tensor) -> Tensor:
    """Return the position of each token in its document, (bsz, seqlen); ``document_ends`` marks the last tokens."""
    positions = torch.arange(document_ends.shape[1], device=document_ends.device).expand_as(document_ends)
    starts = torch.where(document_ends, positions + 1, 0).roll(1, dims=1)
    starts[:, 0] = 0
    return positions - starts.cummax(dim=1).values
