"""What DTensor's placements mean, written down again without DTensor: a tensor's part on each rank, and back."""

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
    """All of Replicate, Shard and Partial for a tensor of ``ndim`` dimensions, over each of ``mesh_dims``."""
    one = [Replicate(), *map(Shard, range(ndim)), Partial()]
    return list(itertools.product(one, repeat=mesh_dims))


def cut(whole: Tensor, mesh: Sequence[int], placements: Placements) -> list[Tensor]:
    """The parts of ``whole`` on the ranks of ``mesh``, in rank order. Parts of a sum are unlike, and larger than it."""
    if not mesh:
        return [whole]
    ranks, placement = mesh[0], placements[0]
    if isinstance(placement, Shard):
        parts = list(whole.chunk(ranks, placement.dim))
        nothing = whole.narrow(placement.dim, 0, 0)
        parts += [nothing] * (ranks - len(parts))
    elif placement.is_partial():
        parts = [whole * (2 * ranks - 1)] + [whole * -2] * (ranks - 1)
    else:
        parts = [whole] * ranks
    return [local for part in parts for local in cut(part, mesh[1:], placements[1:])]


def assemble(locals_: Sequence[Tensor], mesh: Sequence[int], placements: Placements) -> Tensor | None:
    """The tensor whose parts these are; ``None`` if they are not the parts of one."""
    if not mesh:
        return locals_[0]
    inner = math.prod(mesh[1:])
    parts = [assemble(locals_[i : i + inner], mesh[1:], placements[1:]) for i in range(0, len(locals_), inner)]
    if any(part is None for part in parts):
        return None
    whole: list[Tensor] = parts  # type: ignore[assignment]
    placement = placements[0]
    if isinstance(placement, Shard):
        dim = placement.dim
        if len({(*x.shape[:dim], *x.shape[dim + 1 :]) for x in whole}) > 1:
            return None
        return torch.cat(whole, dim)
    if len({x.shape for x in whole}) > 1:
        return None
    if placement.is_partial():
        return functools.reduce(torch.add, whole)
    return whole[0] if all(torch.equal(whole[0], x) for x in whole[1:]) else None


def integers(*shape: int, seed: int) -> Tensor:
    """Small whole numbers: their products and sums are exact in float32, in any order."""
    return torch.randint(-3, 4, shape, generator=torch.Generator().manual_seed(seed)).float()
