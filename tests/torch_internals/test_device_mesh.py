"""A mesh dimension over all ranks can have a process group of its own."""

from __future__ import annotations

import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from torchtitan_npu.planner import fake_ranks
from torchtitan_npu.torch_internals.device_mesh import override_groups


def test_a_dimension_with_its_own_group() -> None:
    with fake_ranks(2):
        mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("world",))
        override_groups(mesh, {"ep": "fake"})
        shared = mesh._unflatten(0, (1, 2), ("pp", "fsdp"), backend_override={"pp": "fake"})
        own = mesh._unflatten(0, (1, 2), ("efsdp", "ep"))
        assert dist.group.WORLD is not None
        assert shared["fsdp"].get_group().group_name == dist.group.WORLD.group_name
        assert own["ep"].get_group().group_name != dist.group.WORLD.group_name
        assert own["ep"].size() == 2
