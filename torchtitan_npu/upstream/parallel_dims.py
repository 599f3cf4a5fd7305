"""Workaround: TorchTitan rejects two layouts for want of an FSDP mesh of size one, and EP shares FSDP's communicator.

Faults of TorchTitan 0.2.2:

- Expert parallel over the tensor-parallel ranks alone (TP2 EP2 on 2 ranks). The plans shard the dense parameters over
  ``fsdp`` whatever its size, but that mesh is built only if it is larger than one
  (deepseek_v3/infra/parallelize.py:167).
- Replicas of a tensor- or pipeline-parallel model. TorchTitan's DDP takes no model that is parallel otherwise. HSDP
  with one shard per replica does the same work.

- Mesh dimensions over all ranks use the default process group. If EP and FSDP both span all ranks, their collectives
  queue on one communicator: an all-to-all waits for the gather of the next layer. On an NPU, EP gets its own group.

Delete this file when TorchTitan keeps ``fsdp`` meshes of size one, uses HSDP for such replicas, and takes a backend
or options for each mesh dimension.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from typing import Any

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torchtitan.distributed import ParallelDims as TitanParallelDims

from torchtitan_npu import platform
from torchtitan_npu.torch_internals.device_mesh import override_groups
from torchtitan_npu.torch_internals.hccl import hccl_options
from torchtitan_npu.upstream.rebind import rebound


def own_groups(hccl_buffers: Mapping[str, int]) -> dict[str, int]:
    """Return the mesh dimensions with a process group of their own, and their buffers in MiB; 0 is HCCL's default."""
    return {"ep": 0, **hccl_buffers} if platform.job_backend() == "npu" else {}


class ParallelDims(TitanParallelDims):
    """TorchTitan's layout of a job, with an FSDP mesh also for these two layouts, and on an NPU a group for EP."""

    hccl_buffers: Mapping[str, int] = {}
    """MiB of HCCL's buffers by mesh dimension, for those that have their own size."""

    @classmethod
    def of(cls, dims: TitanParallelDims) -> ParallelDims:
        return cls(**{f.name: getattr(dims, f.name) for f in fields(dims) if not f.name.startswith("_")})

    def build_mesh(self) -> DeviceMesh:
        overrides = self._group_overrides()

        def with_own_groups(*args: Any, **kwargs: Any) -> DeviceMesh:
            mesh = init_device_mesh(*args, **kwargs)
            override_groups(mesh, overrides)
            return mesh

        return rebound(TitanParallelDims.build_mesh, {init_device_mesh: with_own_groups})(self)

    def _group_overrides(self) -> dict[str, Any]:
        """Return the dimensions with a group of their own, and its options or, in a dry run, its backend."""
        sizes: dict[str, int] = {name: getattr(self, name) for name in ("ep", "tp", "cp", "pp", "dp_replicate", "etp")}
        sizes["fsdp"] = self.dp_shard * self.cp
        groups = own_groups(self.hccl_buffers)
        used = {name: buffer_mib for name, buffer_mib in groups.items() if (sizes.get(name) or self.ep) > 1}
        if used and dist.get_backend() == "fake":
            return dict.fromkeys(used, "fake")
        return {name: hccl_options(buffer_mib) for name, buffer_mib in used.items()}

    @property
    def fsdp_enabled(self) -> bool:
        replicas_of_parallel_model = self.dp_replicate_enabled and (self.tp_enabled or self.pp_enabled)
        return super().fsdp_enabled or replicas_of_parallel_model

    def _mesh_exist(self, name: str, degree: int) -> bool:
        return (name == "fsdp" and (self.fsdp_enabled or self.ep_enabled)) or super()._mesh_exist(name, degree)
