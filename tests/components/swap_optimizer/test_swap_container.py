"""The swap optimizer in a job: its errors, log lines and metrics."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torchtitan.components.optimizer import OptimizersContainer
from torchtitan.protocols.train_spec import get_train_spec

from tests.preflight.test_job_checks import job
from torchtitan_npu.components.swap_optimizer.container import SwapContainer
from torchtitan_npu.errors import UsageError
from torchtitan_npu.preflight.job import check_job


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"optimizer__early_step_in_backward": True},
            "optimizer.swap cannot be combined with optimizer.early_step_in_backward",
        ),
        ({"training__enable_cpu_offload": True}, "optimizer.swap cannot be combined with training.enable_cpu_offload"),
        ({"optimizer__swap_slice_mib": 0}, "optimizer.swap_slice_mib is 0; it must be at least 1"),
        ({"optimizer__swap_fraction": 0.0}, "optimizer.swap_fraction is 0.0; it must be above 0 and at most 1"),
        ({"optimizer__swap_fraction": 1.5}, "optimizer.swap_fraction is 1.5"),
    ],
)
def test_invalid_options(options: dict[str, Any], message: str) -> None:
    check_job(job(optimizer__swap=True), world_size=1)
    with pytest.raises(UsageError) as raised:
        check_job(job(optimizer__swap=True, **options), world_size=1)
    assert message in str(raised.value)


def test_a_train_spec_that_is_not_adapted_is_an_error() -> None:
    with pytest.raises(UsageError, match=r"model.name 'simple_fsdp.llama3' to be registered as"):
        check_job(job(optimizer__swap=True, model__name="simple_fsdp.llama3"), world_size=1)


def test_a_builder_of_other_optimizers_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(get_train_spec("llama3"), "build_optimizers_fn", lambda *args: None)
    message = "optimizer.swap must be false: the train spec's build_optimizers_fn is none of TorchTitan's builders"
    with pytest.raises(UsageError, match=message):
        check_job(job(optimizer__swap=True), world_size=1)


def test_host_memory_too_small_for_the_model() -> None:
    """The error depends on the parameters' sizes only; nothing is allocated."""
    model = nn.ModuleList([nn.Linear(1 << 22, 1 << 20, bias=False, device="meta"), nn.Linear(4, 4, device="meta")])
    with pytest.raises(UsageError, match=r"needs 32768\.\d\d GiB of host memory for the 1 rank .* would fit"):
        SwapContainer([model], torch.optim.AdamW, {"fused": True}, slice_mib=1 << 20, fraction=1.0)


def test_the_container_measures_what_it_moves() -> None:
    """Two moments are loaded and stored; those of a parameter without a gradient are not."""
    model = nn.ModuleList([nn.Linear(600, 500, bias=False), nn.Linear(640, 500, bias=False)])
    container = SwapContainer([model], torch.optim.AdamW, {"fused": True}, slice_mib=1, fraction=1.0)
    assert container.metrics() == {"swap_optimizer/moved(GiB)": 0.0}
    model[1].weight.grad = torch.ones(500, 640)
    container.step()
    assert container.metrics() == {"swap_optimizer/moved(GiB)": 500 * 640 * 4 * 2 * 2 / 2**30}


def test_hooks_run_once() -> None:
    """torch wraps ``step`` once per class; TorchTitan's container in the same process wraps that of the base class."""
    model = nn.Linear(3, 3)
    OptimizersContainer([model], torch.optim.AdamW, {"fused": True})
    container = SwapContainer([model], torch.optim.AdamW, {"fused": True}, slice_mib=1, fraction=1.0)
    calls: list[str] = []
    container.register_step_pre_hook(lambda *_: calls.append("before"))
    container.register_step_post_hook(lambda *_: calls.append("after"))
    container.step()
    assert calls == ["before", "after"]
