"""The search for layouts, and the arithmetic behind the 671B job's."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests._helpers.layouts import add_flavor
from torchtitan_npu.config.parser import PACKAGE, JobConfigManager
from torchtitan_npu.planner.parameters import model_args

ROOT = Path(__file__).resolve().parents[2]
add_flavor("deepseek_v32", "two_layers", {"n_layers": 2})

CONFIGS = PACKAGE / "train_configs"


def load(name: str) -> Any:
    return JobConfigManager().parse_args(["--job.config_file", str(CONFIGS / f"{name}.toml")])


def test_the_arithmetic_that_chose_the_layout(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """With float32 weights and gradients, 671B need more than 32 devices of 128 GB, and PP2 TP4 leave 18 GB of the
    parameters that experts do not have, before FSDP."""
    from torchtitan_npu.cli.plan import command as tool

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
    from torchtitan_npu.planner.layout import degrees, layout_name
    from torchtitan_npu.planner.search import dividing, own_layout

    config = load("deepseek_v32_671b_32k")
    own = own_layout(config, ranks)
    assert layout_name(own) == name
    assert degrees(own) in list(dividing(config, ranks, model_args(config), experts=256))


@pytest.mark.parametrize("model", ["llama3", "deepseek_v32"])
def test_layers_that_were_left_out_are_like_the_others(model: str) -> None:
    """llama3 with FSDP; of deepseek_v32 the last of two pipeline stages, with TP and EP and all converters."""
    from torchtitan_npu.planner.rank import rehearse_rank
    from torchtitan_npu.planner.shortened import rehearse_shortened

    add_flavor(model, "six_layers", {"n_layers": 6})
    config = load(f"{model}_debugmodel")
    config.model.flavor, config.training.global_batch_size = "six_layers", -1
    config.training.local_batch_size = 1
    ranks, rank, p = 2, 0, config.parallelism
    if model == "deepseek_v32":
        ranks, rank = 4, 2
        config.model.converters = ["npu_rms_norm", "npu_rope", "npu_permute", "npu_gmm", "npu_dsa"]
        p.data_parallel_shard_degree = 1
        p.pipeline_parallel_degree = p.tensor_parallel_degree = p.expert_parallel_degree = 2
        p.pipeline_parallel_schedule = "GPipe"  # which takes one microbatch
        last = [*(f"layers.{n}" for n in range(1, 6)), "norm", "output"]
        p.module_fqns_per_model_part = [["tok_embeddings", "layers.0"], last]
    whole, short = rehearse_rank(config, ranks, rank), rehearse_shortened(config, ranks, rank)
    assert short.timeline == []  # which two shorter rehearsals have none of
    assert (short.peak, short.flops, short.sent) == (whole.peak, whole.flops, whole.sent)
    assert short.standing == whole.standing


def test_tied_weights_are_counted_once() -> None:
    from torchtitan_npu.config.preflight import build_on_meta
    from torchtitan_npu.planner.parameters import Size, sizes
    from torchtitan_npu.planner.shortened import stages

    config = load("qwen3_debugmodel")
    model: Any = build_on_meta(config)
    found = sizes(model)
    assert set(found) == set(stages(config, model.model_args.n_layers)[0])
    assert found["output"] == Size(0, 0) and found["tok_embeddings"].total == model.output.weight.numel()


def test_layouts_divide_the_heads_of_keys_too() -> None:
    from torchtitan_npu.planner.search import dividing

    config = load("llama3_debugmodel")
    config.training.global_batch_size = -1
    for kv_heads, tps in ((None, {1, 2, 4, 8}), (2, {1, 2})):
        args = SimpleNamespace(n_heads=16, n_kv_heads=kv_heads, n_layers=8)
        assert {layout["tp"] for layout in dividing(config, 8, args, experts=0)} == tps


LATE = {"ZBVZeroBubble": 1 / 6, "InterleavedZeroBubble": 1 / 6, "Interleaved1F1B": 1 / 2, "1F1B": 1, "GPipe": 1}
"""By schedule: for each stage after the first, how much of a rank's work with a microbatch it makes the others wait,
where a rank has two stages of all but the last two. Zero bubble: one of six passes, the others are filled."""


@pytest.mark.parametrize("schedule", LATE)
@pytest.mark.parametrize(("ranks", "microbatches"), [(2, 4), (4, 8)])
def test_a_pipeline_waits_as_long_as_its_schedule_says(schedule: str, ranks: int, microbatches: int) -> None:
    from torchtitan_npu.planner.pipeline_schedule import bubble

    config = load("llama3_debugmodel")
    config.training.local_batch_size = microbatches
    p = config.parallelism
    p.pipeline_parallel_degree, p.pipeline_parallel_schedule = ranks, schedule
    assert bubble(config) == pytest.approx(1 + LATE[schedule] * (ranks - 1) / microbatches)


def test_what_a_schedule_holds_and_gathers() -> None:
    from torchtitan_npu.planner.pipeline_schedule import gathers, under_way

    config = load("llama3_debugmodel")
    config.training.local_batch_size = 8
    p = config.parallelism
    p.pipeline_parallel_degree, p.pipeline_parallel_schedule = 4, "GPipe"
    assert [under_way(config, rank) for rank in range(4)] == [8, 8, 8, 8]
    assert gathers(config, 0) == 9  # for each forward pass, and once for all backward passes
    p.pipeline_parallel_schedule = "1F1B"
    assert [under_way(config, rank) for rank in range(4)] == [4, 3, 2, 1]
    # FFFF BF BF BF BF BBBB: a forward pass finds what the backward pass before it has kept
    assert [gathers(config, rank) for rank in (0, 3)] == [4 + 5, 1 + 8]


def test_a_busier_expert_makes_the_estimate_larger() -> None:
    from torchtitan_npu.config.preflight import build_on_meta
    from torchtitan_npu.planner.estimate import Estimator
    from torchtitan_npu.planner.layout import with_layout
    from torchtitan_npu.planner.parameters import sizes
    from torchtitan_npu.planner.rates import Rates

    config = load("deepseek_v32_debugmodel")
    config.training.global_batch_size = -1
    config = with_layout(config, {"dp_shard": 4, "ep": 4})
    model: Any = build_on_meta(config)
    nothing: Any = SimpleNamespace(flops=0, at_peak={})  # what a load that is not balanced adds is arithmetic
    estimator = Estimator(sizes(model), [nothing, nothing], 1, 0, model.model_args)
    parts = [list(estimator.parameters)]
    even, worst = (estimator.of_layout(config, parts, Rates(), load) for load in ("balanced", "worst"))
    assert even.memory[0] < worst.memory[0] and even.seconds[0] < worst.seconds[0]


def test_replicas_of_a_pipeline_are_estimated_without_either() -> None:
    """Plain replicas of the cut model are not rehearsed: they are shards there."""
    from torchtitan_npu.planner.estimate import Estimator
    from torchtitan_npu.planner.layout import with_layout

    config = with_layout(load("llama3_debugmodel"), {"dp_replicate": 2, "dp_shard": 1, "pp": 2})
    estimator = Estimator.of(config)
    assert estimator.whole_gradient > 0 and all(one.sent["fsdp", "all_gather"] > 0 for one in estimator.base)


def test_stages_are_those_of_the_file_s_layers_per_stage() -> None:
    from torchtitan_npu.planner.layout import with_layout
    from torchtitan_npu.planner.shortened import stages

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
    from torchtitan_npu.planner.search import dividing

    config = load("deepseek_v32_671b_32k")
    layouts = list(dividing(config, ranks, model_args(config), experts=256))
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
def test_a_mistake_in_the_file_ends_the_search(
    wrong: list[str], line: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    from torchtitan_npu.cli.plan import command as tool

    out = tmp_path / "search.json"
    options = ["--config", str(CONFIGS / "deepseek_v32_debugmodel.toml"), "--world-size", "4", "--search"]
    options += ["--home", "cpu", "--json", str(out), "--training.global_batch_size", "-1"]
    assert tool.main([*options, *wrong]) == 2
    assert line in capsys.readouterr().err.splitlines()[-1]
    assert line in json.loads(out.read_text())["error"]


def test_search(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from torchtitan_npu.cli.plan import command as tool
    from torchtitan_npu.config.preflight import build_on_meta
    from torchtitan_npu.planner.layout import DEGREES, with_layout
    from torchtitan_npu.planner.parameters import sizes
    from torchtitan_npu.planner.rank_share import on_a_rank

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
    config = load("deepseek_v32_debugmodel")
    config.model.flavor = "two_layers"
    parameters = sizes(build_on_meta(config)).values()
    for layout in rehearsed:
        # the estimate has three times the largest module gathered, a rehearsal from one to three: two may be too many
        changed = with_layout(config, {name: layout[name] for name in DEGREES})
        doubtful = 2 * 4 * max(on_a_rank(size, changed).total for size in parameters)
        assert abs(layout["estimated_peak"] - layout["rehearsed_peak"]) < doubtful, layout["layout"]
    assert "of which" in capsys.readouterr().out
