"""DeepSeek-V3.2 in the Trainer: its two losses, its two stages, and layouts that do not split a layer."""

from __future__ import annotations

from pathlib import Path
from statistics import mean
from typing import Any

import pytest
import torch

from tests._helpers.deepseek_v32_training import (
    COMPILED,
    CONVERTERS,
    DIVERGENCE_TOLERANCE,
    SELECTIVE,
    STEPS,
    WARMUP,
    assert_as_on_one_rank,
    one_rank,
    train_on,
)
from tests._helpers.training import TOLERANCE


def is_of_indexer(name: str) -> bool:
    return ".indexer." in name


def test_both_losses_fall() -> None:
    record = one_rank(stop=STEPS)
    assert len(record.losses) == len(record.indexer_losses) == STEPS
    assert mean(record.losses[-5:]) < mean(record.losses[:5]) - 0.4  # batches differ by 0.2
    assert mean(record.indexer_losses[-5:]) < 0.75 * mean(record.indexer_losses[:5])
    assert record.gradients and not record.frozen


def test_without_its_loss_the_indexer_is_frozen_and_the_rest_trains_the_same() -> None:
    (without,) = train_on(1, {}, {"dsa.indexer_loss": False})
    assert without.indexer_losses == [] and without.losses[0] == one_rank().losses[0]
    assert without.frozen == set(filter(is_of_indexer, one_rank().gradients))
    for name, grad in without.gradients.items():
        assert torch.equal(grad, one_rank().gradients[name]), name
    assert not any(map(is_of_indexer, without.changed))


def test_the_loss_weight_scales_only_the_indexers_gradients() -> None:
    (weighted,) = train_on(1, {}, {"dsa.indexer_loss_weight": 0.5})
    for name, expected in one_rank().gradients.items():
        assert torch.equal(weighted.gradients[name], expected * (0.5 if is_of_indexer(name) else 1)), name
    assert weighted.indexer_losses[0] == one_rank().indexer_losses[0]  # the metric is the unweighted loss


def test_the_warm_up_trains_only_the_indexer() -> None:
    record = one_rank("warmup", stop=STEPS)
    assert mean(record.indexer_losses[-5:]) < 0.75 * mean(record.indexer_losses[:5])
    assert record.gradients.keys() == record.changed
    assert record.changed and all(map(is_of_indexer, record.changed))


@pytest.mark.parametrize(
    ("stage", "layout", "options"),
    [
        pytest.param("sparse", {"ep": 2}, {"activation_checkpoint.mode": "full"}, marks=pytest.mark.slow),
        pytest.param("sparse", {"pp": 2}, SELECTIVE, marks=pytest.mark.slow),
        ("sparse", {"replicate": 2, "shard": 1}, {}),
        ("sparse", {"ep": 2}, {"model.converters": CONVERTERS, **SELECTIVE}),
        ("sparse", {"pp": 2}, {"model.converters": CONVERTERS, "activation_checkpoint.mode": "full"}),
        pytest.param(
            "sparse", {"ep": 2}, {"model.converters": CONVERTERS, **SELECTIVE, **COMPILED}, marks=pytest.mark.slow
        ),
        pytest.param("warmup", {"ep": 2}, {"activation_checkpoint.mode": "full"}, marks=pytest.mark.slow),
        pytest.param("warmup", {"shard": 2}, {"model.converters": CONVERTERS}, marks=pytest.mark.slow),
        ("warmup", {"cp": 2}, {"model.converters": CONVERTERS, **SELECTIVE}),
        ("warmup", {"tp": 2}, {"model.converters": CONVERTERS}),
        pytest.param("warmup", {"tp": 2}, {"activation_checkpoint.mode": "full"}, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_any_layout_gives_one_ranks_losses_and_gradients(
    stage: str, layout: dict[str, int], options: dict[str, Any]
) -> None:
    records = train_on(2, layout, {"dsa.stage": stage, **options})
    assert_as_on_one_rank(records, one_rank(stage), "tp" in layout)


def test_resumes_on_another_layout(tmp_path: Path) -> None:
    checkpoints = {"checkpoint.enable": True, "checkpoint.interval": 2, "job.dump_folder": str(tmp_path)}
    train_on(1, {}, checkpoints)
    resumed = train_on(2, {"shard": 2}, checkpoints, 4)[0]
    assert resumed.losses == pytest.approx(one_rank().losses[2:4], rel=TOLERANCE)
    assert resumed.indexer_losses == pytest.approx(one_rank().indexer_losses[2:4], abs=DIVERGENCE_TOLERANCE)


def test_the_sparse_stage_starts_from_a_warm_ups_checkpoint(tmp_path: Path) -> None:
    train_on(1, {}, {**WARMUP, "checkpoint.enable": True, "checkpoint.interval": 2, "job.dump_folder": str(tmp_path)})
    warm = {"checkpoint.enable": True, "checkpoint.initial_load_path": str(tmp_path / "checkpoint" / "step-2")}
    (started,) = train_on(1, {}, {**warm, "job.dump_folder": str(tmp_path / "sparse")}, 1)
    assert started.indexer_losses[0] < one_rank().indexer_losses[0]
