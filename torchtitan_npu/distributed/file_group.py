"""A group in which ranks wait for each other's work on files."""

from __future__ import annotations

from datetime import timedelta
from typing import Any, TypeVar

import torch.distributed as dist

T = TypeVar("T")
FILES_TIMEOUT = timedelta(hours=2)
"""Ranks wait this long for another one that reads, writes or deletes files. ``comm.train_timeout_seconds`` is meant for
collectives between kernels."""


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
