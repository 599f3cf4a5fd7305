"""Rehearsals: where the peak is, what options are refused, what the estimate counts."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests._helpers.layouts import add_flavor
from torchtitan_npu.config.parser import PACKAGE, JobConfigManager

ROOT = Path(__file__).resolve().parents[2]

CONFIGS = PACKAGE / "train_configs"
LLAMA, DEEPSEEK = CONFIGS / "llama3_debugmodel.toml", CONFIGS / "deepseek_v32_debugmodel.toml"
for number, name in ((1, "one_layer"), (3, "three_layers")):
    add_flavor("llama3", name, {"n_layers": number})
ONE_LAYER = ("--model.flavor", "one_layer", "--training.global_batch_size", "-1")


def load(file: Path, *options: str) -> Any:
    return JobConfigManager().parse_args(["--job.config_file", str(file), *options])


@pytest.mark.parametrize(
    ("at_work", "where"),
    [
        # a module that returns its input is never seen to end
        (["layers.3", "layers.3._checkpoint_wrapped_module.moe", "layers.4.attention.inputs"], "layers.3.moe"),
        (["layers.9", "layers.10"], "layers.10"),
        (["layers.9", "layers.10", "layers.9.moe"], "layers.9.moe"),
        (["norm"], "norm"),
        ([], "between modules"),
    ],
)
def test_where_a_peak_is_does_not_depend_on_the_order_of_a_set(at_work: list[str], where: str) -> None:
    from torchtitan_npu.planner.memory import Memory

    memory = Memory(torch.device("cpu"))
    memory.enter("forward")
    memory._modules.parents |= {"Model", *(f"Model.{name}" for name in at_work)}
    assert memory._where() == where


def test_a_peak_at_the_loss_is_told_from_one_between_modules(tmp_path: Path) -> None:
    """Of a small model the logits and their gradients are the most that there is; FSDP reduces between modules."""
    from torchtitan_npu.planner.picture import draw
    from torchtitan_npu.planner.rank import rehearse_rank

    options = ("--training.local_batch_size", "8", "--training.seq_len", "512")
    one = rehearse_rank(load(LLAMA, *ONE_LAYER, *options), 2)
    assert (one.where, one.phase) == ("the loss", "backward")
    places = {place for place in one.peaks if place[0] in ("forward", "backward")}
    assert places >= {("forward", "the loss"), ("backward", "the loss"), ("backward", "between modules")}
    assert not {module for _, module in places} & {"forward", "backward", ""}
    draw(tmp_path / "memory.svg", {"every rank": one}, 1 << 30, "a job")
    assert "the loss (backward)" in (tmp_path / "memory.svg").read_text()


def test_the_picture_s_limit_leaves_room_for_hccl(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from matplotlib.axes import Axes

    from torchtitan_npu.planner.picture import draw

    limits: list[float] = []
    monkeypatch.setattr(Axes, "axhline", lambda self, y, **_: limits.append(y))
    one: Any = SimpleNamespace(rank=0, timeline=[{}], phases=[], peak=0, where="", phase="", hccl_buffers=1 << 30)
    draw(tmp_path / "memory.png", {"every rank": one}, 4 << 30, "a job")
    assert limits == [3.0]


def rehearse(*arguments: str | Path) -> int:
    from torchtitan_npu.cli.plan import command as tool

    return tool.main([str(argument) for argument in (*arguments, "--home", "cpu")])


@pytest.mark.parametrize("search", [(), ("--search",)], ids=["rehearse", "search"])
@pytest.mark.parametrize("name", ["tensor", "pipeline", "expert"])
@pytest.mark.parametrize("degree", [0, -2])
def test_a_degree_that_is_none_is_the_error_of_a_real_start(
    name: str, degree: int, search: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    key = f"parallelism.{name}_parallel_degree"
    assert rehearse("--config", LLAMA, "--world-size", "2", *search, f"--{key}={degree}") == 2
    assert capsys.readouterr().err == f"torchtitan_npu: error: {key} is {degree}; it must be at least 1\n"


@pytest.mark.parametrize(
    ("options", "error"),
    [
        (["--bandwidth", "100,tq=200"], "--bandwidth 100,tq=200: no group tq (tp, ep, "),
        (["--bandwidth", "100,200"], "--bandwidth 100,200: two numbers for all groups"),
        (["--bandwidth", "tp=1,tp=2"], "--bandwidth tp=1,tp=2: two numbers for tp"),
        (["--tflops", "0"], "--tflops 0: more than 0"),
        (["--device-memory", "0GiB"], "--device-memory: more than 0"),
        (["--search", "--top", "0"], "--top 0: at least 1"),
        (["--json", "no_such_folder/x.json"], "--json no_such_folder/x.json: there is no folder no_such_folder"),
        (["--picture", "no_such_folder/x.png"], "--picture no_such_folder/x.png: there is no folder no_such_folder"),
        (["--json", "/"], "--json /: cannot be written: Is a directory"),
        (["--json", "/proc/x.json"], "--json /proc/x.json: cannot be written: "),
        (["--json", "/proc/x.json", "--world-size", "0"], "--world-size 0: at least 1"),
        (["--picture", "/proc/x.png"], "--picture /proc/x.png: cannot be written: "),
        (["--picture", "x.docx"], "--picture x.docx: its name ends in one of ."),
        (["--search", "--picture", "x.png"], "--picture does not go with --search"),
        (["--search", "--rank", "0"], "--rank does not go with --search"),
        (["--search", "--no-advice"], "--no-advice does not go with --search"),
    ],
)
def test_an_option_that_cannot_be_is_refused_at_once(
    options: list[str], error: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert rehearse("--config", "no_such_file.toml", *options) == 2
    assert capsys.readouterr().err.startswith(f"torchtitan_npu: error: {error}")


def test_what_is_written_when_the_job_has_a_mistake(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "job.json"
    options = ("--json", out, "--picture", tmp_path / "job.png")
    assert rehearse("--config", LLAMA, *options, "--parallelism.tensor_parallel_degree=0") == 2
    assert json.loads(out.read_text())["error"] in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == [out]


def test_ddp_is_not_rehearsed(capsys: pytest.CaptureFixture[str]) -> None:
    """Its start compares the ranks' parameters: what fake ones raise there is no error of the job."""
    degrees = ["--parallelism.data_parallel_replicate_degree=2", "--parallelism.data_parallel_shard_degree=1"]
    assert rehearse("--config", LLAMA, "--world-size", "2", *degrees, *ONE_LAYER) == 2
    assert capsys.readouterr().err.startswith(
        "torchtitan_npu: error: parallelism.data_parallel_replicate_degree 2 with nothing else is not rehearsed"
    )


def test_layers_of_which_some_are_checkpointed_are_not_left_out() -> None:
    from torchtitan_npu.planner.shortened import rehearse_shortened

    add_flavor("llama3", "six_layers", {"n_layers": 6})
    options = (
        *ONE_LAYER[2:],
        "--activation_checkpoint.mode",
        "selective",
        "--activation_checkpoint.selective_ac_option",
    )
    config = load(LLAMA, "--model.flavor", "six_layers", *options, "2")
    assert rehearse_shortened(config, 1).timeline  # which a rehearsal with fewer layers would not have


def test_what_ends_the_start_ends_the_search_in_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from torchtitan.models.llama3.model.model import FeedForward

    monkeypatch.setattr(FeedForward, "forward", lambda self, x: self.w2(x))
    assert rehearse("--config", LLAMA, "--world-size", "2", "--search", *ONE_LAYER) == 2
    line = capsys.readouterr().err.splitlines()[-1]
    assert line.startswith(
        "torchtitan_npu: error: FSDP2, cut to few layers: this start would fail with: RuntimeError: "
    )


def test_experts_split_by_tp_leave_fewer_ranks_to_ep() -> None:
    from torchtitan_npu.config.parallelism import check_degrees
    from torchtitan_npu.errors import UsageError
    from torchtitan_npu.planner.layout import degrees, with_layout
    from torchtitan_npu.planner.search import dividing, own_layout

    config = load(DEEPSEEK, "--training.global_batch_size", "-1")
    p = config.parallelism
    p.tensor_parallel_degree = p.expert_tensor_parallel_degree = 2
    p.expert_parallel_degree, p.data_parallel_shard_degree = 8, 4
    args = SimpleNamespace(n_heads=16, n_layers=1)
    found = list(dividing(config, 8, args, experts=8))
    for layout in found:
        check_degrees(with_layout(config, layout), 8)
    missing = next(layout for layout in found if layout["tp"] == 2) | {"ep": 8}
    with pytest.raises(UsageError, match="expert_parallel_degree 8 × expert_tensor_parallel_degree 2"):
        check_degrees(with_layout(config, missing), 8)
    assert degrees(own_layout(config, 8))["ep"] == 4
    check_degrees(own_layout(config, 8), 8)


@pytest.mark.parametrize("policy", ["never", "default"])
def test_the_estimate_s_gathered_parameters_are_those_of_a_rehearsal(policy: str) -> None:
    """Kept, all modules' are there at once; else two layers' at the most, in the estimate three with a gradient."""
    from torchtitan_npu.config.preflight import build_on_meta
    from torchtitan_npu.planner.estimate import Estimator
    from torchtitan_npu.planner.parameters import sizes
    from torchtitan_npu.planner.rank import rehearse_rank

    config = load(LLAMA, "--model.flavor", "three_layers", *ONE_LAYER[2:])
    config.parallelism.fsdp_reshard_after_forward = policy
    config.parallelism.data_parallel_shard_degree = 2
    parameters = sizes(build_on_meta(config))
    estimated = Estimator(parameters, [], 1, 0, None)._gathered(config, list(parameters))
    one = rehearse_rank(config, 2)
    most = max(point.get("gathered parameters", 0) for point in one.timeline)
    largest = 4 * max(size.total for size in parameters.values())
    gradients = largest if policy == "never" else 0  # of one layer, besides
    assert most + gradients <= estimated * 1.01 and estimated <= most + 2 * largest


def test_what_stands_between_steps_has_the_job_s_dtype_and_swap() -> None:
    from torchtitan_npu.config.preflight import build_on_meta
    from torchtitan_npu.planner.parameters import Size, arithmetic, sizes
    from torchtitan_npu.planner.rank import rehearse_rank
    from torchtitan_npu.planner.rank_share import standing_bytes

    config = load(LLAMA, *ONE_LAYER, "--training.dtype", "bfloat16")
    config.optimizer.swap, config.optimizer.swap_fraction = True, 0.5
    assert standing_bytes(config) == 6
    parameters = list(build_on_meta(config).parameters())
    elements = sum(parameter.numel() for parameter in parameters)
    standing = rehearse_rank(config, 1).standing
    found = sum(standing[name] for name in ("parameters", "gradients", "optimizer states"))
    largest = 4 * max(parameter.numel() for parameter in parameters)  # the states of a parameter are swapped or not
    assert 0 <= found - 6 * elements <= largest + 5 * 512 * len(parameters)
    size = sum(sizes(build_on_meta(config)).values(), Size(0, 0))
    assert arithmetic(size, "bfloat16", {"pp": 1, "tp": 1}, 1, 1 << 30)["weights_and_gradients"] == 4 * elements


def test_advice_together_has_one_kind_of_checkpointing(monkeypatch: pytest.MonkeyPatch) -> None:
    from torchtitan_npu.planner import advice
    from torchtitan_npu.planner.rank import rehearse_rank

    config = load(LLAMA, *ONE_LAYER, "--activation_checkpoint.mode", "none")
    monkeypatch.setattr(advice, "CHANGES", (advice._swap, advice._selective, advice._full))
    needy = replace(rehearse_rank(config, 1), peak=1 << 40)  # whatever is tried lowers it
    changes = [one.change for one in advice.advise(config, 1, [needy], "balanced", 1 << 30)]
    assert changes[3:] == ['optimizer.swap = true; activation_checkpoint.mode = "full"']


def test_a_parameter_without_gradient_is_an_error_of_advice_and_search(monkeypatch: pytest.MonkeyPatch) -> None:
    from rich.console import Console
    from torchtitan.models.llama3.model.model import FeedForward

    from torchtitan_npu.planner import advice, search
    from torchtitan_npu.planner.estimate import Estimate
    from torchtitan_npu.planner.rank import rehearse_rank
    from torchtitan_npu.planner.rates import Rates

    config = load(LLAMA, *ONE_LAYER)
    config.parallelism.data_parallel_shard_degree = 1
    before = rehearse_rank(config, 1)
    monkeypatch.setattr(FeedForward, "forward", lambda self, x: self.w2(torch.nn.functional.silu(self.w1(x))))
    monkeypatch.setattr(advice, "CHANGES", (advice._swap,))
    (tried,) = advice.advise(config, 1, [before], "balanced", 1 << 40)
    layout = search.Layout(config, Estimate([1], [1.0]))
    search._rehearse(layout, 1, "balanced")
    words = "without gradient: layers.0.feed_forward.w3.weight"
    assert tried.peak is None and tried.error == words
    assert layout.error == f"rank 0: {words}" and not layout.fits(1 << 40)
    console = Console(width=200, record=True)
    tried.error = layout.error = "RuntimeError: sizes [/2] and [red]"  # no markup
    advice.print_advice(console, [tried], before, 1 << 40)
    search.print_layouts(console, [layout], 1 << 40, Rates())
    assert console.export_text().count("RuntimeError: sizes [/2] and [red]") == 2


LIBRARY = torch.library.Library("test_rehearse", "DEF")
LIBRARY.define("twice(Tensor x) -> Tensor")
LIBRARY.impl("twice", lambda x: 2 * x, "CPU")  # and no fake kernel


@pytest.mark.parametrize(
    ("forward", "limit"),
    [
        (lambda self, x: self.w2(self.w1(x)) * x.sum().item(), "reads a value of a tensor"),
        (lambda self, x: self.w2(torch.ops.test_rehearse.twice(self.w1(x))), "calls an operator without a fake kernel"),
    ],
    ids=["value", "operator"],
)
def test_a_limit_of_fake_tensors_is_no_error_of_the_start(
    forward: Any, limit: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from torchtitan.models.llama3.model.model import FeedForward

    monkeypatch.setattr(FeedForward, "forward", forward)
    assert rehearse("--config", LLAMA, "--world-size", "1", *ONE_LAYER) == 2
    out = " ".join(capsys.readouterr().out.split())
    assert f"rank 0 (every rank): not rehearsed: {limit}: " in out and "would fail" not in out


def test_seconds_are_shown(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    out = tmp_path / "job.json"
    assert rehearse("--config", LLAMA, "--world-size", "1", *ONE_LAYER, "--json", out) == 0
    report, shown = json.loads(out.read_text()), capsys.readouterr().out
    of_rank = sum(report["ranks"][0]["seconds_at_stated_rates"].values())
    assert f"│ together │ s, as stated │ {of_rank:.4g}" in " ".join(shown.split())
    assert f"a step takes {report['step_seconds']:.4g} s at these rates" in shown
