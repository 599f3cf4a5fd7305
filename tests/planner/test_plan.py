"""The tool that rehearses a job: what it says is what a real start and a real step would show."""

from __future__ import annotations

import copy
import functools
import json
import math
import os
import sys
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from tests._helpers.layouts import add_flavor, job_config
from tests._helpers.multirank import run_on_ranks
from torchtitan_npu.config.parser import PACKAGE, JobConfigManager
from torchtitan_npu.config.preflight import build_on_meta
from torchtitan_npu.planner.expert_load import balanced, uneven

ROOT = Path(__file__).resolve().parents[2]

CONFIGS = PACKAGE / "train_configs"
LLAMA, DEEPSEEK = CONFIGS / "llama3_debugmodel.toml", CONFIGS / "deepseek_v32_debugmodel.toml"
DEGREE = "--parallelism.{}_parallel_degree"
TP, EP, CP, PP = (DEGREE.format(name) for name in ("tensor", "expert", "context", "pipeline"))

ANY_BATCH = ["--training.global_batch_size", "-1"]
SMALL = ["--model.flavor", "two_layers", *ANY_BATCH]
"""A rehearsal takes its time for each layer and batch, however wide they are."""
for model in ("llama3", "deepseek_v32"):
    add_flavor(model, "two_layers", {"n_layers": 2})
add_flavor("llama3", "one_layer", {"n_layers": 1})
add_flavor("deepseek_v32", "one_moe_layer", {"n_layers": 1, "n_dense_layers": 0})
ONE_LAYER = ["--model.flavor", "one_layer", *ANY_BATCH]
ONE_MOE_LAYER = ["--model.flavor", "one_moe_layer", *ANY_BATCH]

BROKEN = {
    "heads": (LLAMA, [TP, "32", *ANY_BATCH], "does not divide n_heads"),
    "experts": (DEEPSEEK, [EP, "32", *ANY_BATCH], "does not divide the 8 experts"),
    "sequence": (
        LLAMA,
        [CP, "4", "--training.seq_len", "132", *ANY_BATCH],
        "seq_len 132 is not a multiple of 8",
    ),
    "converter": (LLAMA, ["--model.converters", "npu_gmm", *ANY_BATCH], "npu_gmm"),
}
"""By what is wrong: the file, the options, what the error says."""


def load(file: Path, *options: str) -> Any:
    return JobConfigManager().parse_args(["--job.config_file", str(file), *options])


def rehearse(*arguments: str | Path) -> int:
    from torchtitan_npu.cli.plan import command as tool

    home = () if "--home" in arguments else ("--home", "cpu")  # the debug models are too small for an NPU's kernels
    return tool.main([str(argument) for argument in (*arguments, *home)])


@pytest.mark.parametrize("what", BROKEN)
def test_a_job_that_cannot_run_fails_with_the_error_of_a_real_start(
    what: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    import torchtitan_npu.train as entry

    file, options, words = BROKEN[what]
    monkeypatch.setenv("WORLD_SIZE", "32")
    monkeypatch.setattr(sys, "argv", ["train", "--job.config_file", str(file), *options])
    with pytest.raises(SystemExit) as exit:
        entry.main()
    real = capsys.readouterr().err.splitlines()[-1]
    assert exit.value.code == 2 and words in real
    assert rehearse("--config", file, "--world-size", "32", *options) == 2
    assert capsys.readouterr().err.splitlines()[-1] == real


def test_report(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out, picture = tmp_path / "rehearsal.json", tmp_path / "rehearsal.png"
    options = ["--config", DEEPSEEK, "--world-size", "4", PP, "2", EP, "2", "--json", out, "--picture", picture]
    assert rehearse(*options, "--training.local_batch_size", "2", *SMALL) == 0
    assert "stand-ins" in capsys.readouterr().out
    report = json.loads(out.read_text())
    assert (report["layout"], report["world_size"]) == ("PP2 FSDP2 EP2", 4)
    first, last = report["ranks"]
    assert (first["rank"], last["rank"]) == (0, 2)
    assert first["modules"] == "tok_embeddings, layer 0" and last["modules"].endswith("norm, output")
    for rank in report["ranks"]:
        assert sum(rank["at_peak"].values()) == rank["peak"] and rank["fits"]
        assert rank["where"].startswith(("layers.", "norm", "output", "tok_embeddings", "the loss"))
        assert {one["group"] for one in rank["collectives"]} >= {"pp"}
        assert not rank["without_gradient"]
    # 1F1B: while the last stage has one batch under way, the first has as many as there are stages
    assert first["at_peak"]["activations"] > last["at_peak"]["activations"]
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_what_does_not_fit_gets_advice_that_was_tried(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "rehearsal.json"
    small = ["--config", LLAMA, "--world-size", "2", "--device-memory", "0.001GiB"]
    assert rehearse(*small, "--json", out, *ONE_LAYER) == 1
    advice = {one["change"]: one["peak"] for one in json.loads(out.read_text())["advice"]}
    peak = json.loads(out.read_text())["ranks"][0]["peak"]
    assert "does not fit" in capsys.readouterr().out
    assert {change.split(" = ")[0] for change in advice} >= {
        "optimizer.swap",
        "activation_checkpoint.mode",
        "training.local_batch_size",
    }
    assert all(lower < peak for change, lower in advice.items() if "local_batch_size" in change)


def test_advice_is_judged_by_every_kind_of_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    """A change that makes the worst rank fit may leave another too large, which is then the worst."""
    from torchtitan_npu.planner import advice
    from torchtitan_npu.planner.job import rehearse_job

    config = load(LLAMA, PP, "2", *SMALL)
    config.parallelism.data_parallel_shard_degree = 1
    swapped = copy.deepcopy(config)
    swapped.optimizer.swap = True
    ranks: Any = rehearse_job(swapped, 2, [0, 1])
    least, most = sorted(ranks, key=lambda one: one.needed)
    before = [least, replace(most, peak=least.peak - 1)]
    monkeypatch.setattr(advice, "CHANGES", (advice._swap,))
    (tried,) = advice.advise(config, 2, before, "balanced", 1 << 40)
    assert least.needed < most.needed and (tried.peak, tried.rank) == (most.needed, most.rank)


def measured(layout: dict[str, int]) -> tuple[int, int]:
    """The real Trainer's second step on this rank, by torch's own means: the peak of the CPU's allocator, as its
    profiler has it, and FLOPs, by torch's counter."""
    from torch.profiler import ProfilerActivity, profile
    from torch.utils.flop_counter import FlopCounterMode, sdpa_backward_flop_count, sdpa_flop_count

    import torchtitan_npu.trainer as trainer_module

    aten = torch.ops.aten
    of_the_cpu = {  # torch has formulas for other devices' attention only; they get shapes
        aten._scaled_dot_product_flash_attention_for_cpu: lambda *args, **_: sdpa_flop_count(*args[:3]),
        aten._scaled_dot_product_flash_attention_for_cpu_backward: lambda *args, **_: sdpa_backward_flop_count(
            *args[:4]
        ),
    }
    config = measured_job(layout)
    with tempfile.TemporaryDirectory() as folder:
        config.job.dump_folder = folder
        trainer: Any = trainer_module.Trainer(config)
        batches = trainer.batch_generator(trainer.dataloader)
        trainer.step = 1
        trainer.train_step(batches)
        parameters = list(trainer.model_parts[0].parameters())
        states = [x for states in next(iter(trainer.optimizers)).state.values() for x in states.values()]
        standing = [*parameters, *trainer.model_parts[0].buffers(), *states]  # a step begins by dropping gradients
        local = {x.untyped_storage()._cdata: x for x in (getattr(x, "_local_tensor", x) for x in standing)}
        total = peak = sum(x.untyped_storage().nbytes() for x in local.values())
        trainer.step = 2
        with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
            trainer.train_step(batches)
        events: Any = profiler.profiler.kineto_results.events()
        for change in sorted((one.start_ns(), one.nbytes()) for one in events if one.name() == "[memory]"):
            total += change[1]
            peak = max(peak, total)
        trainer.step = 3
        with FlopCounterMode(display=False, custom_mapping=of_the_cpu) as flops:
            trainer.train_step(batches)
        trainer.close()
    return peak, flops.get_total_flops()


def measured_job(layout: dict[str, int]) -> Any:
    from tests._helpers.layouts import add_flavors

    add_flavors()
    options = {"metrics.log_freq": 1 << 20, "activation_checkpoint.mode": "full"}
    return job_config("llama3", layout, options)


@pytest.mark.parametrize("layout", [{}, {"tp": 2}], ids=["FSDP2", "TP2"])
def test_memory_and_work_are_those_of_a_real_step(layout: dict[str, int]) -> None:
    from torchtitan_npu.planner.parameters import sizes
    from torchtitan_npu.planner.rank import rehearse_rank

    peak, flops = run_on_ranks(2, measured, layout, process_group=False)[0]
    os.environ["WORLD_SIZE"] = "2"
    try:
        rehearsal = rehearse_rank(measured_job(layout), 2)
        modules = sizes(build_on_meta(measured_job(layout)))
    finally:
        del os.environ["WORLD_SIZE"]
    # A real collective holds what it works on until it has ended, which is now sooner and now later: with FSDP one
    # gathers a layer while one reduces another's gradient, in float32. And blocks are not rounded up.
    in_flight = 2 * 4 * max(size.total for size in modules.values())
    rounding = 512 * len(rehearsal.timeline)
    assert -rounding <= peak - rehearsal.peak <= in_flight, f"{peak} {rehearsal.peak} {in_flight} {rounding}"
    elements = sum(size.total for size in modules.values())
    if not layout:  # of DTensors torch counts all ranks' share
        assert rehearsal.flops == flops
        whole = rehearsal.accumulated * 4 * elements  # float32; half of it is the other rank's
        assert rehearsal.sent["fsdp", "reduce_scatter"] == whole // 2
        assert whole // 2 < rehearsal.sent["fsdp", "all_gather"] <= whole  # forward, and again backward


def test_standing_memory_is_the_arithmetic_of_parameters() -> None:
    from torchtitan_npu.planner.rank import rehearse_rank

    config = load(DEEPSEEK, *ONE_MOE_LAYER)
    shapes = [tuple(parameter.shape) for parameter in build_on_meta(config).parameters()]
    elements = sum(math.ceil(rows / 4) * math.prod(others) for rows, *others in shapes)  # FSDP shares out rows
    rounding = 512 * len(shapes)
    plain = rehearse_rank(config, 4)
    config.optimizer.swap = True
    swapped = rehearse_rank(config, 4)
    for category, size in (("parameters", 4), ("gradients", 4), ("optimizer states", 8)):
        assert 0 <= plain.standing[category] - size * elements <= 2 * rounding, category
    assert 0 <= swapped.host - 8 * elements <= 2 * rounding and not swapped.standing.get("optimizer states")
    assert sum(plain.standing.values()) - sum(swapped.standing.values()) >= 8 * elements


def test_flops_of_a_dense_model() -> None:
    from torchtitan_npu.planner.rank import rehearse_rank

    config = load(LLAMA, "--activation_checkpoint.mode", "none", *SMALL[:2])
    rehearsal = rehearse_rank(config, 1)
    model: Any = build_on_meta(config)
    args, training = model.model_args, config.training
    linears = sum(m.weight.numel() for m in model.modules() if isinstance(m, torch.nn.Linear))
    tokens = training.local_batch_size * training.seq_len * rehearsal.accumulated
    # scores and values forward, and five such products backward: the scores again, and the gradients of all four
    attention = 2 * (2 + 5) * args.n_layers * training.seq_len * args.dim
    assert rehearsal.flops == tokens * (3 * 2 * linears + attention)


def test_load() -> None:
    assert uneven(1.0, 4, 2)(160, 8) == balanced(160, 8)
    assert uneven(1.5, 4, 2)(160, 8) == [30, 30, *balanced(100, 6)]
    assert uneven(math.inf, 4, 2)(160, 8) == [80, 80, 0, 0, 0, 0, 0, 0]
    assert uneven(math.inf, 8, 2)(160, 8) == [80, *balanced(80, 7)]  # a token takes one expert once
    assert uneven(2.0, 1, 2)(160, 8) == [40, *balanced(120, 7)]
    assert uneven(math.inf, 4, 2, busiest=2)(160, 8) == [0, 0, 0, 0, 80, 80, 0, 0]


@functools.cache
def with_load(assumption: str, rank: int = 0, busiest: int = 0) -> Any:
    """Of ``rank`` of 4, when ``busiest`` has the experts that get the most."""
    from torchtitan_npu.planner.job import stated_load
    from torchtitan_npu.planner.rank import rehearse_rank

    config = load(DEEPSEEK, EP, "4", *ONE_MOE_LAYER)
    return rehearse_rank(config, 4, rank, stated_load(assumption, config, busiest))


def test_busier_experts_need_more_memory() -> None:
    even, half_more, worst = (with_load(x) for x in ("balanced", "1.5", "worst"))
    assert even.peak < half_more.peak < worst.peak
    # experts over all ranks: FSDP has one rank to gather from, and copies; that is given back, too
    assert even.standing.get("gathered parameters", 0) == 0
    assert even.standing.get("activations", 0) < 1 << 14  # counts of tokens; a layer's experts are 100 times as much


def test_the_busiest_experts_are_those_of_the_rehearsed_rank() -> None:
    """Every rank is the busiest in turn; where another is, a rank may get no token."""
    from torchtitan_npu.planner.job import rehearse_job

    first, idle = with_load("worst"), with_load("worst", rank=3, busiest=0)
    last: Any = rehearse_job(load(DEEPSEEK, EP, "4", *ONE_MOE_LAYER), 4, [3], "worst")[0]
    assert first.flops == last.flops and first.sent == last.sent
    assert idle.flops < last.flops


def test_traffic_of_every_kind_of_all_to_all() -> None:
    from torchtitan_npu.planner.fake_devices import fake_device, fake_ranks
    from torchtitan_npu.planner.traffic import Traffic

    traffic, key = Traffic({}), ("world", "all_to_all")

    def call(op: Any, *args: Any) -> None:
        traffic.saw(op, args, {}, op(*args))

    with fake_ranks(4), fake_device():
        group = torch.distributed.group.WORLD
        assert group is not None
        x = torch.empty(8, 4)
        call(torch.ops._dtensor.shard_dim_alltoall.default, x, 0, 1, group.group_name)
        assert traffic.sent[key] == x.nbytes * 3 / 4
        functional = torch.ops._c10d_functional.all_to_all_single.default
        call(functional, x[:0], [2, 2, 2, 2], [0, 0, 0, 0], group.group_name)  # a rank that has nothing to send
        assert traffic.sent[key] == 2 * x.nbytes * 3 / 4
        call(functional, x[:0], [0, 0, 0, 0], [0, 0, 0, 0], group.group_name)
        assert traffic.calls[key] == 3 and traffic.sent[key] == 2 * x.nbytes * 3 / 4


def test_an_npu_job_has_the_defaults_and_the_limits_of_an_npu(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from torchtitan_npu import platform

    assert load(LLAMA).training.mixed_precision_param == "float32"
    with platform.job_for("npu"):
        assert load(LLAMA).training.mixed_precision_param == "bfloat16"
    options = ["--config", DEEPSEEK, "--world-size", "1", "--model.converters", "npu_dsa", *ANY_BATCH]
    assert rehearse(*options, "--home", "npu") == 2
    assert "npu_dsa: an NPU would refuse" in capsys.readouterr().err
    offload = ["--config", LLAMA, "--world-size", "1", "--training.enable_cpu_offload", *ANY_BATCH]
    assert rehearse(*offload) == 2 and "needs an accelerator" in capsys.readouterr().err


def test_an_error_of_the_model_is_what_the_start_would_fail_with(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    from torchtitan.models.llama3.model.model import FeedForward

    def broken(self: Any, x: torch.Tensor) -> torch.Tensor:
        return self.w2(x)

    monkeypatch.setattr(FeedForward, "forward", broken)
    out = tmp_path / "rehearsal.json"
    assert rehearse("--config", LLAMA, "--world-size", "1", "--json", out, *ONE_LAYER) == 2
    assert "rank 0 (every rank): this start would fail with: RuntimeError" in capsys.readouterr().out
    assert json.loads(out.read_text())["failures"][0]["rank"] == 0


def test_an_error_of_the_rehearsal_is_not_the_job_s(monkeypatch: pytest.MonkeyPatch) -> None:
    from torchtitan_npu.planner.fake_devices import BelowSubclasses
    from torchtitan_npu.planner.rank import Recorder

    monkeypatch.setattr(Recorder, "call", BelowSubclasses.call)  # which is for subclasses to write
    with pytest.raises(NotImplementedError):
        rehearse("--config", LLAMA, "--world-size", "1", *ONE_LAYER)
    assert "LOCAL_RANK" not in os.environ


def test_nor_is_one_of_what_the_rehearsal_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    from torch.utils.flop_counter import flop_registry

    def broken(*args: Any, **kwargs: Any) -> int:
        raise ValueError("not what a start would raise")

    monkeypatch.setitem(flop_registry, torch.ops.aten.mm, broken)
    with pytest.raises(ValueError, match="not what a start would raise"):
        rehearse("--config", LLAMA, "--world-size", "1", *ONE_LAYER)


COMPILED = ("--compile.enable", "--npu.no-bypass_codegen", "--home", "cuda")
BUDGET = ("--activation_checkpoint.mode", "memory_budget")
ASYNC = (TP, "2", "--parallelism.enable_async_tensor_parallel")


@pytest.mark.parametrize(
    ("file", "options", "words"),
    [
        (DEEPSEEK, ["--dsa.document_mask"], "dsa.document_mask = true is not rehearsed"),
        (LLAMA, ["--training.enable_cpu_offload", "--home", "npu"], "training.enable_cpu_offload = true is not "),
        (LLAMA, [*BUDGET, *COMPILED], 'activation_checkpoint.mode = "memory_budget" is not rehearsed'),
    ],
    ids=["documents", "offload", "budget"],
)
def test_what_may_train_but_is_not_rehearsed(
    file: Path, options: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert rehearse("--config", file, "--world-size", "1", *options, *SMALL) == 2
    assert words in capsys.readouterr().err


@pytest.mark.parametrize(
    ("ranks", "options", "words"),
    [
        ("1", BUDGET, "AssertionError: Memory budget mode requires"),
        ("2", ASYNC, "RuntimeError: Async TP requires"),
    ],
    ids=["budget", "async"],
)
def test_what_needs_a_compiled_model_fails_without(
    ranks: str, options: tuple[str, ...], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert rehearse("--config", LLAMA, "--world-size", ranks, *options, *ONE_LAYER) == 2
    assert f"this start would fail with: {words}" in capsys.readouterr().out


def test_async_tensor_parallel_of_a_compiled_model_is_rehearsed_without() -> None:
    assert rehearse("--config", LLAMA, "--world-size", "2", *ASYNC, *COMPILED, *ONE_LAYER) == 0


@pytest.mark.parametrize(
    ("ranks", "options"),
    [("1", []), ("2", ["--optimizer.early_step_in_backward"])],  # which frees the others' gradients at once
    ids=["as it is", "early step"],
)
def test_a_parameter_without_gradient_is_named(
    ranks: str, options: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from torchtitan.models.llama3.model.model import FeedForward

    def without_w3(self: Any, x: torch.Tensor) -> torch.Tensor:
        return self.w2(torch.nn.functional.silu(self.w1(x)))

    monkeypatch.setattr(FeedForward, "forward", without_w3)
    assert rehearse("--config", LLAMA, "--world-size", ranks, *options, *ONE_LAYER) == 1
    named = [line for line in capsys.readouterr().out.splitlines() if "without gradient" in line]
    assert named == ["rank 0: without gradient: layers.0.feed_forward.w3.weight"]


@pytest.mark.parametrize("rank", ["x", "2", "-1"])
def test_a_rank_that_is_none(rank: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert rehearse("--config", LLAMA, "--world-size", "2", f"--rank={rank}", *SMALL) == 2
    assert capsys.readouterr().err.splitlines()[-1] == (
        f"torchtitan_npu: error: --rank {rank}: all-kinds, or a number from 0 to 1"
    )


def test_many_ranks() -> None:
    from torchtitan_npu.planner.rank import rehearse_rank

    config = load(LLAMA, TP, "8", PP, "2", "--training.local_batch_size", "2", *SMALL)
    rehearsal = rehearse_rank(config, 16384, 8192)
    assert ("fsdp", "reduce_scatter") in rehearsal.sent and rehearsal.standing["parameters"] > 0
