"""Draws are repeatable, have all pairs of values, and shrink to the parts that matter."""

from __future__ import annotations

import functools
from itertools import islice

from torchtitan_npu.prover.draws import VALUES, Draw, DrawnModel, Draws, fits, pairs, ranks_of, shrink, simpler

MODELS = [
    DrawnModel("dense", has_experts=False, has_documents=True),
    DrawnModel("experts", has_experts=True, has_documents=False),
]


@functools.cache
def first(count: int, seed: int = 0, ranks: int = 8) -> list[Draw]:
    return list(islice(Draws(MODELS, ranks, seed), count))


def test_a_seed_repeats_its_draws() -> None:
    assert first(20, seed=3) == first(20, seed=3)
    assert first(20, seed=3) != first(20, seed=4)


def test_draws_fit_the_ranks_and_divide() -> None:
    for draw in first(60, ranks=4):
        assert 2 <= ranks_of(draw) <= 4
        assert fits(draw, next(model for model in MODELS if model.name == draw["model"]))
        assert (draw["ep"] is None) == (draw["model"] == "dense")
        assert (draw["schedule"] is None) == (draw["pp"] == 1)


def test_sequences_hold_the_data_of_the_model() -> None:
    model = DrawnModel("pictures", has_experts=False, has_documents=False, shortest=48)
    draws = list(islice(Draws([model], 2, 0), 10))
    assert {draw["length"] for draw in draws} == {48, 64}
    assert all(one["length"] >= 48 for draw in draws for one in simpler(draw, model))


def test_most_pairs_of_values_occur_within_300_draws() -> None:
    drawn = {pair for draw in first(300) for pair in pairs(draw)}
    chance = Draws(MODELS, 8, 1)
    possible = {pair for _ in range(4000) for pair in pairs(chance.candidate())}
    at_random = {pair for _ in range(300) for pair in pairs(chance.candidate())}
    assert len(drawn & possible) > 0.95 * len(possible)
    assert len(drawn) > len(at_random)
    values = {(part, value) for draw in first(300) for part, value in draw.items()}
    assert all((part, value) in values for part in VALUES for value in VALUES[part])


def test_a_fault_shrinks_to_the_parts_that_cause_it() -> None:
    draw = next(
        one for one in first(300) if one["cp"] > 1 and one["checkpointing"] == "full" and one["converters"] != "none"
    )
    tried: list[Draw] = []

    def still_fails(candidate: Draw) -> bool:
        tried.append(candidate)
        return candidate["cp"] > 1 and candidate["checkpointing"] == "full"

    model = next(model for model in MODELS if model.name == draw["model"])
    small, complete = shrink(draw, model, still_fails)
    assert complete and small["subset"] == draw["subset"]  # so "some" converters stay the same
    simplest = {part: values[0] for part, values in VALUES.items() if small[part] is not None}
    # the length stays a multiple of 2 × context-parallel ranks
    assert {part for part in simplest if small[part] != simplest[part]} == {"cp", "checkpointing"}
    assert small["cp"] == 2 and len(tried) < 40

    tried.clear()
    larger, complete = shrink(draw, model, still_fails, attempts=2)
    assert not complete and len(tried) == 2 and larger != small
