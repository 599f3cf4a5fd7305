"""Twenty steps of training with converters give the eager model's losses and gradient norms."""

from __future__ import annotations

import functools

import pytest

from tests._helpers.deepseek_v32_training import CONVERTERS, one_rank, train_on
from tests._helpers.layouts import FUSED, train
from tests._helpers.multirank import run_on_ranks
from tests._helpers.training import Record

STEPS = 20
BATCH = {"training.global_batch_size": 4, "training.local_batch_size": 4}
"""Without gradient accumulation, which tests/distributed/test_layouts.py covers."""
SLOW = ("llama3", "qwen3")  # qwen3_moe has their targets too
CASES = [
    pytest.param(model, tuple(names), id=f"{model}-all", marks=[pytest.mark.slow] * (model in SLOW))
    for model, names in FUSED.items()
]
CASES += [
    pytest.param(model, (name,), id=f"{model}-{name}", marks=pytest.mark.slow)
    for model, names in FUSED.items()
    for name in names
]


@functools.cache
def curve(model: str, converters: tuple[str, ...] = ()) -> Record:
    options = {**BATCH, "training.steps": STEPS, "model.converters": list(converters)}
    return run_on_ranks(1, train, model, {}, options, process_group=False)[0]


@pytest.mark.parametrize(("model", "converters"), CASES)
def test_converted_training_follows_the_eager_curve(model: str, converters: tuple[str, ...]) -> None:
    eager, converted = curve(model), curve(model, converters)
    assert len(eager.losses) == STEPS and eager.losses[-1] < eager.losses[0]
    assert converted.losses == pytest.approx(eager.losses, rel=1e-5)
    assert converted.norms == pytest.approx(eager.norms, rel=1e-4)


@pytest.mark.slow
def test_sparse_attention_follows_the_eager_curves() -> None:
    """The learning rate is large, so small differences grow."""
    eager, (converted,) = one_rank(stop=STEPS), train_on(1, {}, {"model.converters": CONVERTERS}, STEPS)
    assert len(eager.losses) == len(eager.indexer_losses) == STEPS
    assert converted.losses == pytest.approx(eager.losses, rel=1e-4)
    assert converted.indexer_losses == pytest.approx(eager.indexer_losses, rel=1e-4)
