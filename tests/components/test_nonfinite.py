"""Steps that are not finite update nothing; the job stops with the module that is the first, or skips them."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests._helpers.layouts import job_config
from tests._helpers.multirank import run_on_ranks
from tests._helpers.swapping_jobs import swapping_config
from tests._helpers.training import recording, state, train_until
from torchtitan_npu.components.nonfinite.checked_steps import CapturedStep
from torchtitan_npu.components.nonfinite.first_module import ModuleWatch, plain_name
from torchtitan_npu.torch_internals.activation_checkpoint import checkpoint_wrapper

NAN = float("nan")


class NanGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient * NAN


class Faulty(nn.Module):
    """Multiply by a weight, with a fault in one of the passes."""

    def __init__(self, fault: str = "") -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(()))
        self.fault = fault
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        if self.fault == "backward":
            x = NanGradient.apply(x)
        elif self.fault == "overflow":
            self.weight.register_hook(lambda gradient: gradient * float("inf"))
        y = x * self.weight
        return y * NAN if self.fault == "forward" or (self.fault == "recomputation" and self.calls == 2) else y


def watched(*faults: str, checkpointed: bool = False) -> ModuleWatch:
    """Run a chain of modules with these faults, whose first and last module are sound."""
    blocks: list[nn.Module] = [nn.Sequential(Faulty(), Faulty(fault)) for fault in faults]
    model = nn.Sequential(Faulty(), *(checkpoint_wrapper(b) if checkpointed else b for b in blocks), Faulty())
    watch = ModuleWatch(0)
    for number in (1, 2):
        with watch.watching({0: model}):
            loss = model(torch.ones(3)).sum()
            loss.backward()
            watch.check_loss(loss, number)
    watch.check_gradients_of_weights({0: model})
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())
    return watch


@pytest.mark.parametrize("checkpointed", [False, True])
@pytest.mark.parametrize(
    ("faults", "what"),
    [
        (("", "forward", "forward"), "the output of 2.1, on rank 0, microbatch 1"),
        (("backward", "forward"), "the output of 2.1, on rank 0, microbatch 1"),
        (("backward", "", "backward", ""), "the gradient of the input of 3.1, on rank 0, microbatch 1"),
        (("", "overflow"), "the gradient of the weight 2.1.weight, on rank 0"),
    ],
)
def test_the_first_module_is_named(faults: tuple[str, ...], what: str, checkpointed: bool) -> None:
    assert str(watched(*faults, checkpointed=checkpointed).first) == what


def test_a_recomputation_is_no_forward_pass() -> None:
    assert watched("", "recomputation", "", checkpointed=True).first is None  # in the first of two steps


MODULE = "layers.2.feed_forward.w2"
MODULES = {"llama3": MODULE, "deepseek_v3": "layers.1.attention.wo"}


def plant(trainer: Any, fault: str, steps: set[int], module: str = MODULE) -> None:
    """Let the last rank that has ``module`` compute nan in ``steps``: in its output, its gradient, or once only."""
    found = [m for part in trainer.model_parts for name, m in part.named_modules() if plain_name(name) == module]
    if not found or os.environ["RANK"] != str(int(os.environ["WORLD_SIZE"]) - 1):
        return

    def spoil(module: nn.Module, args: Any, output: Tensor) -> Tensor:
        if trainer.step not in steps:
            return output
        if fault == "once":
            steps.clear()
        if fault == "backward":
            output.register_hook(lambda gradient: gradient * NAN)
            return output
        return output * NAN

    found[0].register_forward_hook(spoil)


def stop_in_step_3(folder: Path, layout: dict[str, int], fault: str, options: dict[str, Any]) -> tuple[str, bool]:
    """Return the report of the job, and whether the weights are those of step 2."""
    from torchtitan_npu.components.nonfinite.checked_steps import NonfiniteStop

    saved = {"checkpoint.enable": True, "checkpoint.interval": 2, "checkpoint.async_mode": "async"}
    saved |= {"job.dump_folder": str(folder), "training.steps": 6}
    model = "deepseek_v3" if "ep" in layout else "llama3"
    config = swapping_config if "optimizer.swap" in options else job_config
    with recording(config(model, layout, saved | options)) as (trainer, _):
        train_until(trainer, 2)
        before = state(trainer.model_parts)
        # hooks inside a compiled block are not called
        plant(trainer, fault, {3}, "layers.2" if trainer.job_config.compile.enable else MODULES[model])
        with pytest.raises(NonfiniteStop) as stop:
            train_until(trainer, 5)
        assert stop.value.code == 3 and trainer.step == 3
        after = state(trainer.model_parts)
    return stop.value.report, all(torch.equal(before[name], after[name]) for name in before)


OUTPUT = f"First, when the step runs again: the output of {MODULE}, on rank 1, microbatch 1"
GRADIENT = f"First, when the step runs again: the gradient of the output of {MODULE}, on rank 1, microbatch 1"
LAYOUTS = [
    ({"shard": 2}, "forward", {"activation_checkpoint.mode": "full"}, OUTPUT),
    ({"tp": 2}, "backward", {"activation_checkpoint.mode": "selective"}, GRADIENT),
    ({"pp": 2}, "forward", {}, OUTPUT),
    pytest.param({"cp": 2}, "forward", {}, OUTPUT, marks=pytest.mark.slow),
    ({"replicate": 2}, "once", {}, "The same step, when it runs again, is finite: the fault does not repeat."),
    pytest.param(
        {"shard": 2},
        "forward",
        {"compile.enable": True, "npu.bypass_codegen": "inductor", "activation_checkpoint.mode": "full"},
        "First, when the step runs again, with compiled regions in eager mode: the output of layers.2, on rank 1",
        marks=pytest.mark.slow,
    ),
    pytest.param(
        {"shard": 2, "ep": 2}, "forward", {}, OUTPUT.replace(MODULE, MODULES["deepseek_v3"]), marks=pytest.mark.slow
    ),
    pytest.param({"shard": 2}, "backward", {"optimizer.swap": True}, GRADIENT, marks=pytest.mark.slow),
]
IDS = ["FSDP", "TP", "PP", "CP", "DDP", "compiled", "EP", "swap"]


@pytest.mark.parametrize(("layout", "fault", "options", "where"), LAYOUTS, ids=IDS)
def test_a_job_stops_on_every_rank_and_names_the_first_module(
    layout: dict[str, int], fault: str, options: dict[str, Any], where: str, tmp_path: Path
) -> None:
    (report, unchanged), second = run_on_ranks(2, stop_in_step_3, tmp_path, layout, fault, options)
    assert (report, unchanged) == second and unchanged
    lines = report.splitlines()
    assert lines[0].startswith("Step 3 is not finite (gradient norm nan, loss ")
    assert lines[3].startswith(where), report
    checkpoint = tmp_path / "checkpoint" / "step-2"
    assert lines[2] == f"The last checkpoint before step 3 is {checkpoint}: checkpoint.load_step = 2 loads it."
    assert (checkpoint / "keep").exists()
    assert {path.name for path in checkpoint.parent.iterdir()} == {"step-2"}
    for rank in (0, 1):
        step = torch.load(tmp_path / "nonfinite" / "step-3" / f"rank-{rank}.pt", weights_only=True)
        assert (step["step"], step["rank"], step["world_size"]) == (3, rank, 2)
        labels = [batch["labels"] for batch in step["microbatches"]]
        assert sum(map(len, labels)) * (2 if "shard" in layout or "replicate" in layout else 1) == 8
        assert step["tokens"] == 8 * 64 and set(step["random_states"]) == {"cpu"}
    if layout == {"shard": 2}:  # starting again from the checkpoint reproduces it
        files = [tmp_path / f"nonfinite/step-3/rank-{rank}.pt" for rank in (0, 1)]
        saved = [torch.load(path, weights_only=True) for path in files]
        assert run_on_ranks(2, stop_in_step_3, tmp_path, layout, fault, options)[0][0] == report
        for before, path in zip(saved, files, strict=True):
            after = torch.load(path, weights_only=True)
            for old, new in zip(before["microbatches"], after["microbatches"], strict=True):
                assert torch.equal(old["inputs"]["input"], new["inputs"]["input"])
                assert torch.equal(old["labels"], new["labels"])


def stop_with_an_infinite_weight(folder: Path) -> str:
    """Return the report. No checkpoint has the weight that is not finite."""
    from torchtitan_npu.components.nonfinite.checked_steps import NonfiniteStop

    options = {"checkpoint.enable": True, "checkpoint.interval": 2, "job.dump_folder": str(folder)}
    with recording(job_config("llama3", {"shard": 2}, options | {"training.steps": 6})) as (trainer, _):
        train_until(trainer, 2)
        weight = trainer.model_parts[0].get_parameter(f"{MODULE}.weight")
        if os.environ["RANK"] == "1":
            weight.detach().to_local().fill_(float("inf"))
        with pytest.raises(NonfiniteStop) as stop:
            train_until(trainer, 3)
    return stop.value.report


def run_saved_step(folder: Path, saved: Path) -> Any:
    """Return the finding of this rank in a new job with the weights, batch and random states of the step."""
    options = {"checkpoint.enable": True, "checkpoint.initial_load_path": str(saved / "weights")}
    with recording(job_config("llama3", {"shard": 2}, options | {"job.dump_folder": str(folder)})) as (trainer, _):
        step = torch.load(saved / f"rank-{os.environ['RANK']}.pt", weights_only=True)
        batches = [(batch["inputs"], batch["labels"]) for batch in step["microbatches"]]
        trainer.checked_steps.captured = CapturedStep(step["random_states"], batches, step["tokens"])
        return trainer.checked_steps.run_again()


def test_the_saved_files_reproduce_the_step(tmp_path: Path) -> None:
    report, _ = run_on_ranks(2, stop_with_an_infinite_weight, tmp_path / "job")
    saved = tmp_path / "job/nonfinite/step-3"
    assert f"The weights, and the batch and random states of each rank, are in {saved}." in report
    findings = run_on_ranks(2, run_saved_step, tmp_path / "again", saved)
    assert report.endswith(f"First, when the step runs again: {min(findings)}") and MODULE in report


def skip_until_two_in_a_row(folder: Path) -> tuple[list[float], list[int], float, str]:
    """Return the metric, the steps that changed the weights, the last learning rate, and the report."""
    from torchtitan_npu.components.nonfinite.checked_steps import NonfiniteStop

    options = {"training.skip_nonfinite_steps": True, "training.max_nonfinite_steps": 2, "training.steps": 10}
    options |= {"checkpoint.enable": True, "checkpoint.interval": 1, "checkpoint.keep_latest_k": 2}
    options |= {"job.dump_folder": str(folder)}
    changed = []
    with recording(job_config("deepseek_v3", {"shard": 2}, options)) as (trainer, record):
        plant(trainer, "backward", {2, 4, 5}, "layers.1.attention.wo")
        before = state(trainer.model_parts)
        for step in range(1, 5):
            train_until(trainer, step)
            after = state(trainer.model_parts)
            if not all(torch.equal(before[name], after[name]) for name in before):
                changed.append(step)
            counts = [b for m in trainer.model_parts for n, b in m.named_buffers() if n.endswith("tokens_per_expert")]
            assert counts and not torch.cat(counts).any()
            before = after
        with pytest.raises(NonfiniteStop, match="3") as stop:
            train_until(trainer, 5)
        rate = trainer.lr_schedulers.schedulers[0].get_last_lr()[0] / trainer.job_config.optimizer.lr
    return record.metrics["nonfinite_steps"], changed, rate, stop.value.report


def skip_after_a_restart(folder: Path) -> list[float]:
    options = {"training.skip_nonfinite_steps": True, "training.max_nonfinite_steps": 2, "training.steps": 10}
    options |= {"checkpoint.enable": True, "job.dump_folder": str(folder)}
    with recording(job_config("deepseek_v3", {"shard": 2}, options)) as (trainer, record):
        plant(trainer, "backward", {5}, "layers.1.attention.wo")
        train_until(trainer, 5)
    return record.metrics["nonfinite_steps"]


def test_skipped_steps_are_counted_and_leave_no_trace(tmp_path: Path) -> None:
    first, second = run_on_ranks(2, skip_until_two_in_a_row, tmp_path)
    metric, changed, rate, report = first
    assert first == second and metric == [1, 2] and changed == [1, 3]
    assert rate == pytest.approx(0.6)  # four steps of ten into the decay
    checkpoints = tmp_path / "checkpoint"
    assert f"The last checkpoint before step 4 is {checkpoints / 'step-3'}:" in report  # the first of two in a row
    assert {path.parent.name for path in checkpoints.glob("*/keep")} == {"step-1", "step-3"}
    assert run_on_ranks(2, skip_after_a_restart, tmp_path) == [[3], [3]]  # step 4 and its count are in a checkpoint


def skip_the_first_step(folder: Path, swap: bool) -> tuple[list[float], dict[str, Tensor]]:
    """Return the losses of the steps up to 3, from the newest checkpoint on, and the weights."""
    options = {"training.skip_nonfinite_steps": True, "training.max_nonfinite_steps": 2, "training.steps": 10}
    options |= {"checkpoint.enable": True, "checkpoint.interval": 1, "job.dump_folder": str(folder)}
    with recording((swapping_config if swap else job_config)("llama3", {}, options)) as (trainer, record):
        plant(trainer, "forward", {1})
        if trainer.step == 0:
            train_until(trainer, 1)
            counts = [state["step"] for optimizer in trainer.optimizers for state in optimizer.state.values()]
            assert counts and not any(counts)
        train_until(trainer, 3)
        return record.losses[-2:], state(trainer.model_parts)


@pytest.mark.parametrize("swap", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_a_job_resumes_before_its_first_update(swap: bool, tmp_path: Path) -> None:
    ((losses, weights),) = run_on_ranks(1, skip_the_first_step, tmp_path, swap, process_group=False)
    for step in (2, 3):
        shutil.rmtree(tmp_path / f"checkpoint/step-{step}")
    ((resumed, after),) = run_on_ranks(1, skip_the_first_step, tmp_path, swap, process_group=False)
    assert len(losses) == 2 and resumed == losses
    assert all(torch.equal(weights[name], after[name]) for name in weights)
