"""Collectives with gradients."""

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

from tests._helpers.multirank import run_on_ranks
from torchtitan_npu.torch_internals.functional_collectives import all_gather_with_gradient


def gather() -> tuple[Tensor, Tensor]:
    """On a rank: gather its number, and weight each gathered number by its place plus this rank's number."""
    rank = dist.get_rank()
    x = torch.tensor([float(rank)], requires_grad=True)
    gathered = all_gather_with_gradient(x, 0, init_device_mesh("cpu", (2,)))
    (gathered * torch.tensor([1.0, 2.0]) * (rank + 1)).sum().backward()
    return gathered.detach().clone(), x.grad


def test_gathers_and_reduces_the_gradient() -> None:
    for rank, (gathered, gradient) in enumerate(run_on_ranks(2, gather)):
        assert gathered.tolist() == [0.0, 1.0]
        assert gradient.tolist() == [(rank + 1) * 3.0]
