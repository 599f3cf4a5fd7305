"""Steps of Adam and AdamW with every kind of gradient, on the device of this machine."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from torchtitan_npu import platform
from torchtitan_npu.components.swap_optimizer.swap_adam import SwapAdam, SwapAdamW

DEVICE = torch.device(platform.backend())
needs_device = pytest.mark.device
STEPS = 50
SLICE_MIB = 1
SHAPES = [(700, 501), (512, 512), (33,), (17, 5), (3, 3), (1024, 300), (129,)]
"""Some need several slices of 1 MiB, some fit into one together, most end within a vector load."""
PAIRS: list[tuple[type[torch.optim.Adam], type[torch.optim.Adam]]] = [
    (SwapAdam, torch.optim.Adam),
    (SwapAdamW, torch.optim.AdamW),
]
IMPLEMENTATIONS = {"fused": {"fused": True}, "foreach": {"foreach": True}, "for-loop": {"foreach": False}}


def make_parameters() -> list[torch.nn.Parameter]:
    """Return parameters of several shapes and dtypes, one of them frozen."""
    generator = torch.Generator().manual_seed(7)
    parameters = [torch.nn.Parameter(torch.randn(shape, generator=generator).to(DEVICE)) for shape in SHAPES]
    parameters.append(torch.nn.Parameter(torch.randn(300, 500, generator=generator).to(DEVICE, torch.bfloat16)))
    parameters.append(torch.nn.Parameter(torch.ones(40, device=DEVICE), requires_grad=False))
    return parameters


def groups(parameters: list[torch.nn.Parameter]) -> list[dict[str, Any]]:
    """Return two parameter groups with different options."""
    return [{"params": parameters[::2]}, {"params": parameters[1::2], "weight_decay": 0.0, "lr": 3e-3}]


@functools.cache
def random_gradients(number: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(number)
    like = make_parameters()
    return [torch.randn(p.shape, generator=generator).to(DEVICE, p.dtype) for p in like]


def give_gradients(parameters: list[torch.nn.Parameter], number: int, loop: bool) -> None:
    """Set the gradients of step ``number``. Some are NaN, missing or not contiguous."""
    for index, parameter in enumerate(parameters):
        gradient = random_gradients(number)[index].clone()
        if index == 0 and number == STEPS // 2:
            gradient[5, 5] = float("nan")
        if index == 1 and loop:  # fused and foreach kernels require the strides of the parameter
            gradient = gradient.T.contiguous().T
        has_one = parameter.requires_grad and not (index == 3 and number % 3 == 0)
        parameter.grad = gradient if has_one else None


def train(optimizer: torch.optim.Optimizer, parameters: list[torch.nn.Parameter], first: int, last: int) -> None:
    """Run steps ``first`` to ``last`` with clipped gradients and a changing learning rate."""
    rates = [group["lr"] for group in optimizer.param_groups]
    for number in range(first, last):
        give_gradients(parameters, number, loop=optimizer.defaults["foreach"] is False)
        if number != STEPS // 2:  # clipping would make all gradients NaN
            torch.nn.utils.clip_grad_norm_(parameters, 100.0)
        for group, rate in zip(optimizer.param_groups, rates, strict=True):
            group["lr"] = rate * (1 - number / (2 * STEPS))
        # The first step allocates the states. Later steps must not wait for the device.
        with no_synchronisation() if number > first + 1 else contextlib.nullcontext():
            optimizer.step()
    for group, rate in zip(optimizer.param_groups, rates, strict=True):
        group["lr"] = rate


@contextlib.contextmanager
def no_synchronisation() -> Iterator[None]:
    """Raise an error if the host waits for the device."""
    if DEVICE.type != "cuda":
        yield
        return
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def assert_equal(
    swapping: tuple[torch.optim.Optimizer, list[torch.nn.Parameter]],
    plain: tuple[torch.optim.Optimizer, list[torch.nn.Parameter]],
) -> None:
    """Check that parameters and states are bit-identical, with NaN at the same positions."""
    mine, reference = swapping[0].state_dict()["state"], plain[0].state_dict()["state"]
    assert mine.keys() == reference.keys(), (mine.keys(), reference.keys())
    pairs = [(f"parameter {i}", p, q) for i, (p, q) in enumerate(zip(swapping[1], plain[1], strict=True))]
    for key, state in reference.items():
        assert mine[key].keys() == state.keys()
        pairs += [(f"{name} of parameter {key}", mine[key][name], value) for name, value in state.items()]
    for name, p, q in pairs:
        assert p.shape == q.shape and p.dtype == q.dtype, name
        same = (p.cpu() == q.cpu()) | (p.cpu().isnan() & q.cpu().isnan())
        assert bool(same.all()), f"{name} differs in {int((~same).sum())} of {same.numel()} elements"
