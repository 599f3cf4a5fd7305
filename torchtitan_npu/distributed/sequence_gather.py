"""Gather a sequence that context parallel has sharded."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Partial, Replicate


def gathered(x: DTensor) -> Tensor:
    """Return the full tensor, in the order of the ranks. The gradient is a sum over the ranks."""
    return x.redistribute(placements=[Replicate()]).to_local(grad_placements=[Partial()])


def head_tail_order(seq_len: int, ranks: int) -> Tensor:
    """Return the token indices (seq_len) in the order in which head-tail load balancing gives them to the ranks.

    Of 2n chunks, rank r of n has chunk r and chunk 2n - 1 - r.
    """
    chunks = torch.arange(seq_len).chunk(2 * ranks)
    return torch.cat([chunks[i] for rank in range(ranks) for i in (rank, -1 - rank)])


def in_sequence_order(tensor: Tensor, ranks: int, dim: int) -> Tensor:
    """Undo :func:`head_tail_order` along ``dim`` of a gathered tensor."""
    chunks = tensor.chunk(2 * ranks, dim)
    return torch.cat([*chunks[::2], *chunks[1::2][::-1]], dim)
