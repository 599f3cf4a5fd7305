"""Process groups and collectives of torch still mean what they meant."""

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional

from tests._helpers.multirank import run_on_ranks
from torchtitan_npu.torch_internals.collectives import (
    AsyncCollectiveTensor,
    hccl_communicator,
    process_group,
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
