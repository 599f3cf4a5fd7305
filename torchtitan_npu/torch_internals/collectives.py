"""Process groups, results of collectives in flight, collectives with gradients. Seen on torch 2.11 to 2.13."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import _functional_collectives as collectives
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.distributed_c10d import ProcessGroup, _resolve_process_group

__all__ = ["AsyncCollectiveTensor", "ProcessGroup", "all_gather_with_gradient", "hccl_communicator", "process_group"]


def process_group(group: str | ProcessGroup) -> ProcessGroup:
    """Return the group of a functional collective. Its argument is the group's name; since torch 2.13 it may also be
    the group itself."""
    return _resolve_process_group(group) if isinstance(group, str) else group  # type: ignore[arg-type]


def hccl_communicator(group: ProcessGroup, device: torch.device) -> str:
    """Return the name that HCCL has for ``group``'s communicator on an NPU."""
    backend = group._get_backend(device)
    return backend.get_hccl_comm_name(dist.get_rank())  # type: ignore[attr-defined]  # HCCL takes the global rank


# torch 2.13 renamed the function and warns about the old name; torch 2.11 has only the old one
_all_gather = getattr(collectives, "all_gather_single_autograd", None) or collectives.all_gather_tensor_autograd


def all_gather_with_gradient(tensor: Tensor, dim: int, mesh: DeviceMesh) -> Tensor:
    """Start to gather ``tensor`` along ``dim`` from all ranks of a one-dimensional ``mesh``.

    The first operator on the result waits for it. The backward pass reduce-scatters the gradient.
    """
    return _all_gather(tensor, dim, (mesh, 0))
