"""The command ``torchtitan-npu plan``: its report, its options, and its errors, which are those of a real start."""

from __future__ import annotations

import json
import os
import re
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torchtitan.models.llama3.model.model import FeedForward

from tests._helpers.layouts import add_flavor
from torchtitan_npu import platform, progress
from torchtitan_npu.cli import plan as command
from torchtitan_npu.config.parser import JobConfigManager
from torchtitan_npu.config.shipped_files import train_configs
from torchtitan_npu.planner import BelowSubclasses, search
from torchtitan_npu.planner.dry_run import StepRecorder, dry_run_rank
from torchtitan_npu.planner.report import draw

CONFIGS = train_configs()
LLAMA, DEEPSEEK = CONFIGS / "llama3_debugmodel.toml", CONFIGS / "deepseek_v32_debugmodel.toml"
DEGREE = "--parallelism.{}_parallel_degree"
TP, EP, CP, PP = (DEGREE.format(name) for name in ("tensor", "expert", "context", "pipeline"))

for layers, name in ((1, "one_layer"), (2, "two_layers")):
    add_flavor("llama3", name, {"n_layers": layers})
ANY_BATCH = ["--training.global_batch_size", "-1"]
ONE_LAYER = ["--model.flavor", "one_layer", *ANY_BATCH]


def plan(*arguments: str | Path) -> int:
    given = {"--backend", "--home"} & set(map(str, arguments))
    backend = () if given else ("--backend", "cpu")  # the debug models are too small for an NPU's kernels
    return command.main([str(argument) for argument in (*arguments, *backend)])


BROKEN = {
    "heads": (LLAMA, [TP, "32", *ANY_BATCH], "does not divide n_heads"),
    "experts": (DEEPSEEK, [EP, "32", *ANY_BATCH], "does not divide the 8 experts"),
    "sequence": (LLAMA, [CP, "4", "--training.seq_len", "132", *ANY_BATCH], "seq_len 132 is not a multiple of 8"),
    "converter": (LLAMA, ["--model.converters", "npu_gmm", *ANY_BATCH], "npu_gmm"),
}
"""By the thing that is wrong: the file, the options, a part of the error."""


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
    assert plan("--config", file, "--world-size", "32", *options) == 2
    assert capsys.readouterr().err.splitlines()[-1] == real


def test_report(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(progress, "LINE_INTERVAL_S", 0.01)  # standard error is not a terminal here
    out, picture = tmp_path / "job.json", tmp_path / "job.png"
    options = ["--config", LLAMA, "--world-size", "4", PP, "2", "--json", out, "--picture", picture, "--home", "cpu"]
    assert plan(*options, "--training.local_batch_size", "2", "--model.flavor", "two_layers", *ANY_BATCH) == 0
    shown, lines = capsys.readouterr()
    assert "reference kernels" in shown
    for line in ("plan: running the dry run of rank 0, 1 of 2", "plan: running the dry run of rank 2, 2 of 2"):
        assert re.search(rf"^{line} \(\d+ s(, about \d+ s left)?\)$", lines, re.MULTILINE)
    report = json.loads(out.read_text())
    assert (report["layout"], report["world_size"], report["backend"]) == ("PP2 FSDP2", 4, "cpu")
    first, last = report["ranks"]
    assert (first["rank"], last["rank"]) == (0, 2)
    assert first["modules"] == "tok_embeddings, layer 0" and last["modules"].endswith("norm, output")
    for rank in report["ranks"]:
        assert sum(rank["at_peak"].values()) == rank["peak"] and rank["fits"]
        assert rank["where"].startswith(("layers.", "norm", "output", "tok_embeddings", "the loss"))
        assert {one["group"] for one in rank["collectives"]} >= {"pp"}
        assert not rank["without_gradient"]
    assert picture.read_bytes().startswith(b"\x89PNG")
    seconds = [f"{sum(rank['seconds_at_assumed_rates'].values()):.4g}" for rank in report["ranks"]]
    assert f"│ total │ s, assumed rates │ {' │ '.join(seconds)}" in " ".join(shown.split())
    assert f"a step takes {report['step_seconds']:.4g} s at these rates" in shown


def test_what_does_not_fit_gets_advice_that_was_tried(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "job.json"
    small = ["--config", LLAMA, "--world-size", "1", "--device-memory", "0.001GiB", *ONE_LAYER]
    long = ["--training.seq_len", "4096", "--training.local_batch_size", "2", "--activation_checkpoint.mode", "none"]
    assert plan(*small, *long, "--json", out) == 1
    advice = {one["change"]: one["peak"] for one in json.loads(out.read_text())["advice"]}
    peak = json.loads(out.read_text())["ranks"][0]["peak"]
    assert "does not fit" in capsys.readouterr().out
    keys = {change.split(" = ")[0] for change in advice}
    assert keys >= {"optimizer.swap", "activation_checkpoint.mode", "training.local_batch_size"}
    assert all(lower < peak for change, lower in advice.items() if "local_batch_size" in change)


def test_advice_combines_one_mode_of_checkpointing_with_the_rest(monkeypatch: pytest.MonkeyPatch) -> None:
    options = ["--job.config_file", str(LLAMA), *ONE_LAYER, "--activation_checkpoint.mode", "none"]
    config = JobConfigManager().parse_args(options)
    few = [one for one in search.changes(config) if one[0] in ("optimizer", "activation_checkpoint")]
    monkeypatch.setattr(search, "changes", lambda config: few)
    needy = replace(dry_run_rank(config, 1), peak=1 << 40)  # every change lowers it
    changes = [one.change for one in search.advise(config, 1, [needy], "balanced", 1 << 30)]
    assert changes[1] == 'activation_checkpoint.mode = "selective", selective_ac_option = "op"'
    assert changes[3:] == ['optimizer.swap = true; activation_checkpoint.mode = "full"']


def test_the_plot_s_limit_leaves_room_for_hccl_and_workspaces(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from matplotlib.axes import Axes

    limits: list[float] = []
    monkeypatch.setattr(Axes, "axhline", lambda self, y, **_: limits.append(y))
    one: Any = SimpleNamespace(rank=0, timeline=[{}], phases=[], peak=0, where="", phase="")
    one.hccl_buffers, one.kept_workspace = 1 << 30, 1 << 29
    draw(tmp_path / "memory.png", {"every rank": one}, 4 << 30, "a job")
    assert limits == [2.5]


def test_an_npu_job_has_the_defaults_and_the_limits_of_an_npu(capsys: pytest.CaptureFixture[str]) -> None:
    def load() -> Any:
        return JobConfigManager().parse_args(["--job.config_file", str(LLAMA)])

    assert load().training.mixed_precision_param == "float32"
    with platform.job_for("npu"):
        assert load().training.mixed_precision_param == "bfloat16"
    options = ["--config", DEEPSEEK, "--world-size", "1", "--model.converters", "npu_dsa", *ANY_BATCH]
    assert plan(*options, "--backend", "npu") == 2
    assert "npu_dsa: not supported by the NPU kernel" in capsys.readouterr().err
    offload = ["--config", LLAMA, "--world-size", "1", "--training.enable_cpu_offload", *ANY_BATCH]
    assert plan(*offload) == 2 and "needs an accelerator" in capsys.readouterr().err


def test_an_error_of_the_model_is_what_the_start_would_fail_with(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setattr(FeedForward, "forward", lambda self, x: self.w2(x))
    out = tmp_path / "job.json"
    assert plan("--config", LLAMA, "--world-size", "1", "--json", out, *ONE_LAYER) == 2
    assert "rank 0 (every rank): this start would fail with: RuntimeError" in capsys.readouterr().out
    assert json.loads(out.read_text())["failures"][0]["rank"] == 0


def test_an_error_of_the_model_ends_the_search_in_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(FeedForward, "forward", lambda self, x: self.w2(x))
    assert plan("--config", LLAMA, "--world-size", "2", "--search", *ONE_LAYER) == 2
    line = capsys.readouterr().err.splitlines()[-1]
    assert line.startswith(
        "torchtitan_npu: error: FSDP2, truncated to few layers: this start would fail with: RuntimeError: "
    )


def test_an_error_of_the_planner_is_not_the_job_s(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(StepRecorder, "call", BelowSubclasses.call)  # which subclasses must override
    with pytest.raises(NotImplementedError):
        plan("--config", LLAMA, "--world-size", "1", *ONE_LAYER)
    assert "LOCAL_RANK" not in os.environ


def test_an_error_of_a_formula_is_not_the_job_s(monkeypatch: pytest.MonkeyPatch) -> None:
    from torch.utils.flop_counter import flop_registry

    def broken(*args: Any, **kwargs: Any) -> int:
        raise ValueError("not what a start would raise")

    monkeypatch.setitem(flop_registry, torch.ops.aten.mm, broken)
    with pytest.raises(ValueError, match="not what a start would raise"):
        plan("--config", LLAMA, "--world-size", "1", *ONE_LAYER)


COMPILED = ("--compile.enable", "--npu.bypass_codegen", "off", "--backend", "cuda")
BUDGET = ("--activation_checkpoint.mode", "memory_budget")
ASYNC = (TP, "2", "--parallelism.enable_async_tensor_parallel")
REPLICAS = ("--parallelism.data_parallel_replicate_degree=2", "--parallelism.data_parallel_shard_degree=1")


@pytest.mark.parametrize(
    ("file", "ranks", "options", "words"),
    [
        (DEEPSEEK, "1", ["--dsa.document_mask"], "dsa.document_mask = true is not supported in a dry run"),
        (
            LLAMA,
            "1",
            ["--training.enable_cpu_offload", "--backend", "npu"],
            "enable_cpu_offload = true is not supported",
        ),
        (LLAMA, "1", [*BUDGET, *COMPILED], 'activation_checkpoint.mode = "memory_budget" is not supported'),
        (LLAMA, "2", REPLICAS, "data_parallel_replicate_degree 2 alone is not supported in a dry run"),
    ],
    ids=["documents", "offload", "budget", "DDP"],
)
def test_limits_of_dry_runs(
    file: Path, ranks: str, options: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert plan("--config", file, "--world-size", ranks, *options, *ANY_BATCH) == 2
    assert words in capsys.readouterr().err


LIBRARY = torch.library.Library("test_plan_command", "DEF")
LIBRARY.define("twice(Tensor x) -> Tensor")
LIBRARY.impl("twice", lambda x: 2 * x, "CPU")  # without a fake kernel


@pytest.mark.parametrize(
    ("forward", "limit"),
    [
        (lambda self, x: self.w2(self.w1(x)) * x.sum().item(), "the model reads a tensor's value"),
        (lambda self, x: self.w2(torch.ops.test_plan_command.twice(self.w1(x))), "an operator has no fake kernel"),
    ],
    ids=["value", "operator"],
)
def test_a_limit_of_fake_tensors_is_no_error_of_the_start(
    forward: Any, limit: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(FeedForward, "forward", forward)
    assert plan("--config", LLAMA, "--world-size", "1", *ONE_LAYER) == 2
    out = " ".join(capsys.readouterr().out.split())
    assert f"rank 0 (every rank): a dry run is not possible, {limit}: " in out and "would fail" not in out


def test_what_needs_a_compiled_model_fails_without(capsys: pytest.CaptureFixture[str]) -> None:
    assert plan("--config", LLAMA, "--world-size", "2", *ASYNC, *ONE_LAYER) == 2
    assert "this start would fail with: RuntimeError: Async TP requires" in capsys.readouterr().out


def test_a_dry_run_of_a_compiled_model_has_no_async_tensor_parallel() -> None:
    assert plan("--config", LLAMA, "--world-size", "2", *ASYNC, *COMPILED, *ONE_LAYER) == 0


@pytest.mark.parametrize(
    ("ranks", "options"),
    # an early step frees the other gradients at once
    [("1", []), ("2", ["--optimizer.early_step_in_backward", "--training.max_nonfinite_steps=0"])],
    ids=["default", "early step"],
)
def test_a_parameter_without_gradient_is_named(
    ranks: str, options: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(FeedForward, "forward", lambda self, x: self.w2(torch.nn.functional.silu(self.w1(x))))
    assert plan("--config", LLAMA, "--world-size", ranks, *options, *ONE_LAYER) == 1
    named = [line for line in capsys.readouterr().out.splitlines() if "without gradient" in line]
    assert named == ["rank 0: without gradient: layers.0.feed_forward.w3.weight"]


@pytest.mark.parametrize("rank", ["x", "2", "-1"])
def test_invalid_ranks(rank: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert plan("--config", LLAMA, "--world-size", "2", f"--rank={rank}", *ONE_LAYER) == 2
    assert capsys.readouterr().err.splitlines()[-1] == (
        f"torchtitan_npu: error: --rank {rank}: must be representative, or a number from 0 to 1"
    )


@pytest.mark.parametrize("search", [(), ("--search",)], ids=["dry run", "search"])
@pytest.mark.parametrize(("name", "degree"), [("tensor", 0), ("pipeline", -2), ("expert", 0)])
def test_an_invalid_degree_is_the_error_of_a_real_start(
    name: str, degree: int, search: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    key = f"parallelism.{name}_parallel_degree"
    assert plan("--config", LLAMA, "--world-size", "2", *search, f"--{key}={degree}") == 2
    assert capsys.readouterr().err == f"torchtitan_npu: error: {key} is {degree}; it must be at least 1\n"


@pytest.mark.parametrize(
    ("options", "error"),
    [
        (["--bandwidth", "100,tq=200"], "--bandwidth 100,tq=200: unknown group tq (tp, ep, "),
        (["--bandwidth", "100,200"], "--bandwidth 100,200: two values for all groups"),
        (["--bandwidth", "tp=1,tp=2"], "--bandwidth tp=1,tp=2: two values for tp"),
        (["--tflops", "0"], "--tflops 0: must be more than 0"),
        (["--device-memory", "0GiB"], "--device-memory: must be more than 0"),
        (["--search", "--top", "0"], "--top 0: must be at least 1"),
        (["--json", "no_such_folder/x.json"], "--json no_such_folder/x.json: there is no folder no_such_folder"),
        (["--picture", "no_such_folder/x.png"], "--picture no_such_folder/x.png: there is no folder no_such_folder"),
        (["--json", "/"], "--json /: cannot be written: Is a directory"),
        (["--json", "/proc/x.json"], "--json /proc/x.json: cannot be written: "),
        (["--json", "/proc/x.json", "--world-size", "0"], "--world-size 0: must be at least 1"),
        (["--picture", "x.docx"], "--picture x.docx: must end in one of ."),
        (["--search", "--picture", "x.png"], "--picture cannot be combined with --search"),
        (["--search", "--rank", "0"], "--rank cannot be combined with --search"),
        (["--search", "--no-advice"], "--no-advice cannot be combined with --search"),
    ],
)
def test_invalid_options_are_refused_at_once(
    options: list[str], error: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert plan("--config", "no_such_file.toml", *options) == 2
    assert capsys.readouterr().err.startswith(f"torchtitan_npu: error: {error}")


def test_the_json_file_has_the_error_of_the_job(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "job.json"
    options = ("--json", out, "--picture", tmp_path / "job.png")
    assert plan("--config", LLAMA, *options, "--parallelism.tensor_parallel_degree=0") == 2
    assert json.loads(out.read_text())["error"] in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == [out]
