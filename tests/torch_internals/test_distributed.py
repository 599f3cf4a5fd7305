"""Process groups, collectives and device meshes. tests/emulator/test_trainer.py has HCCL's groups on NPUs."""

from __future__ import annotations

from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from torch.distributed.device_mesh import init_device_mesh

from tests._helpers.multirank import run_on_ranks
from torchtitan_npu.planner import fake_ranks
from torchtitan_npu.torch_internals.distributed import (
    AsyncCollectiveTensor,
    hccl_communicator,
    override_groups,
    process_group,
    set_timeout,
)


def on_one_rank() -> tuple[bool, bool, list[float]]:
    world = dist.group.WORLD
    same = process_group(world.group_name) is world and process_group(world) is world
    pending = functional.all_reduce(torch.ones(2), "sum", world)
    return same, isinstance(pending, AsyncCollectiveTensor), pending.trigger_wait().tolist()


def test_groups_and_pending_results() -> None:
    assert run_on_ranks(1, on_one_rank) == [(True, True, [1.0, 1.0])]


def ask_gloo_for_hccl() -> None:
    with pytest.raises(AttributeError, match="get_hccl_comm_name"):  # the group's backend is found; gloo is not HCCL
        hccl_communicator(dist.group.WORLD, torch.device("cpu"))  # type: ignore[arg-type]


def test_the_backend_of_a_group() -> None:
    run_on_ranks(1, ask_gloo_for_hccl)


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


def test_a_group_without_npus_keeps_its_timeout() -> None:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1, timeout=timedelta(seconds=7))
    try:
        group = dist.group.WORLD
        assert group is not None
        set_timeout(group, timedelta(seconds=1))
        assert group._get_backend(torch.device("cpu")).options._timeout == timedelta(seconds=7)
    finally:
        dist.destroy_process_group()
