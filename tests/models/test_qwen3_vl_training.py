"""Qwen3-VL in the Trainer on generated pictures: every layout gives one rank's losses and gradients."""

from __future__ import annotations

import functools
import math
from dataclasses import replace
from statistics import mean
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.state_dict import get_model_state_dict

from tests._helpers import layouts
from tests._helpers.converted_models import full
from tests._helpers.multirank import run_on_ranks
from tests._helpers.training import Record, assert_same_gradients, recording
from torchtitan_npu.errors import UsageError
from torchtitan_npu.models.qwen3_vl import Qwen3VLStateDictAdapter, qwen3_vl_args
from torchtitan_npu.preflight.job import check_job
from torchtitan_npu.prover.tiny_models import TINY

TOLERANCE = 1e-5
"""Layouts sum the same float32 numbers (6e-8) in another order. A gradient passes hundreds of additions in four layers
of the tower and four of the decoder, and their errors add up like a random walk."""

SIZES = TINY["qwen3_vl"][2]
CONVERTERS = ["npu_rms_norm", "npu_rope", "npu_mrope", "npu_attention"]
VALIDATED = {"validation.enable": True}
EXPERTS = {"model.converters": [*CONVERTERS, "npu_permute", "npu_gmm"]}


def add_flavor(flavor: str) -> str:
    """Add a small model, dense, tied or moe, to :mod:`tests._helpers.layouts` and return its name."""
    base = "debugmodel_moe" if flavor == "moe" else "debugmodel"
    layouts.TINY[f"qwen3_vl_{flavor}"] = ("qwen3_vl", base, {**SIZES, "enable_weight_tying": flavor == "tied"})
    return f"qwen3_vl_{flavor}"


def train(flavor: str, layout: dict[str, int], options: dict[str, Any]) -> Record:
    """Train on this rank."""
    return layouts.train(add_flavor(flavor), layout, {**layouts.PICTURES, **options})


@functools.cache
def one_rank(flavor: str) -> Record:
    return run_on_ranks(1, train, flavor, {}, VALIDATED, process_group=False)[0]


def train_on(ranks: int, flavor: str, layout: dict[str, int], options: dict[str, Any]) -> list[Record]:
    return run_on_ranks(ranks, train, flavor, layout, options, process_group=False)


def assert_as_on_one_rank(records: list[Record], expected: Record) -> None:
    for actual in records:
        assert actual.losses == pytest.approx(expected.losses, rel=TOLERANCE)
        assert actual.norms == pytest.approx(expected.norms, rel=1e-4)  # a float32 sum of squares over the shards
        assert_same_gradients(actual, expected, TOLERANCE)


@pytest.mark.parametrize(
    ("flavor", "layout", "options"),
    [
        *(pytest.param("dense", {name: 2}, VALIDATED, marks=pytest.mark.slow) for name in ("shard", "tp")),
        pytest.param("dense", {"replicate": 2, "shard": 1}, {}, marks=pytest.mark.slow),
        ("dense", {"shard": 2}, {"model.converters": CONVERTERS, "activation_checkpoint.mode": "full", **VALIDATED}),
        pytest.param(
            "dense",
            {"tp": 2},
            {"model.converters": CONVERTERS, "activation_checkpoint.mode": "selective"},
            marks=pytest.mark.slow,
        ),
        pytest.param("tied", {"shard": 2}, {}, marks=pytest.mark.slow),
        pytest.param("moe", {"ep": 2}, {}, marks=pytest.mark.slow),
        ("moe", {"ep": 2}, EXPERTS),
        pytest.param("moe", {"tp": 2, "ep": 2}, EXPERTS, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_any_layout_gives_one_ranks_losses_and_gradients(
    flavor: str, layout: dict[str, int], options: dict[str, Any]
) -> None:
    records = train_on(2, flavor, layout, options)
    assert_as_on_one_rank(records, one_rank(flavor))
    if options.get("validation.enable"):
        assert records[0].validation == pytest.approx(one_rank(flavor).validation, rel=TOLERANCE)


STEPS_TO_LEARN = 30


@functools.cache
def curve(converters: tuple[str, ...]) -> list[float]:
    batch = {"training.global_batch_size": 4, "training.local_batch_size": 4}
    options = {"training.steps": STEPS_TO_LEARN, "model.converters": list(converters), "optimizer.lr": 3e-3, **batch}
    return train_on(1, "dense", {}, options)[0].losses


def test_the_loss_falls() -> None:
    losses = curve(())
    assert mean(losses[-5:]) < 0.25 * mean(losses[:3])


@pytest.mark.slow
def test_converters_give_the_same_curve() -> None:
    # different roundings of 1e-7 are amplified over 30 steps
    assert curve(tuple(CONVERTERS)) == pytest.approx(curve(()), rel=1e-3)
    assert curve(tuple(CONVERTERS))[:3] == pytest.approx(curve(())[:3], rel=TOLERANCE)


@pytest.mark.parametrize(
    ("layout", "options", "message"),
    [
        ({"cp": 2}, {}, "parallelism.context_parallel_degree is 2; it must be 1 for qwen3_vl"),
        ({"pp": 2}, {}, "parallelism.pipeline_parallel_degree is 2; it must be 1 for qwen3_vl"),
        ({"tp": 3}, {}, "does not divide the 4 heads of the vision tower"),
        (
            {},
            {"npu.layout_independent_data": False},
            r"npu\.layout_independent_data must be true with training.dataset 'shapes'",
        ),
        (
            {},
            {"npu.layout_independent_data": False, "training.dataset": "tiny_corpus", "validation.enable": True},
            r"npu\.layout_independent_data must be true with validation.dataset 'shapes_validation'",
        ),
        ({}, {"validation.enable": True, "validation.steps": -1}, "validation.steps must be at least 1"),
    ],
    ids=str,
)
def test_unsupported_options_are_an_error(
    layout: dict[str, int], options: dict[str, Any], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    ranks = math.prod(layout.values())
    monkeypatch.setenv("WORLD_SIZE", str(ranks))
    lengths = {"training.seq_len": 96, "validation.seq_len": 96}
    config = layouts.job_config(add_flavor("dense"), layout, {**layouts.PICTURES, **lengths, **options})
    with pytest.raises(UsageError, match=message):
        check_job(config, ranks)


@pytest.mark.parametrize(
    ("layers", "message"),
    [((1, 0, 2), "must increase"), ((0, 1, 1), "must increase"), ((0, 1, 4), "must be below the tower's 4 layers")],
    ids=str,
)
def test_wrong_deepstack_layers_are_an_error(layers: tuple[int, ...], message: str) -> None:
    vision = replace(qwen3_vl_args["debugmodel"].vision, deepstack_layers=layers)
    with pytest.raises(UsageError, match=message):
        replace(qwen3_vl_args["debugmodel"], vision=vision)


def test_text_trains_the_decoder_and_gives_the_tower_zero_gradients() -> None:
    text = {"training.dataset": "tiny_corpus"}
    one, two = train_on(1, "dense", {}, text)[0], train_on(2, "dense", {"shard": 2}, text)
    decoder = {name: grad for name, grad in one.gradients.items() if not name.startswith("vision.")}
    assert all(grad.any() for grad in decoder.values())
    assert not any(grad.any() for name, grad in one.gradients.items() if name.startswith("vision."))
    assert two[0].losses == pytest.approx(one.losses, rel=TOLERANCE)


def exported(flavor: str, layout: dict[str, int]) -> dict[str, Any]:
    """Export a sharded model, check that it can be read back, and return the exported weights."""
    with recording(layouts.job_config(add_flavor(flavor), layout, layouts.PICTURES)) as (trainer, _):
        (model,) = trainer.model_parts
        adapter = Qwen3VLStateDictAdapter(model.model_args, None)
        state = get_model_state_dict(model)
        hf = adapter.to_hf(state)
        for name, value in adapter.from_hf(hf).items():
            assert torch.equal(full(value), full(state[name])), name
        return {name: full(value).clone() for name, value in hf.items()}


@pytest.mark.parametrize(
    ("flavor", "layout"), [("dense", {"tp": 2}), ("tied", {"shard": 2}), ("moe", {"ep": 2})], ids=str
)
def test_exports_the_same_weights_from_any_layout(flavor: str, layout: dict[str, int]) -> None:
    (alone,) = run_on_ranks(1, exported, flavor, {}, process_group=False)
    for split in run_on_ranks(2, exported, flavor, layout, process_group=False):
        assert split.keys() == alone.keys()
        for name, value in alone.items():
            assert torch.equal(split[name], value), name
