"""SwapAdam and SwapAdamW are bit-identical to torch's, on the device of this machine."""

from __future__ import annotations

import copy
import itertools
from typing import Any

import pytest
import torch

from tests._helpers.swap_training import (
    DEVICE,
    IMPLEMENTATIONS,
    PAIRS,
    SLICE_MIB,
    STEPS,
    assert_equal,
    give_gradients,
    groups,
    make_parameters,
    needs_device,
    train,
)
from torchtitan_npu.components.swap_optimizer.slices import BUFFERS, MIB, Segment, SlicePipeline, SliceUpdate
from torchtitan_npu.components.swap_optimizer.swap_adam import SwapAdamW, elements


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
    check_combination(pair, {**IMPLEMENTATIONS.get(implementation, {}), **flags}, fraction)


@needs_device
@pytest.mark.slow
def test_every_combination_of_options() -> None:
    flags: list[dict[str, Any]] = [{}, {"amsgrad": True}, {"maximize": True}, {"amsgrad": True, "maximize": True}]
    for pair, implementation, options, fraction in itertools.product((0, 1), IMPLEMENTATIONS, flags, (1.0, 0.5)):
        check_combination(pair, {**IMPLEMENTATIONS[implementation], **options}, fraction)


def check_combination(pair: int, options: dict[str, Any], fraction: float) -> None:
    """Check that both optimizers of the pair agree over 50 steps; the first one swaps."""
    parameters, copies = make_parameters(), make_parameters()
    common = {"lr": 1e-2, "weight_decay": 0.1, **options}
    swapping = PAIRS[pair][0](groups(parameters), slice_mib=SLICE_MIB, fraction=fraction, **common)
    plain = PAIRS[pair][1](groups(copies), **common)
    train(swapping, parameters, 0, STEPS)
    train(plain, copies, 0, STEPS)
    assert_equal((swapping, parameters), (plain, copies))


@needs_device
def test_slices_that_overlap() -> None:
    """Slices are large: without synchronization, an update would read old values."""
    torch.manual_seed(5)
    parameters = [torch.nn.Parameter(torch.randn(4096, 4096, device=DEVICE)) for _ in range(4)]
    copies = [torch.nn.Parameter(p.detach().clone()) for p in parameters]
    swapping, plain = (
        SwapAdamW(parameters, lr=1e-2, fused=True, slice_mib=32),
        torch.optim.AdamW(copies, 1e-2, fused=True),
    )
    for _ in range(5):
        for parameter, copied in zip(parameters, copies, strict=True):
            parameter.grad = torch.randn_like(parameter)
            copied.grad = parameter.grad.clone()
        torch.get_device_module(DEVICE).synchronize()  # let the host run ahead of the device
        swapping.step()
        plain.step()
    assert_equal((swapping, parameters), (plain, copies))


@needs_device
@pytest.mark.parametrize("flags", [{}, {"amsgrad": True, "maximize": True}], ids=["", "amsgrad"])
@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_device_memory(implementation: str, flags: dict[str, bool]) -> None:
    """Nothing is held between steps, and at most three slices within a step.

    These are requested bytes: the allocator rounds large tensors up to 2 MiB.
    """
    module = torch.get_device_module(DEVICE)
    before = module.memory_stats().get("requested_bytes.all.current", 0)
    parameters = [torch.nn.Parameter(torch.randn(4096, 4096, device=DEVICE)) for _ in range(3)]
    for parameter in parameters:
        parameter.grad = torch.randn_like(parameter)
    optimizer = SwapAdamW(parameters, slice_mib=16, **IMPLEMENTATIONS[implementation], **flags)
    optimizer.step()
    module.synchronize()
    held = module.memory_stats()["requested_bytes.all.current"] - before
    assert held == 2 * sum(p.nbytes for p in parameters)
    module.reset_peak_memory_stats()
    optimizer.step()
    module.synchronize()
    assert 0 < module.memory_stats()["requested_bytes.all.peak"] - before - held <= BUFFERS * 16 * MIB


def test_a_step_that_raises_leaves_consistent_states() -> None:
    """The first group is updated, the second, where the error is, unchanged, and the optimizer is usable."""
    parameters, copies = make_parameters(), make_parameters()
    swapping = SwapAdamW(groups(parameters), lr=1e-2, fused=True, slice_mib=SLICE_MIB)
    plain = torch.optim.AdamW(groups(copies), lr=1e-2, fused=True)
    train(swapping, parameters, 0, 4)
    train(plain, copies, 0, 4)
    betas = swapping.param_groups[1]["betas"]
    counts = {p: plain.state[p]["step"].clone() for p in plain.param_groups[1]["params"] if p in plain.state}
    for optimizer, mine in ((swapping, parameters), (plain, copies)):
        give_gradients(mine, 4, loop=False)
        optimizer.param_groups[1]["betas"] = ("no", "number")
        with pytest.raises(TypeError):
            optimizer.step()
        optimizer.param_groups[1]["betas"] = betas
    for parameter, count in counts.items():
        # torch increments its step before the kernel raises; swapping counts complete updates
        plain.state[parameter]["step"].copy_(count)
    assert_equal((swapping, parameters), (plain, copies))
    loaded = SwapAdamW(groups(parameters), lr=1e-2, fused=True, slice_mib=SLICE_MIB)
    loaded.load_state_dict(copy.deepcopy(swapping.state_dict()))
    train(loaded, parameters, 5, 9)
    train(plain, copies, 5, 9)
    assert_equal((loaded, parameters), (plain, copies))


def test_an_update_that_raises() -> None:
    """Slices before it are updated and stored; that slice and the following ones are unchanged."""
    states = [torch.full((1000,), float(number)) for number in range(6)]

    def update(copies: list[torch.Tensor]) -> None:
        copies[0].add_(100.0)
        if copies[0][0] == 104.0:
            raise RuntimeError("here")

    with pytest.raises(RuntimeError, match="here"):
        SlicePipeline(torch.device("cpu")).run([SliceUpdate([state], update) for state in states], lambda: None)
    assert [state.unique().item() for state in states] == [100.0, 101.0, 102.0, 103.0, 4.0, 5.0]


def test_a_parameter_whose_first_gradient_comes_late() -> None:
    """It starts from zero states, in a bucket with parameters that have been updated."""
    parameters, copies = ([torch.nn.Parameter(torch.ones(40)) for _ in range(2)] for _ in range(2))
    swapping, plain = SwapAdamW(parameters, fused=True), torch.optim.AdamW(copies, fused=True)
    for number in range(4):
        for both, optimizer in ((parameters, swapping), (copies, plain)):
            both[0].grad = torch.full((40,), 1.0 + number)
            both[1].grad = torch.full((40,), 2.0) if number >= 2 else None
            optimizer.step()
    assert_equal((swapping, parameters), (plain, copies))
    assert [swapping.state[p]["step"].item() for p in parameters] == [4, 2]


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


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_a_rank_with_only_empty_shards_takes_its_steps(implementation: str) -> None:
    parameters = [torch.nn.Parameter(torch.empty(shape, device=DEVICE)) for shape in ((0, 4), (0,))]
    optimizer = SwapAdamW(parameters, slice_mib=1, **IMPLEMENTATIONS[implementation])
    for _ in range(BUFFERS + 1):
        for parameter in parameters:
            parameter.grad = torch.empty_like(parameter)
        optimizer.step()
    optimizer.load_state_dict(optimizer.state_dict())
    assert optimizer.swapped_bytes == 0
    assert [int(state["step"]) for state in optimizer.state.values()] == [BUFFERS + 1] * 2


@pytest.mark.parametrize(("begin", "end"), [(0, 12), (1, 7), (3, 4), (5, 11)])
def test_a_segment_may_end_inside_a_row_of_a_transposed_gradient(begin: int, end: int) -> None:
    gradient = torch.arange(12.0).view(3, 4)
    transposed = gradient.T.contiguous().T
    segment = Segment(torch.nn.Parameter(gradient), begin, end, offset=0)
    assert torch.equal(elements(transposed, segment), gradient.view(-1)[begin:end])
