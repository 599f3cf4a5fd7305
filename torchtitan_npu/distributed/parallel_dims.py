"""Workaround: TorchTitan rejects two layouts for want of an FSDP mesh of size one, and lets EP share FSDP's group.

Faults of TorchTitan 0.2.2:

- Expert parallel over the tensor-parallel ranks alone (TP2 EP2 on 2 ranks). The plans shard the dense parameters over
  ``fsdp`` whatever its size, but that mesh is built only if it is larger than one
  (deepseek_v3/infra/parallelize.py:167).
- Replicas of a tensor- or pipeline-parallel model. TorchTitan's DDP takes no model that is parallel otherwise. HSDP
  with one shard per replica does the same work.
- Mesh dimensions over all ranks use the default process group. If EP and FSDP both span all ranks, their collectives
  queue on one communicator: an all-to-all waits for the gather of the next layer. On an NPU, EP gets a separate group,
  and so does each dimension with another size of HCCL's buffers.

Delete the first two parts when TorchTitan keeps ``fsdp`` meshes of size one and uses HSDP for such replicas, the third
when it takes a backend or options for each mesh dimension.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from dataclasses import fields
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torchtitan.config.job_config import Comm
from torchtitan.distributed import ParallelDims as TitanParallelDims

from torchtitan_npu import platform
from torchtitan_npu.log import log_on_first_rank
from torchtitan_npu.torch_internals.distributed import hccl_options, override_groups, set_timeout


class ParallelDims(TitanParallelDims):
    """TorchTitan's ParallelDims, with an FSDP mesh also for these two layouts, and groups for dimensions."""

    hccl_buffers: Mapping[str, int] = {}
    """MiB of HCCL's buffers by mesh dimension, for those with another size than the default."""

    @classmethod
    def from_titan(cls, dims: TitanParallelDims) -> ParallelDims:
        return cls(**{f.name: getattr(dims, f.name) for f in fields(dims) if not f.name.startswith("_")})

    def __setattr__(self, name: str, value: Any) -> None:
        # TorchTitan's build_mesh assigns the mesh of all ranks before it splits it into dimensions
        if name == "_world_mesh" and value is not None:
            override_groups(value, self._group_overrides())
        super().__setattr__(name, value)

    def _group_overrides(self) -> dict[str, Any]:
        """Return the dimensions with a separate group, and its options or, in a dry run, its backend."""
        groups = {"ep": 0, **self.hccl_buffers} if platform.job_backend() == "npu" else {}  # 0 is HCCL's default
        sizes = self._sizes()
        if unused := [name for name in self.hccl_buffers if sizes[name] == 1]:
            log_on_first_rank(
                f"comm.hccl_buffers has no effect for {', '.join(unused)}: this layout has one rank there"
            )
        used = {name: buffer_mib for name, buffer_mib in groups.items() if sizes[name] > 1}
        if used and dist.get_backend() == "fake":
            return dict.fromkeys(used, "fake")
        return {name: hccl_options(buffer_mib) for name, buffer_mib in used.items()}

    def _sizes(self) -> dict[str, int]:
        """Return the number of ranks along each mesh dimension, as TorchTitan's ``build_mesh`` computes them."""
        fsdp = self.dp_shard * self.cp
        sizes = {"pp": self.pp, "dp_replicate": self.dp_replicate, "fsdp": fsdp, "cp": self.cp, "tp": self.tp}
        etp = self.etp if self.ep > 1 else 1
        efsdp = fsdp * self.tp // (self.ep * etp) if self.ep > 1 else 1
        return sizes | {"ep": self.ep, "etp": etp, "efsdp": efsdp}

    @property
    def fsdp_enabled(self) -> bool:
        replicas_of_parallel_model = self.dp_replicate_enabled and (self.tp_enabled or self.pp_enabled)
        return super().fsdp_enabled or replicas_of_parallel_model

    def _mesh_exist(self, name: str, degree: int) -> bool:
        return (name == "fsdp" and (self.fsdp_enabled or self.ep_enabled)) or super()._mesh_exist(name, degree)


def flight_recorder_variables(comm: Comm, base_folder: str) -> dict[str, str]:
    """Return the variables of torch_npu's flight recorder, to be set before the first process group.

    TorchTitan sets NCCL's. The recorder keeps the
    last ``comm.trace_buf_size`` collectives, and writes them to a file if one times out.
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
    """Set the time-out of collectives in the default group and in the groups of ``meshes``, each of one dimension.

    ``torch.distributed`` changes those of NCCL and gloo only.
    """
    groups = {group.group_name: group for group in (dist.group.WORLD, *(mesh.get_group() for mesh in meshes)) if group}
    for group in groups.values():
        set_timeout(group, timeout)
