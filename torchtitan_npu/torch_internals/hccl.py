"""HCCL's process groups in torch_npu: options and time-outs.

Seen on torch_npu 2.13.
"""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import torch
from torch.distributed import ProcessGroup
from torch.distributed.constants import default_pg_timeout

__all__ = ["hccl_options", "options_of", "set_timeout"]


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
