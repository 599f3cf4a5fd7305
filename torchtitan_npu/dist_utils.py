"""Small helpers for distributed tensors and ranks that any module may use."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from datetime import timedelta
from typing import Any, NamedTuple, TypeVar

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


def all_gather_kv(x: DTensor, async_op: bool = False) -> Tensor:
    """Gather keys or values from all context-parallel ranks, in the order of the ranks.

    The gradient is summed over the ranks by a reduce-scatter. With ``async_op``, its first use waits.
    """
    return x.redistribute(placements=[Replicate()], async_op=async_op).to_local(grad_placements=[Partial()])


class SequenceSplit(NamedTuple):
    """The chunks into which context parallel splits a sequence.

    Rank r has chunk r of ``ranks``. With ``head_tail`` it has chunks r and 2 * ranks - 1 - r of twice as many, so that
    causal attention is equal work on every rank.
    """

    ranks: int
    head_tail: bool

    @property
    def chunks(self) -> int:
        return 2 * self.ranks if self.head_tail else self.ranks

    def chunks_of(self, rank: int) -> list[int]:
        """Return the numbers of the chunks of ``rank``, in its order."""
        return [rank, self.chunks - 1 - rank] if self.head_tail else [rank]

    def token_indices(self, rank: int, seq_len: int, device: str | torch.device = "cpu") -> Tensor:
        """Return the indices (seq_len / ranks) of the tokens of ``rank``, in its order."""
        chunks = torch.arange(seq_len, device=device).chunk(self.chunks)
        return torch.cat([chunks[number] for number in self.chunks_of(rank)])

    def in_sequence_order(self, gathered: Tensor, dim: int) -> Tensor:
        """Reorder the tokens of all ranks, in the order of the ranks, along ``dim``."""
        if not self.head_tail:
            return gathered
        chunks = gathered.chunk(self.chunks, dim)
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
