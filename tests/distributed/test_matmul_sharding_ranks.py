"""matmul and matmul_backward on DTensors, on real ranks: dense results, and communication only where expected."""

from __future__ import annotations

import itertools
import os
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.debug import CommDebugMode

from tests._helpers.multirank import run_on_ranks
from tests._helpers.undecomposed_matmul import our_matmul_sharding, undecomposed_matmul
from tests.distributed.matmul_calls import (
    Call,
    P,
    Placements,
    R,
    assemble,
    backward,
    choice,
    every_placement,
    forward,
    split,
)

Outcome = list[tuple[Tensor, Placements] | None]
"""The local tensors and placements of the outputs of one call on one rank."""


def placed(full: Tensor, mesh: DeviceMesh, placements: Placements) -> DTensor:
    local = split(full, tuple(mesh.shape), placements)[mesh.get_rank()]
    return DTensor.from_local(local, mesh, placements, run_check=False, shape=full.shape, stride=full.stride())


def call_on_ranks(shapes: tuple[str, ...]) -> list[Outcome]:
    """Call each operator with inputs in every combination of placements over a one-dimensional mesh."""
    mesh = init_device_mesh("cpu", (int(os.environ["WORLD_SIZE"]),))
    outcomes: list[Outcome] = []
    with undecomposed_matmul(), our_matmul_sharding(mesh), CommDebugMode() as communication:
        for call, placements in combinations(shapes):
            inputs = [placed(x, mesh, here) for x, here in zip(call.inputs, placements, strict=True)]
            before = communication.get_total_counts()
            results = call.op(*inputs, *call.mask)
            communicates = communication.get_total_counts() > before
            assert communicates == (choice(call, mesh, placements).cost > 0), placements
            outputs = results if isinstance(results, tuple) else (results,)
            outcomes.append([None if x is None else (x.to_local(), x.placements) for x in outputs])
    return outcomes


def combinations(shapes: tuple[str, ...]) -> list[tuple[Call, tuple[Placements, ...]]]:
    calls = [
        *(forward(name) for name in shapes),
        *(backward(name) for name in shapes),
        backward(shapes[0], (True, False)),
        backward(shapes[0], (False, True)),
    ]
    return [
        (call, placements)
        for call in calls
        for placements in itertools.product(*(every_placement(x.ndim, 1) for x in call.inputs))
    ]


@pytest.mark.parametrize("shapes", [("2d2d",), pytest.param(("3d2d", "1d3d"), marks=pytest.mark.slow)])
def test_every_combination_on_two_ranks(shapes: tuple[str, ...]) -> None:
    ranks = run_on_ranks(2, call_on_ranks, shapes)
    for (call, placements), *outcomes in zip(combinations(shapes), *ranks, strict=True):
        check(call.outputs, outcomes, (2,), placements)


def check(expected: Any, outcomes: list[Outcome], mesh: tuple[int, ...], placements: Any) -> None:
    """Check that all ranks have the same placements, and that their tensors make the dense result."""
    for full, *parts in zip(expected, *outcomes, strict=True):
        if full is None:
            assert parts == [None] * len(parts)
            continue
        assert len({part[1] for part in parts}) == 1, placements
        result = assemble([part[0] for part in parts], mesh, parts[0][1])
        assert result is not None and torch.equal(result, full), placements


def backward_of_sums_on_ranks() -> list[Outcome]:
    """Compute gradients of a product that is Partial, and narrower than its left factor."""
    mesh = init_device_mesh("cpu", (2, 2))
    call = backward("wide")
    outcomes: list[Outcome] = []
    with undecomposed_matmul(), our_matmul_sharding(mesh):
        for placements in SUMS:
            inputs = [placed(x, mesh, here) for x, here in zip(call.inputs, placements, strict=True)]
            outcomes.append([(x.to_local(), x.placements) for x in call.op(*inputs, *call.mask)])
    return outcomes


SUMS = [(grad, (R, R), (R, R)) for grad in ((P, P), (P, R), (R, P))]


def test_partial_gradients_are_reduced_where_they_are_narrow() -> None:
    """Leaving them Partial would cost nothing now."""
    for placements, *outcomes in zip(SUMS, *run_on_ranks(4, backward_of_sums_on_ranks), strict=True):
        check(backward("wide").outputs, outcomes, (2, 2), placements)
        (_, left_grad_at), _ = outcomes[0]  # type: ignore[misc]
        assert not any(x.is_partial() for x in left_grad_at), placements
