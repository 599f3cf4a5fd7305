"""Initial weights on CPU ranks: DTensor draws the same numbers on every rank, and the workaround one rank's."""

from __future__ import annotations

import copy

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from tests._helpers.multirank import run_on_ranks
from torchtitan_npu.distributed.cpu_ranks import initialize_as_one_rank


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(6, 3))

    def init_weights(self, buffer_device: torch.device | None = None) -> None:
        nn.init.normal_(self.weight)


def weights(as_one_rank: bool) -> Tensor:
    with torch.device("meta"):
        model = Model()
    unsharded = copy.deepcopy(model)
    fully_shard(model, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
    initialize_as_one_rank(unsharded if as_one_rank else None, [model])
    model.to_empty(device="cpu")
    torch.manual_seed(5)
    with torch.no_grad():
        model.init_weights()
    return model.weight.full_tensor()  # type: ignore[attr-defined]


def test_one_ranks_weights() -> None:
    torch.manual_seed(5)
    expected = torch.empty(6, 3).normal_()
    for actual in run_on_ranks(2, weights, True):
        assert torch.equal(actual, expected)


def test_dtensor_draws_the_same_numbers_on_every_cpu_rank() -> None:
    """If this fails, DTensor supports random numbers on CPU meshes, and the workaround can be deleted."""
    for actual in run_on_ranks(2, weights, False):
        assert torch.equal(actual[:3], actual[3:])
