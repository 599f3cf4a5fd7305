"""Checks the swap optimizer on DTensors: FSDP2 on a mesh of one, TorchTitan's containers, checkpoints through DCP.

Part of ``swap_optimizer.py --check``. A sharded state is a DTensor on the device's mesh whose local tensor is in host
memory, which only a machine with a device has.
"""

from __future__ import annotations

import tempfile
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_model_state_dict, set_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from torchtitan_npu import platform

platform.prepare()

from torchtitan.components.optimizer import OptimizersContainer  # noqa: E402

from torchtitan_npu.components.swap_optimizer.container import SwapContainer  # noqa: E402

STEPS, SAVED = 8, 4
OPTIONS = {"lr": 1e-2, "weight_decay": 0.1, "fused": True}

Job = tuple[nn.Module, OptimizersContainer]


def make(device: torch.device, swap: bool) -> Job:
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(300, 1500), nn.Linear(1500, 70)).to(device)
    fully_shard(model, mesh=init_device_mesh(device.type, (1,)))
    if swap:
        return model, SwapContainer([model], torch.optim.AdamW, dict(OPTIONS), slice_mib=1, fraction=1.0)
    return model, OptimizersContainer([model], torch.optim.AdamW, dict(OPTIONS))


def train(job: Job, device: torch.device, first: int, last: int) -> None:
    model, optimizers = job
    for number in range(first, last):
        inputs = torch.randn(16, 300, generator=torch.Generator().manual_seed(number)).to(device)
        optimizers.zero_grad()
        model(inputs).square().mean().backward()
        optimizers.step()


def save(job: Job, folder: str) -> None:
    """Save, and change everything while the files are written."""
    future: Any = dcp.async_save({"model": get_model_state_dict(job[0]), **job[1].state_dict()}, checkpoint_id=folder)
    job[1].step()
    future.result()


def load(job: Job, folder: str) -> None:
    state = {"model": get_model_state_dict(job[0]), **job[1].state_dict()}
    dcp.load(state, checkpoint_id=folder)
    set_model_state_dict(job[0], state.pop("model"))
    job[1].load_state_dict(state)


def assert_equal(ours: Job, theirs: Job, swap: bool) -> None:
    """The same parameters and states, bit by bit; placed alike, the swapped ones in host memory."""
    mine, reference = ours[1].state_dict(), theirs[1].state_dict()
    assert mine.keys() == reference.keys()
    pairs = [(key, mine[key], value) for key, value in reference.items() if isinstance(value, torch.Tensor)]
    pairs += [("parameter", p, q) for p, q in zip(ours[0].parameters(), theirs[0].parameters(), strict=True)]
    for name, p, q in pairs:
        assert isinstance(p, DTensor) == isinstance(q, DTensor), name
        if isinstance(p, DTensor) and isinstance(q, DTensor):
            assert (p.device_mesh, p.placements) == (q.device_mesh, q.placements), name
            p, q = p.to_local(), q.to_local()
            assert not (swap and "exp_avg" in name) or p.device.type == "cpu", name
        assert torch.equal(p.cpu(), q.cpu()), name


def check_sharded(device: torch.device) -> None:
    """Trained through, and saved and loaded with and without swap, it is all the same; the metrics make sense."""
    backend = (
        "gloo" if device.type == "cpu" else f"cpu:gloo,{device.type}:{dist.get_default_backend_for_device(device)}"
    )
    dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    straight = make(device, False)
    train(straight, device, 0, STEPS)
    for before, after in ((True, True), (True, False), (False, True)):
        first, second = make(device, before), make(device, after)
        train(first, device, 0, SAVED)
        with tempfile.TemporaryDirectory() as folder:
            save(first, folder)
            load(second, folder)
        train(second, device, SAVED, STEPS)
        assert_equal(second, straight, after)
        if isinstance(second[1], SwapContainer):
            metrics = second[1].metrics()
            print(f"  {metrics}")
            moved = metrics["swap_optimizer/moved(GiB)"] * 2**30
            # 8 bytes a parameter each way, and what starts at a multiple of 128 elements
            assert 0 <= moved / 2 - 8 * sum(p.numel() for p in second[0].parameters()) < 4 * 8 * 128, moved
            assert device.type == "cpu" or 0 < metrics["swap_optimizer/link(%)"] < 150, metrics
    dist.destroy_process_group()
