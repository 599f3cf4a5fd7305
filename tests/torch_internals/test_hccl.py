"""HCCL's time-outs are left alone in groups without NPUs; tests/emulator/test_trainer.py has those with NPUs."""

from __future__ import annotations

from datetime import timedelta

import torch
import torch.distributed as dist

from torchtitan_npu.torch_internals.hccl import set_timeout


def test_a_group_without_npus_keeps_its_timeout() -> None:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1, timeout=timedelta(seconds=7))
    try:
        group = dist.group.WORLD
        assert group is not None
        set_timeout(group, timedelta(seconds=1))
        assert group._get_backend(torch.device("cpu")).options._timeout == timedelta(seconds=7)
    finally:
        dist.destroy_process_group()
