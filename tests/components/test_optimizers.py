"""Optimizer builders with states in host memory, and with the Triton kernel: which jobs get them."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torchtitan.components.optimizer import OptimizersContainer, build_optimizers
from torchtitan.distributed import ParallelDims

from tests._helpers import layouts
from tests._helpers.multirank import run_on_ranks
from tests._helpers.training import Record, recording, train_until
from torchtitan_npu import platform
from torchtitan_npu.components.optimizers import SwappableOptimizers, with_swap, with_swap_if_enabled
from torchtitan_npu.components.swap_optimizer.container import SwapContainer
from torchtitan_npu.components.triton_adamw.optimizer import TritonAdamW
from torchtitan_npu.config.job_config import Optimizer
from torchtitan_npu.errors import UsageError
from torchtitan_npu.preflight.job import check_job

DIMS = ParallelDims(dp_replicate=1, dp_shard=1, cp=1, tp=1, pp=1, ep=1, etp=1, world_size=1)


def test_torchtitans_builder_makes_a_container_that_swaps() -> None:
    model, config = nn.Linear(3, 3), Optimizer(swap=True, implementation="foreach")
    assert type(build_optimizers([model], config, DIMS)) is OptimizersContainer
    assert type(with_swap(build_optimizers, config)([model], config, DIMS)) is SwapContainer


def test_a_builder_of_other_optimizers_is_an_error() -> None:
    with pytest.raises(ValueError, match="does not use TorchTitan's OptimizersContainer"):
        with_swap(lambda parts, config: None, Optimizer(swap=True))  # type: ignore[arg-type,return-value]


def test_on_the_cpu_the_states_stay_where_they_are(caplog: pytest.LogCaptureFixture) -> None:
    model = nn.Linear(3, 3)
    with caplog.at_level(logging.INFO):
        assert with_swap_if_enabled(build_optimizers, [model], Optimizer(swap=False)) is build_optimizers
        assert not caplog.messages
        assert with_swap_if_enabled(build_optimizers, [model], Optimizer(swap=True)) is build_optimizers
    assert caplog.messages == ["optimizer.swap has no effect: the parameters are on the CPU, and so are the states"]


def test_the_triton_kernel_replaces_adamw() -> None:
    container = SwappableOptimizers(build_optimizers)([nn.Linear(3, 3)], Optimizer(triton=True), DIMS)
    assert type(container) is OptimizersContainer
    (optimizer,) = container
    assert type(optimizer) is TritonAdamW and optimizer.param_groups[0]["fused"]


class OtherContainer(OptimizersContainer):
    """A container of a user's model, which :class:`SwappableOptimizers` does not replace."""


@pytest.mark.parametrize("cls", [OptimizersContainer, OtherContainer])
def test_another_optimizer_with_the_triton_kernel_is_an_error(cls: type[OptimizersContainer]) -> None:
    """It would not be clipped."""

    def build(parts: list[nn.Module], config: Optimizer) -> OptimizersContainer:
        if cls is OptimizersContainer:
            return OptimizersContainer(parts, torch.optim.SGD, {})
        return OtherContainer(parts, torch.optim.AdamW, {})

    with pytest.raises(UsageError, match=r"optimizer\.triton must be false: .* makes a (SGD|AdamW)"):
        SwappableOptimizers(build)([nn.Linear(3, 3)], Optimizer(triton=True))  # type: ignore[arg-type]


def test_the_triton_kernel_on_two_ranks_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    config = layouts.job_config("llama3", {"shard": 2}, {"optimizer.implementation": "fused", **TRITON})
    with (
        platform.job_for("cuda"),
        pytest.raises(UsageError, match=r"optimizer\.triton cannot .* 2 ranks"),
    ):
        check_job(config, 2)


@pytest.mark.parametrize(
    ("options", "backend", "reason"),
    [
        ({"optimizer.swap": True}, "cuda", "cannot be combined with optimizer.swap = true"),
        (
            {"optimizer.name": "Adam"},
            "cuda",
            "cannot be combined with optimizer.name = 'Adam': the kernel is for AdamW",
        ),
        ({"optimizer.implementation": "foreach"}, "cuda", "combined with optimizer.implementation = 'foreach'"),
        ({}, "npu", "needs an NVIDIA GPU; this job runs on the backend npu"),
    ],
)
def test_a_job_that_the_triton_kernel_does_not_support_is_refused(
    options: dict[str, Any], backend: Any, reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WORLD_SIZE", "1")
    config = layouts.job_config("llama3", {}, {"optimizer.implementation": "fused", **TRITON, **options})
    with platform.job_for(backend), pytest.raises(UsageError, match=r"optimizer\.triton") as refused:
        check_job(config, 1)
    assert reason in str(refused.value)


TRITON = {"optimizer.triton": True}


def train(options: dict[str, Any], stop: int) -> Record:
    config = layouts.job_config("llama3", {}, {"optimizer.implementation": "fused", **options})
    with recording(config) as (trainer, record):
        train_until(trainer, stop)
    return record


@pytest.mark.device
def test_a_job_with_the_triton_kernel_trains_and_resumes_like_torchs(tmp_path: Path) -> None:
    checkpoints = {"checkpoint.enable": True, "checkpoint.interval": 2, "job.dump_folder": str(tmp_path)}
    expected, ours, resumed = (
        run_on_ranks(1, train, options, stop, process_group=False, timeout=120)[0]
        for options, stop in (({}, 4), (TRITON | checkpoints, 2), (TRITON | checkpoints, 4))
    )
    assert [*ours.losses, *resumed.losses] == pytest.approx(expected.losses, rel=1e-5)
    assert [*ours.norms, *resumed.norms] == pytest.approx(expected.norms, rel=1e-4)
