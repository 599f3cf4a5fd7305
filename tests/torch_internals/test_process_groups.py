"""A functional collective names its process group, and the name leads back to the group."""

import torch.distributed as dist

from torchtitan_npu.planner import fake_ranks
from torchtitan_npu.torch_internals.process_groups import process_group


def test_a_group_by_its_name() -> None:
    with fake_ranks(4):
        world = dist.group.WORLD
        assert world is not None
        assert process_group(world.group_name) is world and process_group(world) is world
