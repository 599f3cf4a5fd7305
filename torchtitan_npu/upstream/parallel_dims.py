"""TorchTitan's ParallelDims, with FSDP meshes of size one where TorchTitan's plans need them."""

from __future__ import annotations

from dataclasses import fields

from torchtitan.distributed import ParallelDims as TitanParallelDims


class ParallelDims(TitanParallelDims):
    """The layout of a job, in which two products that TorchTitan leaves out train as well.

    Expert parallel over tensor-parallel ranks alone (TP2 EP2 on 2 ranks): the dense parameters are sharded over
    ``fsdp`` whatever its size, but TorchTitan builds that mesh only when it is larger than one
    (deepseek_v3/infra/parallelize.py:167). Replicas of a tensor- or pipeline-parallel model: TorchTitan's DDP takes
    no model that is parallel otherwise; HSDP with one shard a replica does the same work.
    """

    @classmethod
    def of(cls, dims: TitanParallelDims) -> ParallelDims:
        return cls(**{f.name: getattr(dims, f.name) for f in fields(dims) if not f.name.startswith("_")})

    @property
    def fsdp_enabled(self) -> bool:
        replicas_of_parallel_model = self.dp_replicate_enabled and (self.tp_enabled or self.pp_enabled)
        return super().fsdp_enabled or replicas_of_parallel_model

    def _mesh_exist(self, name: str, degree: int) -> bool:
        return (name == "fsdp" and (self.fsdp_enabled or self.ep_enabled)) or super()._mesh_exist(name, degree)
