"""Pipeline schedules: idle time, microbatches in flight, and the ranks that represent the others."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests._helpers.layouts import add_flavor
from torchtitan_npu.config.parser import JobConfigManager
from torchtitan_npu.config.shipped_files import train_configs
from torchtitan_npu.errors import UsageError
from torchtitan_npu.planner.dry_run import dry_run_rank
from torchtitan_npu.planner.dry_run_ranks import selected_ranks
from torchtitan_npu.planner.layout import (
    Size,
    bubble,
    gathers_per_batch,
    microbatches_in_flight,
    modules_per_rank,
    sizes,
    with_layout,
)
from torchtitan_npu.preflight.job_context import build_on_meta
from torchtitan_npu.preflight.pipeline import check_schedule

add_flavor("llama3", "four_layers", {"n_layers": 4})
add_flavor("llama3", "six_layers", {"n_layers": 6})
add_flavor("deepseek_v32", "sixty_layers", {"n_layers": 60, "n_dense_layers": 3})


def job(model: str, flavor: str, pp: int, schedule: str, batch: int) -> Any:
    file = train_configs() / f"{model}_debugmodel.toml"
    config = JobConfigManager().parse_args(["--job.config_file", str(file), "--model.flavor", flavor])
    config.training.local_batch_size, config.training.global_batch_size = batch, -1
    p = config.parallelism
    p.data_parallel_shard_degree, p.pipeline_parallel_degree, p.pipeline_parallel_schedule = 1, pp, schedule
    return config


@pytest.fixture(scope="module")
def parameters() -> dict[str, Size]:
    return sizes(build_on_meta(job("deepseek_v32", "sixty_layers", 1, "1F1B", 1)))


@pytest.mark.parametrize("schedule", ["1F1B", "Interleaved1F1B", "ZBVZeroBubble"])
def test_representative_ranks_need_as_much_as_any_other(schedule: str, parameters: dict[str, Size]) -> None:
    """Dense layers are in the first stages. Ranks have one stage or two."""
    config = job("deepseek_v32", "sixty_layers", 16, schedule, 64)
    parts = modules_per_rank(config, 60)

    def has(number: int) -> tuple[float, ...]:
        size = sum((parameters[name] for name in parts[number]), Size(0, 0))
        ends = tuple(name in parts[number] for name in ("tok_embeddings", "output"))
        return (*ends, size.dense, size.experts, microbatches_in_flight(config, number))

    chosen = [rank // 4 for rank in selected_ranks("representative", config, 64)]
    assert {0, 8, 15} <= set(chosen) and len(chosen) <= 6
    for number in range(16):
        assert any(all(a >= b for a, b in zip(has(one), has(number), strict=True)) for one in chosen), number


def test_names_of_representative_ranks() -> None:
    def names(pp: int, schedule: str, batch: int, world_size: int) -> dict[int, str]:
        return selected_ranks("representative", job("llama3", "six_layers", pp, schedule, batch), world_size)

    assert names(1, "1F1B", 1, 4) == {0: "every rank"}
    assert names(2, "1F1B", 2, 4) == {0: "first stage", 2: "last stage"}
    assert names(3, "1F1B", 3, 6) == {0: "first stage", 2: "stage 1", 4: "last stage"}
    v = {0: "first and last stage", 1: "rank 1 of the pipeline", 2: "stages in the middle"}
    assert names(3, "ZBVZeroBubble", 6, 3) == v


def test_a_v_schedule_has_the_stages_that_torchtitan_builds() -> None:
    """The schedule computes gradients of inputs and of weights separately."""
    config = job("llama3", "four_layers", 2, "ZBVZeroBubble", 4)
    first, last = modules_per_rank(config, 4)
    assert "output" in first and "output" not in last
    found = dry_run_rank(config, 2, 0)
    assert found.modules == ", ".join(name.replace("layers.", "layer ") for name in first)
    assert found.without_gradient == [] and found.sent["pp", "send"] > 0
    assert found.where.startswith(("layers.", "norm", "output", "the loss"))


DELAY = {"ZBVZeroBubble": 1 / 6, "InterleavedZeroBubble": 1 / 6, "Interleaved1F1B": 1 / 2, "1F1B": 1, "GPipe": 1}
"""By schedule: the idle time that each rank after the first adds, relative to a rank's work on a microbatch. Ranks have
two stages except in the last two schedules. Zero bubble: one of six passes is idle, the others are filled."""


@pytest.mark.parametrize("schedule", DELAY)
@pytest.mark.parametrize(("ranks", "microbatches"), [(2, 4), (4, 8)])
def test_bubble_of_each_schedule(schedule: str, ranks: int, microbatches: int) -> None:
    config = job("llama3", "debugmodel", ranks, schedule, microbatches)
    assert bubble(config) == pytest.approx(1 + DELAY[schedule] * (ranks - 1) / microbatches)


def test_microbatches_in_flight_and_gathers() -> None:
    gpipe, one_f_one_b = (job("llama3", "debugmodel", 4, schedule, 8) for schedule in ("GPipe", "1F1B"))
    assert [microbatches_in_flight(gpipe, rank) for rank in range(4)] == [8, 8, 8, 8]
    assert gathers_per_batch(gpipe, 0) == 9  # for each forward pass, and once for all backward passes
    assert [microbatches_in_flight(one_f_one_b, rank) for rank in range(4)] == [4, 3, 2, 1]
    # FFFF BF BF BF BF BBBB: a forward pass uses the layer that the backward pass before it kept.
    assert [gathers_per_batch(one_f_one_b, rank) for rank in (0, 3)] == [4 + 5, 1 + 8]


def test_a_schedule_from_a_file(tmp_path: Path) -> None:
    file = tmp_path / "schedule.csv"
    file.write_text("0F0,0F1,0B0,0F2,0B1,0B2\n1F0,1B0,1F1,1B1,1F2,1B2\n")
    config = job("llama3", "six_layers", 2, "1F1B", 3)
    built_in = bubble(config)
    config.parallelism.pipeline_parallel_schedule_csv = str(file)
    check_schedule(config, 6)
    assert bubble(config) == built_in == pytest.approx(1 + 1 / 3)
    # The file is for two ranks. Other layouts of a search have the schedule that the job names.
    assert bubble(with_layout(config, {"pp": 3})) == pytest.approx(1 + 2 / 3)
    other = tmp_path / "of_two_microbatches.csv"
    other.write_text("0F0,0F1,0B0,0B1\n1F0,1B0,1F1,1B1\n")
    config.parallelism.pipeline_parallel_schedule_csv = str(other)
    with pytest.raises(UsageError, match=r"pipeline_parallel_schedule_csv .*of_two_microbatches.csv: "):
        bubble(config)
    config.parallelism.pipeline_parallel_schedule_csv = str(tmp_path / "none.csv")
    with pytest.raises(UsageError, match=r"none.csv: no such file"):
        check_schedule(config, 6)


def test_modules_per_rank_with_layers_per_stage() -> None:
    config = job("llama3", "debugmodel", 2, "Interleaved1F1B", 8)
    p = config.parallelism
    p.pipeline_parallel_layers_per_stage = 1
    # 8 layers, the embedding and the output are ten stages, five per rank.
    first, last = modules_per_rank(config, 8)
    assert first == ["tok_embeddings", *(f"layers.{n}" for n in (1, 3, 5, 7))]
    assert last == [*(f"layers.{n}" for n in (0, 2, 4, 6)), "norm", "output"]
    p.pipeline_parallel_last_stage_less_layers = 3
    other = with_layout(config, {"pp": 4}).parallelism
    assert other.pipeline_parallel_layers_per_stage is None and other.pipeline_parallel_last_stage_less_layers == 1
