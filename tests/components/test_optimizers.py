"""The builder of optimizers with states in host memory: which jobs get them, and with which options."""

from __future__ import annotations

import logging
from typing import Any

import pytest
from torch import nn
from torchtitan.components import optimizer as titan
from torchtitan.components.optimizer import OptimizersContainer
from torchtitan.distributed import ParallelDims

from torchtitan_npu.components.optimizers import (
    SwappableOptimizers,
    adapted_optimizers,
    build_optimizers,
    swap_container,
)
from torchtitan_npu.components.swap_optimizer.container import SwapContainer
from torchtitan_npu.config.job_config import Optimizer

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
    plain = build_optimizers([model], config, DIMS)
    swapping = build_optimizers([model], config, DIMS, container=swap_container(config))
    assert type(plain) is OptimizersContainer and type(swapping) is SwapContainer
    (ours,), (theirs,) = swapping.optimizers, plain.optimizers
    assert isinstance(ours, type(theirs)) and ours.defaults == theirs.defaults


def test_on_the_cpu_the_states_stay_where_they_are(caplog: pytest.LogCaptureFixture) -> None:
    model, build = nn.Linear(3, 3), SwappableOptimizers()
    with caplog.at_level(logging.INFO):
        assert build.container([model], Optimizer(swap=False)) is OptimizersContainer
        assert not caplog.messages
        assert type(build([model], Optimizer(swap=True), DIMS)) is OptimizersContainer
    assert caplog.messages == ["optimizer.swap has no effect: the parameters are on the CPU, and so are the states"]
