"""The search over layouts, truncated dry runs, and the arithmetic of the 671B job's layout."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests._helpers.layouts import add_flavor
from torchtitan_npu.cli import plan as command
from torchtitan_npu.config.parser import JobConfigManager
from torchtitan_npu.config.shipped_files import train_configs
from torchtitan_npu.errors import UsageError
from torchtitan_npu.planner.dry_run import dry_run_rank
from torchtitan_npu.planner.dry_run_ranks import dry_run_truncated, repeated_groups
from torchtitan_npu.planner.estimate import unsharded
from torchtitan_npu.planner.layout import (
    DEGREES,
    Size,
    degrees,
    layout_name,
    model_args,
    modules_per_rank,
    sizes,
    with_layout,
)
from torchtitan_npu.planner.search import dividing, job_layout
from torchtitan_npu.preflight.job_context import JobContext, build_on_meta
from torchtitan_npu.preflight.parallelism import check_world_size

CONFIGS = train_configs()
for model in ("llama3", "deepseek_v32"):
    add_flavor(model, "two_layers", {"n_layers": 2})
    add_flavor(model, "six_layers", {"n_layers": 6})
add_flavor("glm_moe_dsa", "six_layers", {"n_layers": 11, "index_topk_pattern": "FFSFSFSFSFS"})  # 1 dense, 5 pairs


def load(name: str) -> Any:
    return JobConfigManager().parse_args(["--job.config_file", str(CONFIGS / f"{name}.toml")])


def test_the_arithmetic_of_the_671b_layout(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """Float32 weights and gradients of 671B parameters need more than 32 devices of 128 GB. PP2 TP4 leave 18 GB of the
    dense ones on a device before FSDP."""
    out = tmp_path / "search.json"
    options = ["--config", str(CONFIGS / "deepseek_v32_671b_32k.toml"), "--search", "--json", str(out)]
    assert command.main([*options, "--world-size", "32", "--device-memory", "128GB"]) == 1
    found = json.loads(out.read_text())["arithmetic"]
    assert found["weights_and_gradients"] / 1e9 == pytest.approx(5368, rel=2e-3)
    assert 32 < found["min_devices"] <= 64
    assert found["dense_before_fsdp"] / 1e9 == pytest.approx(18, abs=0.5)
    assert "do not fit 32 devices of 128 GB" in capsys.readouterr().out.replace("\n", " ")


@pytest.mark.parametrize(("ranks", "name"), [(64, "PP2 FSDP4 CP2 TP4 EP32"), (128, "PP2 FSDP8 CP2 TP4 EP64")])
def test_the_file_s_own_layout_is_searched(ranks: int, name: str) -> None:
    config = load("deepseek_v32_671b_32k")
    own = job_layout(config, ranks)
    assert layout_name(own) == name
    layouts = list(dividing(config, ranks, model_args(config), experts=256))
    assert degrees(own) in layouts
    for layout in layouts:
        product = layout["dp_replicate"] * layout["dp_shard"] * layout["cp"] * layout["tp"] * layout["pp"]
        assert product == ranks and ranks // layout["pp"] % layout["ep"] == 0


def test_layouts_divide_key_value_heads_and_the_sequence() -> None:
    config = load("llama3_debugmodel")
    config.training.global_batch_size = -1
    for kv_heads, tps in ((None, {1, 2, 4, 8}), (2, {1, 2})):
        args = SimpleNamespace(n_heads=16, n_kv_heads=kv_heads, n_layers=8)
        assert {layout["tp"] for layout in dividing(config, 8, args, experts=0)} == tps
    config.training.seq_len = 8  # context parallel splits it into two chunks for each rank
    args = SimpleNamespace(n_heads=16, n_layers=8)
    assert {layout["tp"] * layout["cp"] for layout in dividing(config, 8, args, experts=0)} == {1, 2, 4}


def test_expert_tensor_parallel_leaves_fewer_ranks_to_ep() -> None:
    config = load("deepseek_v32_debugmodel")
    config.training.global_batch_size = -1
    p = config.parallelism
    p.tensor_parallel_degree = p.expert_tensor_parallel_degree = 2
    p.expert_parallel_degree, p.data_parallel_shard_degree = 8, 4
    args = SimpleNamespace(n_heads=16, n_layers=1)
    found = list(dividing(config, 8, args, experts=8))
    for layout in found:
        check_world_size(JobContext(with_layout(config, layout), 8))
    missing = next(layout for layout in found if layout["tp"] == 2) | {"ep": 8}
    with pytest.raises(UsageError, match="expert_parallel_degree 8 × expert_tensor_parallel_degree 2"):
        check_world_size(JobContext(with_layout(config, missing), 8))
    assert degrees(job_layout(config, 8))["ep"] == 4
    check_world_size(JobContext(job_layout(config, 8), 8))


def truncated_job(model: str, pp: int) -> Any:
    config = load(f"{model}_debugmodel")
    config.model.flavor, config.training.global_batch_size = "six_layers", -1
    config.training.local_batch_size = 1
    if pp > 1:
        p = config.parallelism
        p.data_parallel_shard_degree, p.pipeline_parallel_degree = 1, pp
        p.pipeline_parallel_schedule = "GPipe"  # which runs with one microbatch
        last = [*(f"layers.{n}" for n in range(1, 6)), "norm", "output"]
        p.module_fqns_per_model_part = [["tok_embeddings", "layers.0"], last]
    return config


CONVERTERS = ["npu_rms_norm", "npu_rope", "npu_gating", "npu_permute", "npu_gmm", "npu_dsa"]
TRUNCATED = {
    "FSDP2": ("llama3", 1, 1, []),
    "PP2, the last stage": ("llama3", 2, 1, []),
    "PP2 TP2 EP2, the last stage": ("deepseek_v32", 2, 2, CONVERTERS),
    "FSDP2, shared indexers, full recomputation": ("glm_moe_dsa", 1, 1, CONVERTERS),
}
"""Model, pipeline degree, tensor and expert parallel degree, converters."""


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[] if name.startswith("PP2,") else [pytest.mark.slow]) for name in TRUNCATED]
)
def test_a_truncated_dry_run_equals_a_full_one(name: str) -> None:
    model, pp, tp, converters = TRUNCATED[name]
    config = truncated_job(model, pp)
    config.model.converters = converters
    config.parallelism.tensor_parallel_degree = config.parallelism.expert_parallel_degree = tp
    if model == "glm_moe_dsa":
        config.activation_checkpoint.mode = "full"
    ranks, rank = 2 * tp, (pp - 1) * tp
    full, short = dry_run_rank(config, ranks, rank), dry_run_truncated(config, ranks, rank)
    assert short.timeline == []  # an extrapolated result has none
    assert (short.peak, short.flops, short.sent) == (full.peak, full.flops, full.sent)
    assert short.between_steps == full.between_steps


def test_which_layers_are_left_out() -> None:
    config = truncated_job("llama3", 1)
    layers = [f"layers.{n}" for n in range(6)]
    modules = ["tok_embeddings", *layers, "norm", "output"]
    assert repeated_groups(config, modules) == [[layer] for layer in layers]
    ac = config.activation_checkpoint
    ac.mode, ac.selective_ac_option = "selective", "2"
    assert repeated_groups(config, modules) == []  # every second layer is checkpointed
    ac.mode = "none"
    p = config.parallelism
    p.pipeline_parallel_degree, p.pipeline_parallel_schedule = 2, "Interleaved1F1B"
    assert repeated_groups(config, modules) == []  # two stages per rank
    of_experts = repeated_groups(truncated_job("deepseek_v32", 1), modules)
    assert of_experts == [[layer] for layer in layers[1:]]  # the first layer is dense
    assert repeated_groups(truncated_job("deepseek_v32", 1), [*layers[1:], layers[0]]) == []
    pairs = [[f"layers.{n}", f"layers.{n + 1}"] for n in range(1, 11, 2)]  # each shares an indexer
    assert repeated_groups(truncated_job("glm_moe_dsa", 1), [f"layers.{n}" for n in range(11)]) == pairs


def test_tied_weights_are_counted_once() -> None:
    config = load("qwen3_debugmodel")
    model: Any = build_on_meta(config)
    found = sizes(model)
    assert set(found) == set(modules_per_rank(config, model.model_args.n_layers)[0])
    assert found["output"] == Size(0, 0) and found["tok_embeddings"].total == model.output.weight.numel()


@pytest.mark.parametrize(
    ("wrong", "line"),
    [
        (["--expert-load", "0.5"], "--expert-load 0.5: must be balanced, worst, or a factor of at least 1"),
        (["--model.flavor", "none"], "model.flavor 'none' is not known"),
        (["--optimizer.name", "none"], "optimizer.name 'none' is not known"),
    ],
)
def test_a_mistake_in_the_file_ends_the_search(
    wrong: list[str], line: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    out = tmp_path / "search.json"
    options = ["--config", str(CONFIGS / "deepseek_v32_debugmodel.toml"), "--world-size", "4", "--search"]
    options += ["--backend", "cpu", "--json", str(out), "--training.global_batch_size", "-1"]
    assert command.main([*options, *wrong]) == 2
    assert line in capsys.readouterr().err.splitlines()[-1]
    assert line in json.loads(out.read_text())["error"]


SEARCHES = {
    "llama3": (2, {"FSDP2", "TP2", "CP2", "PP2"}),
    "deepseek_v32": (4, {"FSDP4", "FSDP4 EP4", "PP2 TP2", "FSDP2 TP2 EP4", "CP2 TP2"}),
}
"""By model: the number of ranks, and layouts that must be found."""


@pytest.mark.parametrize("model", ["llama3", pytest.param("deepseek_v32", marks=pytest.mark.slow)])
def test_search(model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "search.json"
    ranks, expected = SEARCHES[model]
    options = ["--config", str(CONFIGS / f"{model}_debugmodel.toml"), "--world-size", str(ranks), "--search"]
    options += ["--top", "1", "--backend", "cpu", "--json", str(out)]
    assert command.main([*options, "--model.flavor", "two_layers", "--training.global_batch_size", "-1"]) == 0
    layouts = json.loads(out.read_text())["layouts"]
    assert expected <= {layout["layout"] for layout in layouts}
    tried = [layout for layout in layouts if layout["dry_run_peak"] is not None]
    assert f"FSDP{ranks}" in {layout["layout"] for layout in tried} and len(tried) <= 3
    assert layouts[: len(tried)] == tried  # best first
    times = [layout["microseconds_per_token"] for layout in tried]
    assert times == sorted(times)
    config = load(f"{model}_debugmodel")
    config.model.flavor = "two_layers"
    parameters = sizes(build_on_meta(config)).values()
    for layout in tried:
        # The estimate has three times the largest module gathered, a dry run one to three times.
        changed = with_layout(config, {name: layout[name] for name in DEGREES})
        allowed = 2 * 4 * max(unsharded(size, changed).total for size in parameters)
        assert abs(layout["estimated_peak"] - layout["dry_run_peak"]) < allowed, layout["layout"]
    assert "more fit by the estimate" in " ".join(capsys.readouterr().out.split())
