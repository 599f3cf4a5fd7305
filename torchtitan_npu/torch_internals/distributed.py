"""Process groups, of HCCL too, device meshes, and results of collectives in flight.

Seen on torch 2.11 to 2.13 and torch_npu 2.13.
"""

from __future__ import annotations

from collections.abc import Mapping
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed._functional_collectives import AsyncCollectiveTensor as AsyncCollectiveTensor
from torch.distributed.constants import default_pg_timeout
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.distributed_c10d import ProcessGroup as ProcessGroup
from torch.distributed.distributed_c10d import _resolve_process_group


class _Wait(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, pending: AsyncCollectiveTensor) -> Tensor:
        tensor = pending.trigger_wait()
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient


def waited(value: Any) -> Any:
    """Return ``value``. If it is a tensor that a collective is still writing, wait and return the tensor inside."""
    if not isinstance(value, AsyncCollectiveTensor):
        return value
    # no view without gradients: inputs of the other blocks are not views, and a view would need another graph
    return _Wait.apply(value) if torch.is_grad_enabled() else value.trigger_wait()


def process_group(group: str | ProcessGroup) -> ProcessGroup:
    """Return the group of a functional collective. Its argument is the group's name; since torch 2.13 it may also be
    the group itself."""
    return _resolve_process_group(group) if isinstance(group, str) else group  # type: ignore[arg-type]


def hccl_communicator(group: ProcessGroup, device: torch.device) -> str:
    """Return the name that HCCL has for ``group``'s communicator on an NPU."""
    backend = group._get_backend(device)
    return backend.get_hccl_comm_name(dist.get_rank())  # type: ignore[attr-defined]  # HCCL takes the global rank


def override_groups(mesh: DeviceMesh, overrides: Mapping[str, Any]) -> None:
    """Let dimensions that are later unflattened from ``mesh`` have groups of their own, by name of the dimension.

    A value is a backend's name or the options of a group. Without one, a dimension over all ranks uses the default
    group.
    """
    unflatten = mesh._unflatten

    def with_overrides(dim: Any, sizes: Any, names: Any, backend_override: Any = None) -> DeviceMesh:
        of_names = {name: value for name, value in overrides.items() if name in names}
        return unflatten(dim, sizes, names, backend_override={**of_names, **(backend_override or {})})

    mesh._unflatten = with_overrides  # type: ignore[assignment, method-assign]


def hccl_options(buffer_mib: int = 0) -> Any:
    """Return options for a new group with buffers of ``buffer_mib`` MiB; 0 means HCCL_BUFFSIZE, HCCL's default."""
    import torch_npu

    options = torch_npu._C._distributed_c10d.ProcessGroupHCCL.Options()
    options._timeout = default_pg_timeout  # a DeviceMesh passes it on
    if buffer_mib:
        options.hccl_config = {"hccl_buffer_size": buffer_mib}
    return options


def set_timeout(group: ProcessGroup, timeout: timedelta) -> None:
    """Let the watchdog of an HCCL group abort collectives that take longer than ``timeout``.

    ``torch.distributed`` sets time-outs for NCCL and gloo only.
    """
    if any(device.type == "npu" for device in group._device_types):
        group._get_backend(torch.device("npu"))._set_default_timeout(timeout)


def options_of(group: ProcessGroup) -> Any:
    """Return the options of an HCCL group: its time-out and ``hccl_config``."""
    return group._get_backend(torch.device("npu")).options
