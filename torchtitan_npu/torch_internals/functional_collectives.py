"""Collectives with gradients. Seen on torch 2.11 to 2.13."""

from __future__ import annotations

from torch import Tensor
from torch.distributed import _functional_collectives as collectives
from torch.distributed.device_mesh import DeviceMesh

# torch 2.13 renamed the function and warns about the old name; torch 2.11 has only the old one
_all_gather = getattr(collectives, "all_gather_single_autograd", None) or collectives.all_gather_tensor_autograd


def all_gather_with_gradient(tensor: Tensor, dim: int, mesh: DeviceMesh) -> Tensor:
    """Start to gather ``tensor`` along ``dim`` from all ranks of a one-dimensional ``mesh``.

    The first operator on the result waits for it. The backward pass reduce-scatters the gradient.
    """
    return _all_gather(tensor, dim, (mesh, 0))
