"""The least cost of any valid placement of matmul and matmul_backward, by DTensor's estimate of a redistribution."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Shard
from torch.distributed.tensor._dtensor_spec import DTensorSpec

from tests._helpers.matmul_brute_force import Valid
from tests._helpers.matmul_calls import Call, P, cost_of, spec_of
from tests._helpers.shards import Placements, every_placement

Placed = dict[Placements, DTensorSpec]
"""The specs of a tensor in every placement."""


def placed_everywhere(call: Call, mesh: DeviceMesh) -> list[Placed]:
    return [{here: spec_of(x, mesh, here) for here in every_placement(x.ndim, mesh.ndim)} for x in call.inputs]


@functools.cache
def costs_from(spec: DTensorSpec) -> dict[Placements, float]:
    """Return the cost of bringing a tensor from ``spec`` to each placement. Partial cannot be introduced.

    One rank sends nothing, although the estimate counts a collective.
    """
    alone = spec.mesh.size() == 1
    return {
        target: math.inf if _introduces_partial(spec.placements, target) else 0.0 if alone else cost_of(spec, target)
        for target in every_placement(spec.ndim, spec.mesh.ndim)
    }


def _introduces_partial(before: Placements, after: Placements) -> bool:
    return any(new == P and old != P for old, new in zip(before, after, strict=True))


def cheapest_valid(valid: Valid, inputs: tuple[DTensorSpec, ...]) -> tuple[float, list[tuple[Placements, ...]]]:
    """Return the least cost of bringing ``inputs`` to a valid placement, and all placements with that cost."""
    costs = [costs_from(spec) for spec in inputs]
    totals = {targets: sum(cost[x] for cost, x in zip(costs, targets, strict=True)) for targets in valid}
    least = min(totals.values())
    return least, [targets for targets, total in totals.items() if total == least]


def reductions_left(gradient: Placements, right: Placements) -> tuple[bool, ...]:
    """Return the mesh dimensions over which left's gradient is Partial although ``right`` is not sharded there."""
    return tuple(x.is_partial() and not isinstance(now, Shard) for x, now in zip(gradient, right, strict=True))


def cost_later(call: Call, inputs: Sequence[Placed], gradient: Placements | None, right: Placements) -> float:
    """Return the least cost of reducing left's ``gradient`` later."""
    if gradient is None or not (call.mask and call.mask[0][0]):
        return 0.0
    owed = reductions_left(gradient, right)
    return _least_without(inputs[1][gradient], owed) if any(owed) else 0.0


@functools.cache
def _least_without(gradient: DTensorSpec, owed: tuple[bool, ...]) -> float:
    return min(
        cost
        for target, cost in costs_from(gradient).items()
        if all(
            new != P if left_over else new == old
            for new, old, left_over in zip(target, gradient.placements, owed, strict=True)
        )
    )


def least_costs(call: Call, inputs: Sequence[Placed], valid: Valid) -> list[float]:
    """Return the least cost for ``inputs`` in every combination of placements, in ``itertools.product``'s order.

    A cost includes the redistribution of each input and a reduction that is left for later.
    """
    later = [[cost_later(call, inputs, results[0], right) for results in valid.values()] for right in inputs[-1]]
    totals = torch.zeros(1, len(valid), dtype=torch.float64)  # (combinations of the inputs so far, valid placements)
    for placed, targets in zip(inputs, zip(*valid, strict=True), strict=True):
        costs = [[costs_from(spec)[target] for target in targets] for spec in placed.values()]
        totals = (totals[:, None] + torch.tensor(costs, dtype=torch.float64)).flatten(0, 1)
    totals = totals.unflatten(0, (-1, len(later))) + torch.tensor(later, dtype=torch.float64)
    return totals.amin(-1).flatten().tolist()
