"""Process groups, and results of collectives in flight. Seen on torch 2.11 to 2.13."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.distributed_c10d import ProcessGroup, _resolve_process_group

__all__ = ["AsyncCollectiveTensor", "ProcessGroup", "hccl_communicator", "process_group"]


def process_group(group: str | ProcessGroup) -> ProcessGroup:
    """Return the group of a functional collective. Its argument is the group's name; since torch 2.13 it may also be
    the group itself."""
    return _resolve_process_group(group) if isinstance(group, str) else group  # type: ignore[arg-type]


def hccl_communicator(group: ProcessGroup, device: torch.device) -> str:
    """Return the name that HCCL has for ``group``'s communicator on an NPU."""
    backend = group._get_backend(device)
    return backend.get_hccl_comm_name(dist.get_rank())  # type: ignore[attr-defined]  # HCCL takes the global rank
