"""Dry runs: memory, work and traffic of a step are those of a real step."""

from __future__ import annotations

import copy
import math
import os
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torchtitan.config import JobConfig
from torchtitan.train import Trainer as TitanTrainer

from tests._helpers.layouts import add_flavor, add_flavors, job_config
from tests._helpers.multirank import run_on_ranks
from torchtitan_npu.config.parser import JobConfigManager
from torchtitan_npu.config.shipped_files import train_configs
from torchtitan_npu.planner import balanced, search
from torchtitan_npu.planner.dry_run import dry_run_rank
from torchtitan_npu.planner.dry_run_ranks import assumed_load, dry_run_ranks
from torchtitan_npu.planner.estimate import Estimate
from torchtitan_npu.planner.fake_devices import uneven
from torchtitan_npu.planner.layout import sizes
from torchtitan_npu.planner.report import draw, print_advice, print_layouts
from torchtitan_npu.planner.search import Layout
from torchtitan_npu.planner.trainer import local_rank
from torchtitan_npu.planner.work import Rates
from torchtitan_npu.preflight.job_context import build_on_meta

CONFIGS = train_configs()
LLAMA, DEEPSEEK = CONFIGS / "llama3_debugmodel.toml", CONFIGS / "deepseek_v32_debugmodel.toml"
ANY_BATCH = ["--training.global_batch_size", "-1"]
for layers, name in ((1, "one_layer"), (2, "two_layers"), (3, "three_layers")):
    add_flavor("llama3", name, {"n_layers": layers})  # a dry run takes time for each layer, however wide it is
add_flavor("deepseek_v32", "one_moe_layer", {"n_layers": 1, "n_dense_layers": 0})
ONE_LAYER = ["--model.flavor", "one_layer", *ANY_BATCH]


def load(file: Path, *options: str) -> Any:
    return JobConfigManager().parse_args(["--job.config_file", str(file), *options])


def measured(layout: dict[str, int]) -> tuple[int, int]:
    """Return peak memory and FLOPs of the real Trainer's second step on this rank, by torch's profiler and counter."""
    from torch.profiler import ProfilerActivity, profile
    from torch.utils.flop_counter import FlopCounterMode, sdpa_backward_flop_count, sdpa_flop_count

    from torchtitan_npu.trainer import Trainer

    aten = torch.ops.aten
    cpu_attention = {  # torch's counter knows the attention kernels of other devices only; formulas get shapes
        aten._scaled_dot_product_flash_attention_for_cpu: lambda *args, **_: sdpa_flop_count(*args[:3]),
        aten._scaled_dot_product_flash_attention_for_cpu_backward: lambda *args, **_: sdpa_backward_flop_count(
            *args[:4]
        ),
    }
    config = measured_job(layout)
    with tempfile.TemporaryDirectory() as folder:
        config.job.dump_folder = folder
        trainer: Any = Trainer(config)
        batches = trainer.batch_generator(trainer.dataloader)
        trainer.step = 1
        trainer.train_step(batches)
        parameters = list(trainer.model_parts[0].parameters())
        states = [x for states in next(iter(trainer.optimizers)).state.values() for x in states.values()]
        between_steps = [*parameters, *trainer.model_parts[0].buffers(), *states]  # a step first frees the gradients
        storages = {x.data_ptr(): x for x in (getattr(x, "_local_tensor", x).untyped_storage() for x in between_steps)}
        total = peak = sum(x.nbytes() for x in storages.values())
        trainer.step = 2
        with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
            trainer.train_step(batches)
        events: Any = profiler.profiler.kineto_results.events()
        for change in sorted((one.start_ns(), one.nbytes()) for one in events if one.name() == "[memory]"):
            total += change[1]
            peak = max(peak, total)
        trainer.step = 3
        with FlopCounterMode(display=False, custom_mapping=cpu_attention) as flops:
            trainer.train_step(batches)
        trainer.close()
    return peak, flops.get_total_flops()


def measured_job(layout: dict[str, int]) -> Any:
    add_flavors()
    options = {"metrics.log_freq": 1 << 20, "activation_checkpoint.mode": "full"}
    options["training.max_nonfinite_steps"] = 0  # it keeps random states in host memory, which is measured on a CPU
    return job_config("llama3", layout, options)


@pytest.mark.parametrize(
    ("ranks", "layout"),
    [
        (1, {}),
        pytest.param(2, {}, marks=pytest.mark.slow),
        pytest.param(2, {"tp": 2}, marks=pytest.mark.slow),
    ],
    ids=["one rank", "FSDP2", "TP2"],
)
def test_memory_and_work_match_a_real_step(ranks: int, layout: dict[str, int], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", str(ranks))
    if ranks == 1:  # in this process, which is faster
        for name, value in {"RANK": "0", "LOCAL_RANK": "0", "MASTER_ADDR": "localhost", "MASTER_PORT": "0"}.items():
            monkeypatch.setenv(name, value)
        peak, flops = measured(layout)
        torch.distributed.destroy_process_group()
    else:
        peak, flops = run_on_ranks(ranks, measured, layout, process_group=False)[0]
    run = dry_run_rank(measured_job(layout), ranks)
    modules = sizes(build_on_meta(measured_job(layout)))
    # A real collective holds its buffers until it ends, which varies. With FSDP one gathers a layer while another
    # reduces a gradient, both in float32. Real blocks are not rounded up.
    in_flight = 2 * 4 * max(size.total for size in modules.values()) if ranks > 1 else 0
    rounding = 512 * len(run.timeline)
    assert -rounding <= peak - run.peak <= in_flight, f"{peak} {run.peak} {in_flight} {rounding}"
    elements = sum(size.total for size in modules.values())
    if not layout:  # with TP torch counts the DTensor FLOPs of all ranks
        assert run.flops == flops
    if ranks > 1 and not layout:
        unsharded = run.accumulated * 4 * elements  # float32; one half is the other rank's
        assert run.sent["fsdp", "reduce_scatter"] == unsharded // 2
        assert unsharded // 2 < run.sent["fsdp", "all_gather"] <= unsharded  # forward, and again backward


def test_the_constructor_needs_a_local_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("LOCAL_RANK", raising=False)
    constructor: Any = TitanTrainer.__init__
    with pytest.raises(KeyError, match="LOCAL_RANK"):
        constructor.__wrapped__(TitanTrainer.__new__(TitanTrainer), JobConfig())
    with local_rank():
        assert os.environ["LOCAL_RANK"] == "0"
    assert "LOCAL_RANK" not in os.environ


def test_memory_between_steps_is_the_arithmetic_of_parameters() -> None:
    config = load(LLAMA, *ONE_LAYER)
    shapes = [tuple(parameter.shape) for parameter in build_on_meta(config).parameters()]
    elements = sum(math.ceil(rows / 4) * math.prod(others) for rows, *others in shapes)  # FSDP shards dimension 0
    rounding = 512 * len(shapes)
    plain = dry_run_rank(config, 4)
    config.optimizer.swap = True
    swapped = dry_run_rank(config, 4)
    for category, size in (("parameters", 4), ("gradients", 4), ("optimizer states", 8)):
        assert 0 <= plain.between_steps[category] - size * elements <= 2 * rounding, category
    assert 0 <= swapped.host - 8 * elements <= 2 * rounding and not swapped.between_steps.get("optimizer states")
    assert sum(plain.between_steps.values()) - sum(swapped.between_steps.values()) >= 8 * elements
    config.training.dtype, config.optimizer.swap_fraction = "bfloat16", 0.5
    halved = dry_run_rank(config, 4).between_steps
    largest = 4 * max(math.prod(shape) for shape in shapes)  # all states of a parameter are swapped, or none
    found = sum(halved[name] for name in ("parameters", "gradients", "optimizer states"))
    assert 0 <= found - 6 * elements <= largest + 5 * rounding


def test_flops_of_a_dense_model() -> None:
    config = load(LLAMA, "--activation_checkpoint.mode", "none", "--model.flavor", "one_layer")
    run = dry_run_rank(config, 1)
    model: Any = build_on_meta(config)
    args, training = model.model_args, config.training
    linears = sum(m.weight.numel() for m in model.modules() if isinstance(m, torch.nn.Linear))
    assert run.accumulated > 2
    tokens = training.local_batch_size * training.seq_len * run.accumulated
    # Attention has two products forward and five backward: the scores again, and four gradients.
    attention = 2 * (2 + 5) * args.n_layers * training.seq_len * args.dim
    assert run.flops == tokens * (3 * 2 * linears + attention)


def test_a_chunked_loss_needs_less_memory_for_the_same_work() -> None:
    options = [*ONE_LAYER, "--training.seq_len", "1024", "--npu.loss_chunk_tokens"]
    at_once, in_chunks = (dry_run_rank(load(LLAMA, *options, tokens), 1) for tokens in ("0", "1024"))
    assert in_chunks.flops == at_once.flops
    logits = 1024 * 2048 * 4  # float32, for each sequence of the batch
    batch = load(LLAMA).training.local_batch_size
    assert at_once.peak - in_chunks.peak > batch * logits


def test_uneven_loads() -> None:
    assert uneven(1.0, 4, 2)(160, 8) == balanced(160, 8)
    assert uneven(1.5, 4, 2)(160, 8) == [30, 30, *balanced(100, 6)]
    assert uneven(math.inf, 4, 2)(160, 8) == [80, 80, 0, 0, 0, 0, 0, 0]
    assert uneven(math.inf, 8, 2)(160, 8) == [80, *balanced(80, 7)]  # a token goes to an expert at most once
    assert uneven(2.0, 1, 2)(160, 8) == [40, *balanced(120, 7)]
    assert uneven(math.inf, 4, 2, busiest=2)(160, 8) == [0, 0, 0, 0, 80, 80, 0, 0]


@pytest.mark.parametrize("key", ["record", "replay"])
def test_a_dry_run_needs_no_record(key: str, tmp_path: Path) -> None:
    options = ["--model.flavor", "one_moe_layer", *ANY_BATCH, f"--replay.{key}", str(tmp_path / "choices")]
    assert dry_run_rank(load(DEEPSEEK, *options), 1).peak > 0
    assert not list(tmp_path.iterdir())


def with_load(assumption: str) -> Any:
    """Dry-run rank 0 of 4 expert-parallel ranks."""
    config = load(DEEPSEEK, "--parallelism.expert_parallel_degree", "4", "--model.flavor", "one_moe_layer", *ANY_BATCH)
    return dry_run_rank(config, 4, 0, assumed_load(assumption, config, 0))


def test_busier_experts_need_more_memory() -> None:
    even, worst = with_load("balanced"), with_load("worst")
    assert even.peak < worst.peak
    # With EP over all ranks FSDP gathers from one rank, and copies. The copy is freed too.
    assert even.between_steps.get("gathered parameters", 0) == 0
    # Token counts stay; the experts of a layer would be 100 times as large.
    assert even.between_steps.get("activations", 0) < 1 << 14


def test_the_busiest_experts_are_those_of_the_rank_of_the_dry_run() -> None:
    config = load(DEEPSEEK, "--parallelism.expert_parallel_degree", "4", "--model.flavor", "one_moe_layer", *ANY_BATCH)
    first = with_load("worst")
    last: Any = dry_run_ranks(config, 4, [3], "worst")[0]
    assert first.flops == last.flops and first.sent == last.sent


def test_where_the_peak_is(tmp_path: Path) -> None:
    """The logits and their gradients are the peak of a small model."""
    options = ("--training.local_batch_size", "8", "--training.seq_len", "512")
    one = dry_run_rank(load(LLAMA, *ONE_LAYER, *options), 2)
    assert (one.where, one.phase) == ("the loss", "backward")
    places = {place for place in one.peaks if place[0] in ("forward", "backward")}
    for phase in ("forward", "backward"):
        assert places >= {(phase, name) for name in ("tok_embeddings", "layers.0", "output", "the loss")}
    assert not {module for _, module in places} & {"forward", "backward", ""}
    draw(tmp_path / "memory.svg", {"every rank": one}, 1 << 30, "a job")
    assert "the loss (backward)" in (tmp_path / "memory.svg").read_text()


@pytest.mark.slow
def test_advice_is_judged_by_every_representative_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    """A change that makes the worst rank fit may leave another rank as the worst."""
    pipeline = ["--parallelism.pipeline_parallel_degree", "2", "--model.flavor", "two_layers", *ANY_BATCH]
    config = load(LLAMA, *pipeline)
    config.parallelism.data_parallel_shard_degree = 1
    swapped = copy.deepcopy(config)
    swapped.optimizer.swap = True
    ranks: Any = dry_run_ranks(swapped, 2, [0, 1])
    least, most = sorted(ranks, key=lambda one: one.needed)
    before = [least, replace(most, peak=least.peak - 1)]
    monkeypatch.setattr(search, "changes", lambda config: [("optimizer", {"swap": True})])
    (tried,) = search.advise(config, 2, before, "balanced", 1 << 40)
    assert least.needed < most.needed and (tried.peak, tried.rank) == (most.needed, most.rank)


def test_a_parameter_without_gradient_is_an_error_of_advice_and_search(monkeypatch: pytest.MonkeyPatch) -> None:
    from rich.console import Console
    from torchtitan.models.llama3.model.model import FeedForward

    config = load(LLAMA, *ONE_LAYER)
    config.parallelism.data_parallel_shard_degree = 1
    before = dry_run_rank(config, 1)
    monkeypatch.setattr(FeedForward, "forward", lambda self, x: self.w2(torch.nn.functional.silu(self.w1(x))))
    monkeypatch.setattr(search, "changes", lambda config: [("optimizer", {"swap": True})])
    (tried,) = search.advise(config, 1, [before], "balanced", 1 << 40)
    layout = Layout(config, Estimate([1], [1.0]))
    layout.run(1, [0], "balanced")
    words = "without gradient: layers.0.feed_forward.w3.weight"
    assert tried.peak is None and tried.error == words
    assert layout.error == f"rank 0: {words}" and not layout.fits(1 << 40)
    console = Console(width=200, record=True)
    tried.error = layout.error = "RuntimeError: sizes [/2] and [red]"  # not markup
    print_advice(console, [tried], before, 1 << 40)
    print_layouts(console, [layout], 1 << 40, Rates())
    assert console.export_text().count("RuntimeError: sizes [/2] and [red]") == 2
