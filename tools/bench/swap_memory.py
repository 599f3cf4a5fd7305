"""How much memory the swap optimizer takes on the device at hand, and what it says when the host has too little."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from functools import partial

import torch

from torchtitan_npu.components.swap_optimizer.host_memory import allocate
from torchtitan_npu.components.swap_optimizer.slices import BUFFERS, MIB
from torchtitan_npu.components.swap_optimizer.swap_adam import SwapAdam, SwapAdamW
from torchtitan_npu.errors import UsageError

SLICE_MIB = 16


def memory_of_a_step(
    device: torch.device, optimizer: torch.optim.Optimizer, parameters: list[torch.nn.Parameter], slice_mib: int
) -> dict[str, int]:
    """Bytes beyond parameters and gradients: held between steps, the peak in a step, and its bound of three slices.

    As they were asked for: the allocator rounds a large tensor up to 2 MiB. ``optimizer`` has made a step before, and
    nothing else is on the device.
    """
    module = torch.get_device_module(device)
    needed = sum(p.nbytes + p.grad.nbytes for p in parameters if p.grad is not None)
    module.synchronize()
    held = module.memory_stats()["requested_bytes.all.current"] - needed
    module.reset_peak_memory_stats()
    optimizer.step()
    module.synchronize()
    peak = module.memory_stats()["requested_bytes.all.peak"] - needed
    return {"held_beyond_bytes": held, "peak_bytes": peak, "peak_bound_bytes": BUFFERS * slice_mib * MIB}


def check_memory(device: torch.device, implementations: dict[str, dict[str, bool]]) -> None:
    """Nothing is held between steps, and in a step three slices at most."""
    for cls, (name, implementation), options in itertools.product(
        (SwapAdam, SwapAdamW), implementations.items(), ({}, {"amsgrad": True, "maximize": True})
    ):
        memory = _measure(device, partial(cls, weight_decay=0.1, **implementation, **options))
        print(f"  {cls.__name__} {name} {options}: {memory}")
        assert memory["held_beyond_bytes"] == 0 < memory["peak_bytes"] <= memory["peak_bound_bytes"]


def _measure(device: torch.device, make: Callable[..., torch.optim.Optimizer]) -> dict[str, int]:
    parameters = [torch.nn.Parameter(torch.randn(4096, 4096, device=device)) for _ in range(3)]
    for parameter in parameters:
        parameter.grad = torch.randn_like(parameter)
    optimizer = make(parameters, slice_mib=SLICE_MIB)
    optimizer.step()
    return memory_of_a_step(device, optimizer, parameters, SLICE_MIB)


def check_refusal(device: torch.device) -> None:
    """More memory than there is: the error says how much was asked for and what would fit."""
    try:
        allocate([64 * MIB, 1 << 50], device, fraction=1.0)
    except UsageError as error:
        print(f"  {error}")
        assert "1048576.06 GiB" in str(error) and "optimizer.swap_fraction" in str(error)
    else:
        raise AssertionError("a pebibyte was allocated")
