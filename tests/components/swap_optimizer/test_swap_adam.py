"""SwapAdam and SwapAdamW are bit-identical to torch's, on the CPU; tools/bench/swap_check.py also checks a device."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tools.bench import swap_check
from torchtitan_npu.components.swap_optimizer.slice_pipeline import SlicePipeline, SliceUpdate
from torchtitan_npu.components.swap_optimizer.swap_adam import SwapAdamW

CPU = torch.device("cpu")


@pytest.mark.parametrize(
    ("pair", "implementation", "flags", "fraction"),
    [
        (0, "fused", {}, 0.5),
        (0, "for-loop", {"maximize": True}, 1.0),
        (1, "torch's choice", {}, 1.0),
        (1, "fused", {"amsgrad": True, "maximize": True}, 1.0),
        (1, "foreach", {"amsgrad": True}, 1.0),
    ],
)
def test_swapped_equals_plain(pair: int, implementation: str, flags: dict[str, Any], fraction: float) -> None:
    """With groups, clipping, a changing learning rate, a NaN, missing gradients, frozen parameters and two dtypes."""
    options = {**swap_check.IMPLEMENTATIONS.get(implementation, {}), **flags}
    swap_check.check_combination(CPU, swap_check.PAIRS[pair], options, fraction)


def test_save_and_load_with_and_without_swap() -> None:
    swap_check.check_save_and_load(CPU)


def test_sharded_through_dcp() -> None:
    swap_check.check_sharded(CPU)


def test_a_step_that_raises_leaves_consistent_states() -> None:
    swap_check.check_exception(CPU)


def test_an_update_that_raises() -> None:
    """Slices before it are updated and stored; its own and the following are unchanged."""
    states = [torch.full((1000,), float(number)) for number in range(6)]

    def update(copies: list[torch.Tensor]) -> None:
        copies[0].add_(100.0)
        if copies[0][0] == 104.0:
            raise RuntimeError("here")

    with pytest.raises(RuntimeError, match="here"):
        SlicePipeline(CPU).run([SliceUpdate([state], update) for state in states], lambda: None)
    assert [state.unique().item() for state in states] == [100.0, 101.0, 102.0, 103.0, 4.0, 5.0]


def test_a_parameter_whose_first_gradient_comes_late() -> None:
    """It starts from zero states, in a bundle with parameters that have been updated."""
    parameters, copies = ([torch.nn.Parameter(torch.ones(40)) for _ in range(2)] for _ in range(2))
    ours, theirs = SwapAdamW(parameters, fused=True), torch.optim.AdamW(copies, fused=True)
    for number in range(4):
        for both, optimizer in ((parameters, ours), (copies, theirs)):
            both[0].grad = torch.full((40,), 1.0 + number)
            both[1].grad = torch.full((40,), 2.0) if number >= 2 else None
            optimizer.step()
    swap_check.assert_equal((ours, parameters), (theirs, copies))
    assert [ours.state[p]["step"].item() for p in parameters] == [4, 2]


@pytest.mark.parametrize("option", ["capturable", "differentiable"])
def test_options_that_need_the_states_on_the_device(option: str) -> None:
    with pytest.raises(ValueError, match=option):
        SwapAdamW([torch.nn.Parameter(torch.ones(3))], **{option: True})


def test_amsgrad_cannot_change_with_a_state_dict() -> None:
    """Host memory is allocated for two states or for three."""
    parameter = torch.nn.Parameter(torch.ones(3))
    parameter.grad = torch.ones(3)
    saved = torch.optim.AdamW([parameter], amsgrad=True)
    saved.step()
    with pytest.raises(ValueError, match="amsgrad"):
        SwapAdamW([parameter]).load_state_dict(saved.state_dict())
