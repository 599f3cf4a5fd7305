"""Twenty steps of training with converters give the eager model's losses and gradient norms."""

from __future__ import annotations

import functools

import pytest

from tests.layouts import FUSED, Record, train
from tests.multirank import run_on_ranks

STEPS = 20
CASES = [(model, (name,)) for model, names in FUSED.items() for name in names]
CASES += [(model, tuple(names)) for model, names in FUSED.items()]


@functools.cache
def curve(model: str, converters: tuple[str, ...] = ()) -> Record:
    options = {"training.steps": STEPS, "model.converters": list(converters)}
    return run_on_ranks(1, train, model, {}, options, process_group=False)[0]


@pytest.mark.parametrize(("model", "converters"), CASES, ids=[f"{model}-{'+'.join(names)}" for model, names in CASES])
def test_converted_training_follows_the_eager_curve(model: str, converters: tuple[str, ...]) -> None:
    eager, converted = curve(model), curve(model, converters)
    assert len(eager.losses) == STEPS and eager.losses[-1] < eager.losses[0]
    assert converted.losses == pytest.approx(eager.losses, rel=1e-5)
    assert converted.norms == pytest.approx(eager.norms, rel=1e-4)
