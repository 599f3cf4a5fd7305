"""Save and load swapped states: state dicts and DCP, with swap before and after or only once."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_model_state_dict, set_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torchtitan.components.optimizer import OptimizersContainer, build_optimizers

from tests._helpers.swap_training import DEVICE, SLICE_MIB, STEPS, assert_equal, groups, make_parameters, train
from tests.components.test_optimizers import DIMS
from torchtitan_npu.components.optimizers import SwapContainer
from torchtitan_npu.components.swap_optimizer.swap_adam import SwapAdamW
from torchtitan_npu.config.job_config import Optimizer


def test_state_dicts_with_and_without_swap() -> None:
    copies = make_parameters()
    plain = torch.optim.AdamW(groups(copies), lr=1e-2, fused=True)
    train(plain, copies, 0, STEPS)
    parameters = make_parameters()
    state: dict[str, Any] | None = None
    for number, cls in enumerate((SwapAdamW, torch.optim.AdamW, SwapAdamW)):
        options: dict[str, Any] = {"slice_mib": SLICE_MIB} if cls is SwapAdamW else {}
        swapping = cls(groups(parameters), lr=1e-2, fused=True, **options)
        if state is not None:
            swapping.load_state_dict(state)
        train(swapping, parameters, STEPS * number // 3, STEPS * (number + 1) // 3)
        state = copy.deepcopy(swapping.state_dict())
    assert_equal((swapping, parameters), (plain, copies))


TOTAL, SAVED = 8, 4
Job = tuple[nn.Module, OptimizersContainer]


def make(swap: bool) -> Job:
    torch.manual_seed(3)
    config = Optimizer(lr=1e-2, swap_slice_mib=1)
    model = nn.Sequential(nn.Linear(300, 1500), nn.Linear(1500, 70)).to(DEVICE)
    fully_shard(model, mesh=init_device_mesh(DEVICE.type, (1,)))
    if swap:
        return model, SwapContainer([model], config)
    return model, build_optimizers([model], config, DIMS)


def train_job(job: Job, first: int, last: int) -> None:
    model, optimizers = job
    for number in range(first, last):
        inputs = torch.randn(16, 300, generator=torch.Generator().manual_seed(number)).to(DEVICE)
        optimizers.zero_grad()
        model(inputs).square().mean().backward()
        optimizers.step()


def save(job: Job, folder: Path) -> None:
    """Save asynchronously, and change all states while the files are written."""
    future: Any = dcp.async_save({"model": get_model_state_dict(job[0]), **job[1].state_dict()}, checkpoint_id=folder)
    job[1].step()
    future.result()


def load(job: Job, folder: Path) -> None:
    state = {"model": get_model_state_dict(job[0]), **job[1].state_dict()}
    dcp.load(state, checkpoint_id=folder)
    set_model_state_dict(job[0], state.pop("model"))
    job[1].load_state_dict(state)


def assert_equal_jobs(swapping: Job, plain: Job, swap: bool) -> None:
    """Check that parameters and states are bit-identical, with equal placements and swapped states on the host."""
    mine, reference = swapping[1].state_dict(), plain[1].state_dict()
    assert mine.keys() == reference.keys()
    pairs = [(key, mine[key], value) for key, value in reference.items() if isinstance(value, torch.Tensor)]
    pairs += [("parameter", p, q) for p, q in zip(swapping[0].parameters(), plain[0].parameters(), strict=True)]
    for name, p, q in pairs:
        assert isinstance(p, DTensor) == isinstance(q, DTensor), name
        if isinstance(p, DTensor) and isinstance(q, DTensor):
            assert (p.device_mesh, p.placements) == (q.device_mesh, q.placements), name
            p, q = p.to_local(), q.to_local()
            assert not (swap and "exp_avg" in name) or p.device.type == "cpu", name
        assert torch.equal(p.cpu(), q.cpu()), name


@pytest.mark.parametrize(("before", "after"), [(True, True), (True, False), (False, True)])
def test_sharded_states_through_dcp(before: bool, after: bool, tmp_path: Path) -> None:
    """DTensors: training, saving and loading with and without swap agree, and the metrics are plausible."""
    cpu = DEVICE.type == "cpu"
    backend = "gloo" if cpu else f"cpu:gloo,{DEVICE.type}:{dist.get_default_backend_for_device(DEVICE)}"
    dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    try:
        straight, first, second = make(False), make(before), make(after)
        train_job(straight, 0, TOTAL)
        train_job(first, 0, SAVED)
        save(first, tmp_path)
        load(second, tmp_path)
        train_job(second, SAVED, TOTAL)
        assert_equal_jobs(second, straight, after)
    finally:
        dist.destroy_process_group()
    if isinstance(second[1], SwapContainer):
        metrics = second[1].metrics()
        moved = metrics["swap_optimizer/moved(GiB)"] * 2**30
        # 8 bytes per parameter and direction, with tensors aligned to 128 elements
        assert 0 <= moved / 2 - 8 * sum(p.numel() for p in second[0].parameters()) < 4 * 8 * 128
        assert cpu or 0 < metrics["swap_optimizer/link(%)"] < 150
