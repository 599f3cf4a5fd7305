"""All valid placements of the operands of matmul and matmul_backward on a mesh, the least cost, and bytes sent.

Valid placements are found by brute force, which uses nothing of the code under test: it splits the inputs for every
rank, computes the local products and assembles the results. Placements are valid if that gives the dense result. Their
costs are DTensor's estimates of redistributions; the bytes are those of collectives on fake tensors.
"""

from __future__ import annotations

import functools
import itertools
import math
import random
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Placement, Shard
from torch.distributed.tensor._dtensor_spec import DTensorSpec

from tests._helpers.collectives import Collectives
from tests._helpers.undecomposed_matmul import our_matmul_sharding
from tests.distributed.matmul_calls import (
    Call,
    P,
    Placements,
    assemble,
    aten,
    backward,
    choice,
    cost_of,
    every_placement,
    spec_of,
    specs,
    split,
)
from torchtitan_npu.planner import fake_device, fake_ranks

Targets = tuple[Placements, ...]
"""The placements of the inputs after redistribution."""
Valid = dict[Targets, list[Placements | None]]
"""Valid placements of the inputs, and the placements of the outputs that they give."""


def is_valid(call: Call, mesh: tuple[int, ...], targets: Targets, results: tuple[Any, ...]) -> bool:
    """Return whether inputs with placements ``targets`` give outputs with placements ``results``."""
    locals_ = _local_results(call, [split(x, mesh, here) for x, here in zip(call.inputs, targets, strict=True)])
    return locals_ is not None and all(
        (parts[0] is None) if whole is None else _is(assemble(parts, mesh, placements), whole)
        for parts, placements, whole in zip(locals_, results, call.outputs, strict=True)
    )


def every_valid(call: Call, mesh: tuple[int, ...]) -> Valid:
    return valid_for_all(every_output(call, mesh))


def valid_for_all(outputs: list[dict[Targets, Placements]], mask: tuple[bool, ...] = (True, True)) -> Valid:
    """Return the placements that are valid for all outputs that ``mask`` selects, from those valid for each."""
    requested = [output for output, want in zip(outputs, mask, strict=False) if want]
    return {
        targets: [output[targets] if want else None for output, want in zip(outputs, mask, strict=False)]
        for targets in requested[0]
        if all(targets in output for output in requested)
    }


def every_output(call: Call, mesh: tuple[int, ...]) -> list[dict[Targets, Placements]]:
    """Return, for each output, the valid placements of the inputs with the placements of the output.

    All placements over all mesh dimensions are tried. A gradient has to be sharded as its operand, because one call
    computes both.
    """
    if not call.mask:
        return [_output(call, mesh, 0)]
    return [_output(call._replace(mask=([i == 0, i == 1],)), mesh, i) for i in range(2)]


def _output(call: Call, mesh: tuple[int, ...], index: int) -> dict[Targets, Placements]:
    whole = call.outputs[index]
    assert whole is not None
    parts = [{here: split(x, mesh, here) for here in every_placement(x.ndim, len(mesh))} for x in call.inputs]
    found = {}
    for targets in itertools.product(*parts):
        locals_ = _local_results(call, [some[here] for some, here in zip(parts, targets, strict=True)])
        if locals_ is None:
            continue
        for result in every_placement(whole.ndim, len(mesh)):
            like_operand = not call.mask or _cuts(result) == _cuts(targets[index + 1])
            if like_operand and _is(assemble(locals_[index], mesh, result), whole):
                found[targets] = result
                break
    return found


def _cuts(placements: Placements) -> tuple[Placement | None, ...]:
    return tuple(x if isinstance(x, Shard) else None for x in placements)


def _local_results(call: Call, parts: list[list[Tensor]]) -> list[Any] | None:
    try:
        return list(zip(*(call.local(inputs) for inputs in zip(*parts, strict=True)), strict=True))
    except RuntimeError:  # incompatible shapes
        return None


def _is(tensor: Tensor | None, whole: Tensor) -> bool:
    return tensor is not None and tensor.shape == whole.shape and torch.equal(tensor, whole)


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


TOKENS = (16, 4096)
"""With these sizes bytes matter more than the number of collectives."""
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
