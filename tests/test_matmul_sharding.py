"""Strategies of matmul and matmul_backward: every combination of placements, by brute force, without communication."""

from __future__ import annotations

import functools
import itertools
import math
import random

import pytest
from torch.distributed.device_mesh import init_device_mesh

from tests.matmul_bytes import NARROW, WIDE, ours_and_cheapest
from tests.matmul_calls import (
    SHAPES,
    Call,
    backward,
    cheapest_valid,
    choice,
    every_valid,
    forward,
    is_valid,
    owes_a_sum,
    specs,
)
from tests.shards import Placements, every_placement
from torchtitan_npu.distributed import matmul_sharding
from torchtitan_npu.distributed.matmul_whole import our_matmul_sharding
from torchtitan_npu.rehearsal import fake_ranks

MASKS = ((True, True), (True, False), (False, True))
SAMPLES = 100
"""Of the combinations on a mesh of 2 × 2, where there are many more than that; always the same ones."""


@pytest.fixture
def remembered_costs(monkeypatch: pytest.MonkeyPatch) -> None:
    """There are a few hundred, and they are asked for a hundred thousand times."""
    monkeypatch.setattr(matmul_sharding, "_cost", functools.cache(matmul_sharding._cost))


EVERY = [
    *((forward(shapes), (2,), f"{shapes}-2") for shapes in SHAPES),
    *(
        (backward(shapes, mask), (2,), f"{shapes}-backward-{mask[0]:d}{mask[1]:d}-2")
        for shapes in SHAPES
        for mask in MASKS
    ),
    (forward("2d2d"), (2, 2), "2d2d-2x2"),
    (forward("3d2d"), (2, 2), "3d2d-2x2"),
    (forward("batched"), (2, 2), "batched-2x2"),
    (forward("broadcast"), (2, 2), "broadcast-2x2"),
    (forward("3d1d"), (2, 2), "3d1d-2x2"),
    (forward("1d3d"), (2, 2), "1d3d-2x2"),
    (backward("2d2d"), (2, 2), "2d2d-backward-11-2x2"),
    (forward("2d2d"), (4,), "2d2d-4"),  # one rank of four has no rows
    (backward("2d2d"), (4,), "2d2d-backward-4"),
]
SAMPLED = [
    *((backward("2d2d", mask), (2, 2), f"2d2d-backward-{mask[0]:d}{mask[1]:d}-2x2") for mask in MASKS[1:]),
    *((backward("3d2d", mask), (2, 2), f"3d2d-backward-{mask[0]:d}{mask[1]:d}-2x2") for mask in MASKS),
    *((backward(shapes), (2, 2), f"{shapes}-backward-11-2x2") for shapes in ("1d3d", "2d1d", "broadcast")),
]


def check(call: Call, mesh_shape: tuple[int, ...], some: list[tuple[Placements, ...]]) -> None:
    """Each choice is valid and no valid one costs less; where the inputs can stay as they are, they do.

    The exception is a gradient that would be left a sum: see the bytes below.
    """
    valid = every_valid(call, mesh_shape)
    checked = functools.cache(functools.partial(is_valid, call, mesh_shape))
    with fake_ranks(math.prod(mesh_shape)), our_matmul_sharding():
        mesh = init_device_mesh("cpu", mesh_shape)
        for placements in some:
            chosen = choice(call, mesh, placements)
            assert checked(chosen.targets, chosen.results), (placements, chosen)
            least, cheapest = cheapest_valid(valid, specs(call, mesh, placements))
            complete = [x for x in cheapest if not owes_a_sum(call, valid[x], placements[-1])]
            if complete:
                assert chosen.cost == least, (placements, chosen)
            if placements in complete:
                assert chosen.targets == placements


def everywhere(call: Call, mesh_shape: tuple[int, ...]) -> list[tuple[Placements, ...]]:
    return list(itertools.product(*(every_placement(x.ndim, len(mesh_shape)) for x in call.inputs)))


@pytest.mark.parametrize(("call", "mesh_shape"), [pytest.param(*case[:2], id=case[2]) for case in EVERY])
@pytest.mark.usefixtures("remembered_costs")
def test_every_combination(call: Call, mesh_shape: tuple[int, ...]) -> None:
    check(call, mesh_shape, everywhere(call, mesh_shape))


@pytest.mark.parametrize(("call", "mesh_shape"), [pytest.param(*case[:2], id=case[2]) for case in SAMPLED])
@pytest.mark.usefixtures("remembered_costs")
def test_some_of_many_combinations(call: Call, mesh_shape: tuple[int, ...]) -> None:
    check(call, mesh_shape, random.Random(0).sample(everywhere(call, mesh_shape), SAMPLES))


@pytest.mark.parametrize(("mesh_shape", "samples"), [((2,), 100), ((2, 2), 60)])
@pytest.mark.parametrize("widths", [(WIDE, NARROW), (NARROW, WIDE)])
@pytest.mark.usefixtures("remembered_costs")
def test_a_sum_is_left_for_later_only_where_that_sends_no_more(
    mesh_shape: tuple[int, ...], widths: tuple[int, int], samples: int
) -> None:
    """Where the cheapest choice leaves dX a sum that has to be taken: with that sum, ours sends no more."""

    def wanted(grad: Placements, left: Placements, right: Placements) -> bool:
        """A CPU has no all-to-all, and gathers instead; tests/rehearsal has all placements."""
        return any(x.is_partial() for x in grad) and not any(x.is_shard() for x in (*grad, *right))

    totals = ours_and_cheapest("cpu", mesh_shape, widths, wanted, samples)
    assert totals and all(our <= other for our, other in totals)
    if widths[0] > widths[1]:
        assert any(our < other for our, other in totals)


@pytest.mark.usefixtures("remembered_costs")
def test_ranks_choose_alike() -> None:
    call = forward("2d2d")
    everywhere = list(itertools.product(*(every_placement(x.ndim, 2) for x in call.inputs)))
    choices = []
    for rank in range(4):
        with fake_ranks(4, rank), our_matmul_sharding():
            mesh = init_device_mesh("cpu", (2, 2))
            choices.append([choice(call, mesh, placements) for placements in everywhere])
    assert choices == [choices[0]] * 4
