"""The search for layouts, and the arithmetic behind the 671B job's."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.layouts import add_flavor
from torchtitan_npu.config_manager import PACKAGE, JobConfigManager

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tools"))
add_flavor("deepseek_v32", "two_layers", {"n_layers": 2})

CONFIGS = PACKAGE / "train_configs"


def load(name: str) -> Any:
    return JobConfigManager().parse_args(["--job.config_file", str(CONFIGS / f"{name}.toml")])


def test_the_arithmetic_that_chose_the_layout(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """With float32 weights and gradients, 671B need more than 32 devices of 128 GB, and PP2 TP4 leave 18 GB of the
    parameters that experts do not have, before FSDP."""
    import rehearse as tool

    out = tmp_path / "search.json"
    options = ["--config", str(CONFIGS / "deepseek_v32_671b_32k.toml"), "--search", "--json", str(out)]
    assert tool.main([*options, "--world-size", "32", "--device-memory", "128GB"]) == 1
    found = json.loads(out.read_text())["arithmetic"]
    assert found["weights_and_gradients"] / 1e9 == pytest.approx(5368, rel=2e-3)
    assert 32 < found["devices_at_least"] <= 64
    assert found["not_in_experts_before_fsdp"] / 1e9 == pytest.approx(18, abs=0.5)
    assert "do not fit 32 devices of 128 GB" in capsys.readouterr().out.replace("\n", " ")


@pytest.mark.parametrize(("ranks", "name"), [(64, "PP2 FSDP8 TP4 EP32"), (128, "PP2 FSDP16 TP4 EP64")])
def test_the_file_s_own_layout_is_among_those_searched(ranks: int, name: str) -> None:
    from torchtitan_npu.rehearsal.job import degrees, layout_name
    from torchtitan_npu.rehearsal.search import dividing, own_layout

    config = load("deepseek_v32_671b_32k")
    own = own_layout(config, ranks)
    assert layout_name(own) == name
    assert degrees(own) in list(dividing(config, ranks, heads=128, experts=256, layers=61))


def test_layers_that_were_left_out_are_like_the_others() -> None:
    from torchtitan_npu.rehearsal.rank import rehearse_rank
    from torchtitan_npu.rehearsal.shortened import rehearse_shortened

    add_flavor("llama3", "seven_layers", {"n_layers": 7})
    config = load("llama3_debugmodel")
    config.model.flavor, config.training.global_batch_size = "seven_layers", -1
    whole, short = rehearse_rank(config, 2), rehearse_shortened(config, 2)
    assert (short.peak, short.flops, short.sent) == (whole.peak, whole.flops, whole.sent)
    assert short.standing == whole.standing


def test_a_busier_expert_makes_the_estimate_larger() -> None:
    from torchtitan_npu.rehearsal.estimate import Estimator, with_layout
    from torchtitan_npu.rehearsal.rates import Rates

    config = load("deepseek_v32_debugmodel")
    config.training.global_batch_size = -1
    config = with_layout(config, {"dp_shard": 4, "ep": 4})
    estimator = Estimator.of(config)
    parts = [list(estimator.parameters)]
    even, worst = (estimator.of_layout(config, parts, Rates(), load) for load in ("balanced", "worst"))
    assert even.memory[0] < worst.memory[0] and even.seconds[0] < worst.seconds[0]


def test_stages_are_those_of_the_file_s_layers_per_stage() -> None:
    from torchtitan_npu.rehearsal.estimate import with_layout
    from torchtitan_npu.rehearsal.shortened import stages

    config = load("llama3_debugmodel")
    p = config.parallelism
    p.pipeline_parallel_degree, p.pipeline_parallel_schedule = 2, "Interleaved1F1B"
    p.pipeline_parallel_layers_per_stage = 1
    # 8 layers, the embedding and the output: ten stages, of which each rank has five
    first, last = stages(config, 8)
    assert first == ["tok_embeddings", *(f"layers.{n}" for n in (1, 3, 5, 7))]
    assert last == [*(f"layers.{n}" for n in (0, 2, 4, 6)), "norm", "output"]
    p.pipeline_parallel_last_stage_less_layers = 3
    other = with_layout(config, {"pp": 4}).parallelism
    assert other.pipeline_parallel_layers_per_stage is None and other.pipeline_parallel_last_stage_less_layers == 1


@pytest.mark.parametrize(("ranks", "divides"), [(64, False), (128, True)])
def test_the_seeds_layout_divides_128_ranks_and_not_64(ranks: int, divides: bool) -> None:
    from torchtitan_npu.rehearsal.search import dividing

    config = load("deepseek_v32_671b_32k")
    layouts = list(dividing(config, ranks, heads=128, experts=256, layers=61))
    wanted = {"pp": 2, "tp": 4, "ep": 64, "cp": 1}
    assert any(all(layout[name] == degree for name, degree in wanted.items()) for layout in layouts) == divides
    for layout in layouts:
        product = layout["dp_replicate"] * layout["dp_shard"] * layout["cp"] * layout["tp"] * layout["pp"]
        assert product == ranks and ranks // layout["pp"] % layout["ep"] == 0


@pytest.mark.parametrize(
    ("wrong", "line"),
    [
        (["--expert-load", "0.5"], "--expert-load 0.5: balanced, worst, or a factor of at least 1"),
        (["--model.flavor", "none"], "model.flavor 'none' is not known"),
        (["--optimizer.name", "none"], "optimizer.name 'none' is not known"),
    ],
)
def test_a_mistake_in_the_file_ends_the_search(wrong: list[str], line: str, capsys: pytest.CaptureFixture[str]) -> None:
    import rehearse as tool

    options = ["--config", str(CONFIGS / "deepseek_v32_debugmodel.toml"), "--world-size", "4", "--search"]
    assert tool.main([*options, "--home", "cpu", "--training.global_batch_size", "-1", *wrong]) == 2
    assert line in capsys.readouterr().err.splitlines()[-1]


def test_search(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    import rehearse as tool

    out = tmp_path / "search.json"
    file = CONFIGS / "deepseek_v32_debugmodel.toml"
    options = [
        "--config",
        str(file),
        "--world-size",
        "4",
        "--search",
        "--top",
        "1",
        "--home",
        "cpu",
        "--json",
        str(out),
    ]
    assert tool.main([*options, "--model.flavor", "two_layers", "--training.global_batch_size", "-1"]) == 0
    layouts = json.loads(out.read_text())["layouts"]
    names = [layout["layout"] for layout in layouts]
    assert {"FSDP4", "FSDP4 EP4", "PP2 TP2", "FSDP2 TP2 EP4", "CP2 TP2"} <= set(names)
    rehearsed = [layout for layout in layouts if layout["rehearsed_peak"] is not None]
    assert "FSDP4" in {layout["layout"] for layout in rehearsed} and len(rehearsed) <= 3
    assert layouts[: len(rehearsed)] == rehearsed  # best first
    times = [layout["microseconds_per_token"] for layout in rehearsed]
    assert times == sorted(times)
    for layout in rehearsed:  # the estimate is for choosing; it has the right size
        assert 0.5 < layout["estimated_peak"] / layout["rehearsed_peak"] < 2, layout["layout"]
    assert "of which" in capsys.readouterr().out
