"""Strategies of matmul and matmul_backward: every combination of placements, by brute force, on fake ranks."""

from __future__ import annotations

import functools
import itertools
import math
from typing import Any

import pytest
from torch.distributed.device_mesh import init_device_mesh

from tests._helpers.undecomposed_matmul import our_matmul_sharding
from tests.distributed.matmul_calls import (
    SHAPES,
    Call,
    Placements,
    backward,
    choice,
    chosen_for,
    every_placement,
    forward,
)
from tests.distributed.matmul_oracle import (
    NARROW,
    WIDE,
    Placed,
    Valid,
    cost_later,
    costs_from,
    every_output,
    every_valid,
    is_valid,
    least_costs,
    ours_and_cheapest,
    placed_everywhere,
    valid_for_all,
)
from torchtitan_npu.distributed import matmul_sharding
from torchtitan_npu.planner import fake_ranks
from torchtitan_npu.torch_internals import dtensor

MASKS = ((True, True), (True, False), (False, True))
"""Without a gradient there is nothing to choose."""
ROUNDING = 1e-12
"""Costs are summed in another order. Unequal costs differ by far more than this."""


@pytest.fixture
def remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    """Cache pure functions that are called a million times with a few thousand arguments."""

    def remember(name: str, function: Any) -> None:
        monkeypatch.setattr(matmul_sharding, name, function)

    for name in ("_cost_of_later_reduction", "matmul_strategies"):
        remember(name, functools.cache(getattr(matmul_sharding, name)))
    cost = functools.cache(dtensor.redistribution_cost)
    remember("redistribution_cost", cost)
    monkeypatch.setattr(dtensor, "redistribution_cost", cost)
    monkeypatch.setattr(dtensor, "DTensorSpec", functools.cache(dtensor.DTensorSpec))
    # these take lists and a partial, which cannot be keys
    strategies, cost_of_each = matmul_sharding.matmul_backward_strategies, matmul_sharding._cost_of_each
    known = functools.cache(strategies)
    known_costs = functools.cache(lambda function, args, some: cost_of_each(functools.partial(function, *args), some))
    remember("matmul_backward_strategies", lambda *args: known(*args[:-1], tuple(args[-1])))
    remember("_cost_of_each", lambda cost, some: known_costs(cost.func, cost.args, tuple(map(tuple, some))))


def check(call: Call, mesh_shape: tuple[int, ...], inputs: list[Placed], valid: Valid) -> None:
    """Check for every combination of placements that the choice is valid and no valid one costs less.

    Inputs whose placements are valid stay unchanged. On one rank nothing has a cost.
    """
    checked = functools.cache(functools.partial(is_valid, call, mesh_shape))
    later = functools.cache(functools.partial(cost_later, call, inputs))
    everywhere = zip(
        itertools.product(*(placed.values() for placed in inputs)), least_costs(call, inputs, valid), strict=True
    )
    for specs, least in everywhere:
        targets, results = chosen_for(call, specs)
        placements = tuple(spec.placements for spec in specs)
        assert checked(targets, results), (placements, targets, results)
        cost = sum(costs_from(spec)[target] for spec, target in zip(specs, targets, strict=True))
        cost += later(results[0], placements[-1])
        assert math.isclose(cost, least, rel_tol=ROUNDING), (placements, targets, results)
        if mesh_shape != (1,) and placements in valid and later(valid[placements][0], placements[-1]) == 0:
            assert targets == placements


@pytest.mark.parametrize(
    ("shapes", "mesh_shape"),
    [
        *((shapes, (2,)) for shapes in SHAPES if shapes != "3d4d"),
        ("2d2d", (1,)),
        ("2d2d", (4,)),  # one rank of four has no rows
        ("2d1d", (2, 2)),
        pytest.param("3d4d", (2,), marks=pytest.mark.slow),
        *(pytest.param(shapes, (1,), marks=pytest.mark.slow) for shapes in SHAPES if shapes != "2d2d"),
        *(
            pytest.param(shapes, (2, 2), marks=pytest.mark.slow)
            for shapes in ("2d2d", "3d2d", "batched", "broadcast", "1d1d", "3d1d", "1d3d")
        ),
    ],
    ids=lambda x: x if isinstance(x, str) else "x".join(map(str, x)),
)
@pytest.mark.usefixtures("remembered")
def test_every_combination(shapes: str, mesh_shape: tuple[int, ...]) -> None:
    with fake_ranks(math.prod(mesh_shape)), our_matmul_sharding(mesh := init_device_mesh("cpu", mesh_shape)):
        placed = placed_everywhere(backward(shapes), mesh)
        check(forward(shapes), mesh_shape, placed[1:], every_valid(forward(shapes), mesh_shape))
        gradients = every_output(backward(shapes), mesh_shape)
        for mask in MASKS:
            check(backward(shapes, mask), mesh_shape, placed, valid_for_all(gradients, mask))


@pytest.mark.parametrize(("mesh_shape", "samples"), [((2,), 100), ((2, 2), 60)])
@pytest.mark.parametrize("widths", [(WIDE, NARROW), (NARROW, WIDE)])
@pytest.mark.usefixtures("remembered")
def test_a_reduction_is_left_for_later_only_if_that_sends_no_more(
    mesh_shape: tuple[int, ...], widths: tuple[int, int], samples: int
) -> None:
    """Compare with the choice of least cost now, where that leaves dX Partial. The later reduction counts."""

    def is_compared(grad: Placements, left: Placements, right: Placements) -> bool:
        """Exclude placements for which a CPU gathers, having no all-to-all."""
        return any(x.is_partial() for x in grad) and not any(x.is_shard() for x in (*grad, *right))

    totals = ours_and_cheapest("cpu", mesh_shape, widths, is_compared, samples)
    assert totals and all(our <= other for our, other in totals)
    if widths[0] > widths[1]:
        assert any(our < other for our, other in totals)


@pytest.mark.usefixtures("remembered")
def test_all_ranks_choose_the_same() -> None:
    call = forward("2d2d")
    everywhere = list(itertools.product(*(every_placement(x.ndim, 2) for x in call.inputs)))
    choices = []
    for rank in range(4):
        with fake_ranks(4, rank), our_matmul_sharding(mesh := init_device_mesh("cpu", (2, 2))):
            choices.append([choice(call, mesh, placements) for placements in everywhere])
    assert choices == [choices[0]] * 4
