"""Bytes sent for the gradients of a product, including a reduction that is left for later: our choice and others.

The sizes are large enough that bytes matter more than the number of collectives. Fake tensors take no memory.
"""

from __future__ import annotations

import functools
import itertools
import random
from collections.abc import Callable

import torch
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor._dtensor_spec import DTensorSpec

from tests._helpers.collectives import Collectives
from tests._helpers.matmul_brute_force import Valid, every_valid
from tests._helpers.matmul_calls import Call, aten, backward, choice, specs
from tests._helpers.matmul_costs import cheapest_valid, reductions_left
from tests._helpers.shards import Placements, every_placement
from tests._helpers.undecomposed_matmul import our_matmul_sharding
from torchtitan_npu.planner import fake_device, fake_ranks

TOKENS = (16, 4096)
WIDE, NARROW = 8192, 2048


@functools.cache
def sent(mesh: DeviceMesh, shape: tuple[int, ...], before: Placements, after: Placements) -> int:
    """Return the bytes that a rank sends to redistribute a tensor from ``before`` to ``after``."""
    local = list(shape)
    for placement, ranks in zip(before, mesh.shape, strict=True):
        if isinstance(placement, Shard):
            local[placement.dim] //= ranks
    with fake_device():
        tensor = DTensor.from_local(torch.empty(local, device=mesh.device_type), mesh, before, run_check=False)
        with Collectives() as collectives:
            tensor.redistribute(mesh, after)
    return collectives.sent


def ours_and_cheapest(
    device: str, mesh_shape: tuple[int, ...], widths: tuple[int, int], wanted: Callable[..., bool], samples: int
) -> list[tuple[int, int]]:
    """Return the bytes of our choice, and of the choice with the least cost now, where the latter leaves a reduction.

    ``samples`` of the placements that are ``wanted`` are tried, always the same ones.
    """
    valid = _valid(mesh_shape)
    left, right = (torch.empty(shape, device="meta") for shape in ((*TOKENS, widths[0]), widths))
    call = Call(aten.matmul_backward.default, (left @ right, left, right), (), ([True, True],))
    everywhere = itertools.product(*(every_placement(x.ndim, len(mesh_shape)) for x in call.inputs))
    some = [placements for placements in everywhere if wanted(*placements)]
    totals = []
    with fake_ranks(2 ** len(mesh_shape)), our_matmul_sharding(mesh := init_device_mesh(device, mesh_shape)):
        for placements in random.Random(0).sample(some, min(samples, len(some))):
            inputs = specs(call, mesh, placements)
            _, cheapest = cheapest_valid(valid, inputs)
            if not all(any(reductions_left(valid[targets][0] or (), placements[-1])) for targets in cheapest):
                continue
            chosen = choice(call, mesh, placements)
            gradient = chosen.results[0]
            uncut = next(Shard(dim) for dim in range(left.ndim) if Shard(dim) not in gradient)
            wanted_at = tuple(uncut if x.is_partial() else x for x in gradient)

            total = functools.partial(_total, inputs, wanted_at)
            other = min(total(targets, valid[targets][0] or ()) for targets in cheapest)
            totals.append((total(chosen.targets, gradient), other))
    return totals


@functools.cache
def _valid(mesh_shape: tuple[int, ...]) -> Valid:
    """Return the valid placements, which do not depend on the sizes."""
    return every_valid(backward("3d2d"), mesh_shape)


def _total(
    inputs: tuple[DTensorSpec, ...], wanted_at: Placements, targets: tuple[Placements, ...], gradient: Placements
) -> int:
    """Return the bytes to bring the inputs to ``targets``, and left's gradient from ``gradient`` to ``wanted_at``."""
    _, left, _ = inputs
    moves = zip(inputs, targets, strict=True)
    return sum(sent(x.mesh, x.shape, x.placements, to) for x, to in moves) + sent(
        left.mesh, left.shape, gradient, wanted_at
    )
