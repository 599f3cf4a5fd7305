"""Small helpers for distributed tensors and ranks that any module may use."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor, Partial, Replicate

T = TypeVar("T")
FILES_TIMEOUT = timedelta(hours=2)
"""Ranks wait this long for another one that reads, writes or deletes files. ``comm.train_timeout_seconds`` is meant for
collectives between kernels."""


def local(tensor: Tensor) -> Tensor:
    """Return the local tensor of a DTensor, or ``tensor`` itself if it is not distributed."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


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


class Microbatches:
    """One value per microbatch, in order, for a keyword argument of a pipelined model that is not a tensor.

    torch's pipeline splits tensors among the keyword arguments by rows, also inside tuples, and passes anything else
    unchanged to every microbatch. A mask without a row per sequence would be split wrongly.
    """

    def __init__(self, values: Iterable[Any]) -> None:
        self.values = list(values)

    def map(self, function: Callable[[Any], Any]) -> Microbatches:
        return Microbatches(map(function, self.values))


def of_microbatch(index: int, kwargs: dict[str, Any] | None) -> dict[str, Any]:
    """Return the model's keyword arguments for the microbatch ``index``."""
    return {
        name: value.values[index] if isinstance(value, Microbatches) else value
        for name, value in (kwargs or {}).items()
    }


def new_file_group() -> dist.ProcessGroup | None:
    """Return a group of all ranks with this time-out. Collective."""
    group: dist.ProcessGroup | None = dist.new_group(backend="gloo", timeout=FILES_TIMEOUT)
    return group


def gather(value: T, group: dist.ProcessGroup | None) -> list[T]:
    """Return the ``value`` of each rank."""
    if not dist.is_initialized():
        return [value]
    values: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(values, value, group=group)
    return values
