"""Workaround: TorchTitan gives mesh dimensions over all ranks one communicator, so EP shares FSDP's.

In TorchTitan 0.2.2, mesh dimensions over all ranks use the default process group. If EP and FSDP both span all ranks,
their collectives queue on one communicator: an all-to-all waits for the gather of the next layer. On an NPU, EP gets
its own group, and so does each dimension with its own size of HCCL's buffers.

Delete this file when TorchTitan takes a backend or options for each mesh dimension.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torchtitan.distributed import ParallelDims

from torchtitan_npu import platform
from torchtitan_npu.log import log_on_first_rank
from torchtitan_npu.titan_internals.rebind import rebound
from torchtitan_npu.torch_internals.device_mesh import override_groups
from torchtitan_npu.torch_internals.hccl import hccl_options


def own_groups(hccl_buffers: Mapping[str, int]) -> dict[str, int]:
    """Return the mesh dimensions with a process group of their own, and their buffers in MiB; 0 is HCCL's default."""
    return {"ep": 0, **hccl_buffers} if platform.job_backend() == "npu" else {}


def build_mesh_with_own_groups(dims: ParallelDims, hccl_buffers: Mapping[str, int]) -> DeviceMesh:
    """Build TorchTitan's meshes, with groups of their own for the dimensions of :func:`own_groups`."""
    overrides = _group_overrides(dims, hccl_buffers)

    def with_own_groups(*args: Any, **kwargs: Any) -> DeviceMesh:
        mesh = init_device_mesh(*args, **kwargs)
        override_groups(mesh, overrides)
        return mesh

    return rebound(ParallelDims.build_mesh, {init_device_mesh: with_own_groups})(dims)


def _group_overrides(dims: ParallelDims, hccl_buffers: Mapping[str, int]) -> dict[str, Any]:
    """Return the dimensions with a group of their own, and its options or, in a dry run, its backend."""
    groups, sizes = own_groups(hccl_buffers), _sizes(dims)
    if unused := [name for name in hccl_buffers if sizes[name] == 1]:
        log_on_first_rank(f"comm.hccl_buffers has no effect for {', '.join(unused)}: this layout has one rank there")
    used = {name: buffer_mib for name, buffer_mib in groups.items() if sizes[name] > 1}
    if used and dist.get_backend() == "fake":
        return dict.fromkeys(used, "fake")
    return {name: hccl_options(buffer_mib) for name, buffer_mib in used.items()}


def _sizes(dims: ParallelDims) -> dict[str, int]:
    """Return the number of ranks along each mesh dimension, as TorchTitan's ``build_mesh`` computes them."""
    fsdp = dims.dp_shard * dims.cp
    sizes = {"pp": dims.pp, "dp_replicate": dims.dp_replicate, "fsdp": fsdp, "cp": dims.cp, "tp": dims.tp}
    etp = dims.etp if dims.ep > 1 else 1
    efsdp = fsdp * dims.tp // (dims.ep * etp) if dims.ep > 1 else 1
    return sizes | {"ep": dims.ep, "etp": etp, "efsdp": efsdp}
