"""Rehearsals of pipelines: which ranks stand for the others, and what a schedule of one's own comes to."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests._helpers.layouts import add_flavor
from torchtitan_npu.config.parser import PACKAGE, JobConfigManager
from torchtitan_npu.config.pipeline import check_schedule
from torchtitan_npu.config.preflight import build_on_meta
from torchtitan_npu.errors import UsageError
from torchtitan_npu.planner.layout import with_layout
from torchtitan_npu.planner.parameters import Size, sizes
from torchtitan_npu.planner.pipeline_schedule import bubble, under_way
from torchtitan_npu.planner.rank import rehearse_rank
from torchtitan_npu.planner.representative_ranks import kinds
from torchtitan_npu.planner.shortened import stages

add_flavor("llama3", "six_layers", {"n_layers": 6})
add_flavor("deepseek_v32", "sixty_layers", {"n_layers": 60, "n_dense_layers": 3})


def job(model: str, flavor: str, pp: int, schedule: str, batch: int) -> Any:
    file = PACKAGE / f"train_configs/{model}_debugmodel.toml"
    config = JobConfigManager().parse_args(["--job.config_file", str(file), "--model.flavor", flavor])
    config.training.local_batch_size, config.training.global_batch_size = batch, -1
    p = config.parallelism
    p.data_parallel_shard_degree, p.pipeline_parallel_degree, p.pipeline_parallel_schedule = 1, pp, schedule
    return config


SCHEDULES = ("GPipe", "1F1B", "Interleaved1F1B", "InterleavedZeroBubble", "ZBVZeroBubble", "DualPipeV")


@pytest.fixture(scope="module")
def parameters() -> dict[str, Size]:
    return sizes(build_on_meta(job("deepseek_v32", "sixty_layers", 1, "1F1B", 1)))


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_no_rank_needs_more_than_those_of_its_kind(schedule: str, parameters: dict[str, Size]) -> None:
    """Dense layers in the first stages, ranks with one stage and with two: whatever a rank has, one that is rehearsed
    has as much of it."""
    config = job("deepseek_v32", "sixty_layers", 16, schedule, 64)
    parts = stages(config, 60)

    def has(number: int) -> tuple[float, ...]:
        size = sum((parameters[name] for name in parts[number]), Size(0, 0))
        ends = tuple(name in parts[number] for name in ("tok_embeddings", "output"))
        return (*ends, size.dense, size.experts, under_way(config, number))

    chosen = [rank // 4 for rank in kinds(config, 64)]
    assert {0, 8, 15} <= set(chosen) and len(chosen) <= 6
    for number in range(16):
        assert any(all(a >= b for a, b in zip(has(one), has(number), strict=True)) for one in chosen), number


def test_kinds_have_names() -> None:
    assert kinds(job("llama3", "six_layers", 1, "1F1B", 1), 4) == {0: "every rank"}
    assert list(kinds(job("llama3", "six_layers", 2, "1F1B", 2), 4).values()) == ["first stage", "last stage"]
    of_three = kinds(job("llama3", "six_layers", 3, "1F1B", 3), 6)
    assert of_three == {0: "first stage", 2: "stage 1", 4: "last stage"}
    v = list(kinds(job("llama3", "six_layers", 3, "ZBVZeroBubble", 6), 3).values())
    assert v == ["first and last stage", "rank 1 of the pipeline", "stages in the middle"]


@pytest.mark.parametrize("number", [0, 2])
def test_a_v_is_rehearsed_with_the_stages_that_torchtitan_builds(number: int) -> None:
    """It has the gradients of inputs and of weights computed apart."""
    config = job("llama3", "six_layers", 3, "ZBVZeroBubble", 6)
    modules = [name.replace("layers.", "layer ") for name in stages(config, 6)[number]]
    assert ("output" in modules) == (number == 0)
    found = rehearse_rank(config, 3, number)
    assert found.modules == ", ".join(modules) and found.without_gradient == []
    assert found.sent["pp", "send"] > 0 and found.where.startswith(("layers.", "norm", "output", "the loss"))


def test_a_schedule_of_one_s_own(tmp_path: Path) -> None:
    file = tmp_path / "schedule.csv"
    file.write_text("0F0,0F1,0B0,0F2,0B1,0B2\n1F0,1B0,1F1,1B1,1F2,1B2\n")
    config = job("llama3", "six_layers", 2, "1F1B", 3)
    by_torch = bubble(config)
    config.parallelism.pipeline_parallel_schedule_csv = str(file)
    check_schedule(config, 6)
    assert bubble(config) == by_torch == pytest.approx(1 + 1 / 3)
    # it is for two ranks: other layouts of the search have the schedule that the file names besides
    assert bubble(with_layout(config, {"pp": 3})) == pytest.approx(1 + 2 / 3)
    other = tmp_path / "of_two_microbatches.csv"
    other.write_text("0F0,0F1,0B0,0B1\n1F0,1B0,1F1,1B1\n")
    config.parallelism.pipeline_parallel_schedule_csv = str(other)
    with pytest.raises(UsageError, match=r"pipeline_parallel_schedule_csv .*of_two_microbatches.csv: "):
        bubble(config)
    config.parallelism.pipeline_parallel_schedule_csv = str(tmp_path / "none.csv")
    with pytest.raises(UsageError, match=r"none.csv: no such file"):
        check_schedule(config, 6)
