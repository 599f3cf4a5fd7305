"""Private torch APIs behind :mod:`torchtitan_npu.torch_internals.optim`."""

from __future__ import annotations

import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.testing._internal.distributed.fake_pg import FakeStore

from torchtitan_npu.torch_internals.optim import host_dtensor


def test_host_dtensor_keeps_the_memory_and_the_layout() -> None:
    torch.distributed.init_process_group("fake", rank=0, world_size=2, store=FakeStore())
    try:
        parameter = distribute_tensor(torch.ones(6, 4), init_device_mesh("cpu", (2,)), [Shard(0)])
        memory = torch.zeros(3, 4)
        state = host_dtensor(memory, parameter)
        assert isinstance(state, DTensor) and not state.requires_grad
        assert (state.shape, state.placements) == (parameter.shape, parameter.placements)
        assert state.to_local().data_ptr() == memory.data_ptr()
    finally:
        torch.distributed.destroy_process_group()
