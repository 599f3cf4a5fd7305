"""Optimizer builders with states in host memory: which jobs get them."""

from __future__ import annotations

import logging

import pytest
from torch import nn
from torchtitan.components.optimizer import OptimizersContainer, build_optimizers
from torchtitan.distributed import ParallelDims

from torchtitan_npu.components.optimizers import with_swap, with_swap_if_enabled
from torchtitan_npu.components.swap_optimizer.container import SwapContainer
from torchtitan_npu.config.job_config import Optimizer

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
