"""Parallel means equal: on every layout a model starts where one rank starts, and gives its loss and gradients."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch

from tests.layouts import DEGREES, FUSED, train
from tests.multirank import run_on_ranks
from tests.training import TOLERANCE, Record, assert_same_balance, assert_same_gradients, together


def layout(text: str) -> dict[str, int]:
    """``"tp2 pp2"`` as degrees; data parallel takes the ranks that are left."""
    degrees = {}
    for word in text.split():
        name = word.rstrip("0123456789")
        assert name in DEGREES
        degrees[name] = int(word.removeprefix(name))
    return degrees


LAYOUTS = {
    1: {"llama3": [""], "qwen3": [""], "qwen3_moe": [""], "deepseek_v3": [""]},
    2: {
        "llama3": ["shard2", "replicate2 shard1", "tp2", "cp2", "pp2"],
        "qwen3": ["shard2", "replicate2 shard1", "tp2", "cp2"],
        "qwen3_moe": ["pp2", "ep2", "tp2 ep2"],
        "llama4": ["tp2", "tp2 ep2"],
        "deepseek_v3": ["shard2", "replicate2 shard1", "tp2", "cp2", "pp2", "ep2", "tp2 ep2", "cp2 ep2"],
    },
    4: {
        "llama3": [
            "replicate2 shard2",
            "shard2 tp2",
            "replicate2 shard1 tp2",
            "replicate2 shard1 pp2",
            "tp2 cp2",
            "tp2 pp2",
            "cp2 pp2",
            "pp4",
        ],
        "qwen3": ["replicate2 shard2", "shard2 tp2", "tp2 cp2"],
        "qwen3_moe": ["shard2 tp2 ep2", "shard2 tp2 ep2 etp2", "tp2 cp2 ep4", "pp2 ep2"],
        "deepseek_v3": [
            "replicate2 shard2 ep2",
            "shard2 tp2",
            "shard4 ep2",
            "ep4",
            "shard2 tp2 ep2",
            "shard2 tp2 ep2 etp2",
            "shard2 tp2 ep4",
            "cp2 ep4",
            "pp2 ep2",
            "tp2 cp2 ep4",
            "tp2 pp2 ep2",
        ],
    },
}
CASES = [(ranks, model, text) for ranks, models in LAYOUTS.items() for model, texts in models.items() for text in texts]
FUSED_CASES = [case for case in CASES if case[0] > 1]


@functools.cache
def one_rank(model: str, fused: bool = False, validates: bool = False) -> Record:
    options = {"model.converters": FUSED[model] if fused else [], "validation.enable": validates}
    return run_on_ranks(1, train, model, {}, options, process_group=False)[0]


def assert_equal_training(actual: Record, expected: Record) -> None:
    assert actual.losses == pytest.approx(expected.losses, rel=TOLERANCE)
    assert_same_gradients(actual, expected)
    assert_same_balance(actual, expected)
    # reported is a float32 sum of squares, up to 2048 × 64 of them in a few lanes: its last digits depend on the shards
    assert actual.norms == pytest.approx(expected.norms, rel=1e-4)


@pytest.mark.parametrize(("ranks", "model", "text"), CASES, ids=[f"{m}-{r}-{t or 'alone'}" for r, m, t in CASES])
def test_any_layout_gives_one_ranks_loss_and_gradients(ranks: int, model: str, text: str) -> None:
    records = run_on_ranks(ranks, train, model, layout(text), process_group=False)
    actual = together(records)
    if ranks == 1:
        assert actual.losses == one_rank(model).losses  # the same run again: bit by bit
        assert all(torch.equal(actual.gradients[name], grad) for name, grad in one_rank(model).gradients.items())
    else:
        assert_equal_training(actual, one_rank(model))


@pytest.mark.parametrize(("ranks", "model", "text"), FUSED_CASES, ids=[f"{m}-{r}-{t}" for r, m, t in FUSED_CASES])
def test_any_layout_gives_one_ranks_loss_and_gradients_with_all_converters(ranks: int, model: str, text: str) -> None:
    options = {"model.converters": FUSED[model]}
    records = run_on_ranks(ranks, train, model, layout(text), options, process_group=False)
    assert_equal_training(together(records), one_rank(model, fused=True))


@pytest.mark.parametrize(
    ("model", "text", "options"),
    [
        ("llama3", "pp2", {"parallelism.pipeline_parallel_schedule": "Interleaved1F1B"}),
        ("llama3", "pp2", {"parallelism.pipeline_parallel_schedule": "ZBVZeroBubble"}),
        ("llama3", "cp2", {"parallelism.context_parallel_load_balancer": None}),
        ("qwen3", "tp2", {"activation_checkpoint.mode": "selective"}),
        ("deepseek_v3", "tp2 ep2", {"activation_checkpoint.mode": "full"}),
        ("qwen3", "tp2", {"activation_checkpoint.mode": "selective", "model.converters": FUSED["qwen3"]}),
        ("deepseek_v3", "tp2 ep2", {"activation_checkpoint.mode": "full", "model.converters": FUSED["deepseek_v3"]}),
        ("deepseek_v3", "ep2", {"model.converters": ["npu_permute"]}),
        ("deepseek_v3", "ep2", {"model.converters": ["npu_gmm"]}),
    ],
    ids=lambda value: "-".join(map(str, value.values())) if isinstance(value, dict) else value,
)
def test_options_give_one_ranks_loss_and_gradients(model: str, text: str, options: dict[str, Any]) -> None:
    records = run_on_ranks(2, train, model, layout(text), options, process_group=False)
    assert_equal_training(together(records), one_rank(model, options.get("model.converters") == FUSED[model]))


@pytest.mark.parametrize("text", ["shard2", "replicate2 shard1", "tp2", "cp2", "pp2"])
def test_any_layout_gives_one_ranks_validation_loss(text: str) -> None:
    options = {"validation.enable": True}
    alone = one_rank("llama3", validates=True)
    actual = together(run_on_ranks(2, train, "llama3", layout(text), options, process_group=False))
    assert actual.validation == pytest.approx(alone.validation, rel=TOLERANCE)
    assert len(alone.validation) == 1 and 7 < alone.validation[0] < 9
