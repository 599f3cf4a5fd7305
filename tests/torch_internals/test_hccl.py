"""Time-outs of HCCL are left alone in groups without NPUs; tests/emulator/test_trainer.py has those with NPUs."""

from __future__ import annotations

from datetime import timedelta

import torch.distributed as dist

from torchtitan_npu.planner import fake_ranks
from torchtitan_npu.torch_internals.hccl import set_timeout


def test_a_group_without_npus() -> None:
    with fake_ranks(2):
        assert dist.group.WORLD is not None
        set_timeout(dist.group.WORLD, timedelta(seconds=1))
