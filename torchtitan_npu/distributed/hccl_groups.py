"""HCCL's time-outs and flight recorder, from TorchTitan's ``[comm]`` keys.

TorchTitan sets NCCL's variables, and ``torch.distributed`` changes the time-outs of NCCL and gloo only.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from datetime import timedelta

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torchtitan.config.job_config import Comm

from torchtitan_npu.torch_internals.distributed import set_timeout


def flight_recorder_variables(comm: Comm, base_folder: str) -> dict[str, str]:
    """Return the variables of torch_npu's flight recorder, to be set before the first process group.

    It keeps the last ``comm.trace_buf_size`` collectives, and writes them to a file if one times out.
    """
    if comm.trace_buf_size == 0:
        return {"TORCH_HCCL_TRACE_BUFFER_SIZE": "0"}
    folder = os.path.join(base_folder, comm.save_traces_folder)
    os.makedirs(folder, exist_ok=True)
    return {
        "TORCH_HCCL_TRACE_BUFFER_SIZE": str(comm.trace_buf_size),
        "TORCH_HCCL_DUMP_ON_TIMEOUT": "1",
        "TORCH_HCCL_ENABLE_MONITORING": "1",  # the monitoring thread writes the file
        "TORCH_HCCL_DEBUG_INFO_TEMP_FILE": os.path.join(folder, comm.save_traces_file_prefix),
    }


def set_timeouts(meshes: Iterable[DeviceMesh], timeout: timedelta) -> None:
    """Set the time-out of collectives in the default group and in the groups of ``meshes``, each of one dimension."""
    groups = {group.group_name: group for group in (dist.group.WORLD, *(mesh.get_group() for mesh in meshes)) if group}
    for group in groups.values():
        set_timeout(group, timeout)
