"""DTensor's placements, implemented without DTensor: split a tensor into local tensors, and assemble it again."""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Sequence

import torch
from torch import Tensor
from torch.distributed.tensor import Partial, Placement, Replicate, Shard

Placements = tuple[Placement, ...]


def every_placement(ndim: int, mesh_dims: int) -> list[Placements]:
    """Return all combinations of Replicate, Shard and Partial of a tensor over a mesh."""
    one = [Replicate(), *map(Shard, range(ndim)), Partial()]
    return list(itertools.product(one, repeat=mesh_dims))


def split(full: Tensor, mesh: Sequence[int], placements: Placements) -> list[Tensor]:
    """Return the local tensors of ``full`` in rank order. Partial ones differ, and are larger than their sum."""
    if not mesh:
        return [full]
    ranks, placement = mesh[0], placements[0]
    if isinstance(placement, Shard):
        parts = list(full.chunk(ranks, placement.dim))
        nothing = full.narrow(placement.dim, 0, 0)
        parts += [nothing] * (ranks - len(parts))
    elif placement.is_partial():
        parts = [full * (2 * ranks - 1)] + [full * -2] * (ranks - 1)
    else:
        parts = [full] * ranks
    return [local for part in parts for local in split(part, mesh[1:], placements[1:])]


def assemble(locals_: Sequence[Tensor], mesh: Sequence[int], placements: Placements) -> Tensor | None:
    """Return the tensor with these local tensors, or ``None`` if they do not fit together."""
    if not mesh:
        return locals_[0]
    inner = math.prod(mesh[1:])
    parts = [assemble(locals_[i : i + inner], mesh[1:], placements[1:]) for i in range(0, len(locals_), inner)]
    if any(part is None for part in parts):
        return None
    tensors: list[Tensor] = parts  # type: ignore[assignment]
    placement = placements[0]
    if isinstance(placement, Shard):
        dim = placement.dim
        if len({(*x.shape[:dim], *x.shape[dim + 1 :]) for x in tensors}) > 1:
            return None
        return torch.cat(tensors, dim)
    if len({x.shape for x in tensors}) > 1:
        return None
    if placement.is_partial():
        return functools.reduce(torch.add, tensors)
    return tensors[0] if all(torch.equal(tensors[0], x) for x in tensors[1:]) else None


def integers(*shape: int, seed: int) -> Tensor:
    """Return small integers, whose products and sums are exact in float32 in any order."""
    return torch.randint(-3, 4, shape, generator=torch.Generator().manual_seed(seed)).float()
