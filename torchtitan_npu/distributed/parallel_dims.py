"""Workaround: TorchTitan rejects two layouts for want of an FSDP mesh of size one.

Faults of TorchTitan 0.2.2:

- Expert parallel over the tensor-parallel ranks alone (TP2 EP2 on 2 ranks). The plans shard the dense parameters over
  ``fsdp`` whatever its size, but that mesh is built only if it is larger than one
  (deepseek_v3/infra/parallelize.py:167).
- Replicas of a tensor- or pipeline-parallel model. TorchTitan's DDP takes no model that is parallel otherwise. HSDP
  with one shard per replica does the same work.

Delete this file when TorchTitan keeps ``fsdp`` meshes of size one and uses HSDP for such replicas.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields

from torch.distributed.device_mesh import DeviceMesh
from torchtitan.distributed import ParallelDims as TitanParallelDims

from torchtitan_npu.distributed.mesh_groups import build_mesh_with_own_groups


class ParallelDims(TitanParallelDims):
    """TorchTitan's layout of a job, with an FSDP mesh also for these two layouts."""

    hccl_buffers: Mapping[str, int] = {}
    """MiB of HCCL's buffers by mesh dimension, for those that have their own size."""

    @classmethod
    def of(cls, dims: TitanParallelDims) -> ParallelDims:
        return cls(**{f.name: getattr(dims, f.name) for f in fields(dims) if not f.name.startswith("_")})

    def build_mesh(self) -> DeviceMesh:
        return build_mesh_with_own_groups(self, self.hccl_buffers)

    @property
    def fsdp_enabled(self) -> bool:
        replicas_of_parallel_model = self.dp_replicate_enabled and (self.tp_enabled or self.pp_enabled)
        return super().fsdp_enabled or replicas_of_parallel_model

    def _mesh_exist(self, name: str, degree: int) -> bool:
        return (name == "fsdp" and (self.fsdp_enabled or self.ep_enabled)) or super()._mesh_exist(name, degree)
