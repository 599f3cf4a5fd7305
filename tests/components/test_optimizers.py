"""Optimizers with states in host memory: which jobs get them, their options, errors, log lines and metrics."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch
from torch import nn
from torchtitan.components import optimizer as titan
from torchtitan.components.optimizer import OptimizersContainer
from torchtitan.distributed import ParallelDims
from torchtitan.protocols.train_spec import get_train_spec

from tests.preflight.test_job_checks import job
from torchtitan_npu.components.optimizers import SwapContainer, SwappableOptimizers, adapted_optimizers
from torchtitan_npu.config.job_config import Optimizer
from torchtitan_npu.errors import UsageError
from torchtitan_npu.preflight.job import check_job

DIMS = ParallelDims(dp_replicate=1, dp_shard=1, cp=1, tp=1, pp=1, ep=1, etp=1, world_size=1)


def test_only_torchtitans_builders_are_replaced() -> None:
    def of_a_user(*args: Any) -> Any: ...

    assert adapted_optimizers(titan.build_optimizers) == SwappableOptimizers()
    balancing = adapted_optimizers(titan.build_optimizers_with_moe_load_balancing)
    assert balancing == SwappableOptimizers(balances_experts=True)
    assert adapted_optimizers(of_a_user) is of_a_user


@pytest.mark.parametrize("implementation", ["fused", "foreach", "for-loop"])
@pytest.mark.parametrize("name", ["Adam", "AdamW"])
def test_the_container_that_swaps_has_torchtitans_options(name: str, implementation: str) -> None:
    model = nn.Linear(3, 3)
    config = Optimizer(name, 3e-3, 0.8, 0.9, 1e-6, 0.2, implementation, swap=True, swap_slice_mib=3)  # type: ignore[arg-type]
    (swapping,), (plain,) = SwapContainer([model], config), titan.build_optimizers([model], config, DIMS)
    assert isinstance(swapping, type(plain)) and swapping.defaults == plain.defaults


def test_on_the_cpu_the_states_stay_where_they_are(caplog: pytest.LogCaptureFixture) -> None:
    model, build = nn.Linear(3, 3), SwappableOptimizers()
    with caplog.at_level(logging.INFO):
        assert type(build([model], Optimizer(swap=False), DIMS)) is OptimizersContainer
        assert not caplog.messages
        assert type(build([model], Optimizer(swap=True), DIMS)) is OptimizersContainer
    assert caplog.messages == ["optimizer.swap has no effect: the parameters are on the CPU, and so are the states"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"optimizer__early_step_in_backward": True}, "cannot be combined with optimizer.early_step_in_backward"),
        ({"training__enable_cpu_offload": True}, "optimizer.swap cannot be combined with training.enable_cpu_offload"),
        ({"optimizer__swap_slice_mib": 0}, "optimizer.swap_slice_mib is 0; it must be at least 1"),
        ({"optimizer__swap_fraction": 0.0}, "optimizer.swap_fraction is 0.0; it must be above 0 and at most 1"),
        ({"optimizer__swap_fraction": 1.5}, "optimizer.swap_fraction is 1.5"),
        ({"model__name": "simple_fsdp.llama3"}, "model.name 'simple_fsdp.llama3' to be registered as"),
    ],
)
def test_a_job_that_cannot_swap(options: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError) as raised:
        check_job(job(optimizer__swap=True, **options), world_size=1)
    assert message in str(raised.value)


def test_a_builder_of_other_optimizers_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    check_job(job(optimizer__swap=True), world_size=1)
    monkeypatch.setattr(get_train_spec("llama3"), "build_optimizers_fn", lambda *args: None)
    message = "optimizer.swap must be false: the train spec's build_optimizers_fn is none of TorchTitan's builders"
    with pytest.raises(UsageError, match=message):
        check_job(job(optimizer__swap=True), world_size=1)


def test_host_memory_too_small_for_the_model() -> None:
    """The error depends on the parameters' sizes only; nothing is allocated."""
    model = nn.ModuleList([nn.Linear(1 << 22, 1 << 20, bias=False, device="meta"), nn.Linear(4, 4, device="meta")])
    with pytest.raises(UsageError, match=r"needs 32768\.\d\d GiB of host memory for the 1 rank .* would fit"):
        SwapContainer([model], Optimizer(swap_slice_mib=1 << 20))


def test_the_container_measures_what_it_moves() -> None:
    """Two moments are loaded and stored; those of a parameter without a gradient are not."""
    model = nn.ModuleList([nn.Linear(600, 500, bias=False), nn.Linear(640, 500, bias=False)])
    container = SwapContainer([model], Optimizer(swap_slice_mib=1))
    assert container.metrics() == {"swap_optimizer/moved(GiB)": 0.0}
    model[1].weight.grad = torch.ones(500, 640)
    container.step()
    assert container.metrics() == {"swap_optimizer/moved(GiB)": 500 * 640 * 4 * 2 * 2 / 2**30}


def test_hooks_run_once() -> None:
    """torch wraps ``step`` once per class; TorchTitan's container in the same process wraps that of the base class."""
    model = nn.Linear(3, 3)
    OptimizersContainer([model], torch.optim.AdamW, {"fused": True})
    container = SwapContainer([model], Optimizer(swap_slice_mib=1))
    calls: list[str] = []
    container.register_step_pre_hook(lambda *_: calls.append("before"))
    container.register_step_post_hook(lambda *_: calls.append("after"))
    container.step()
    assert calls == ["before", "after"]
