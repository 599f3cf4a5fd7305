"""Measure the bandwidth between host and device, which limits the speed of a swapped step."""

from __future__ import annotations

import time

import torch

from torchtitan_npu.components.swap_optimizer.host_memory import allocate


def link_bandwidth(device: torch.device, size: int = 32 << 20, repeats: int = 5) -> float:
    """Return the bytes per second in each direction of copies of ``size`` bytes that run both ways at once.

    The host's side is pinned memory allocated as for the states. The result is the best of ``repeats`` measurements.
    """
    module = torch.get_device_module(device)
    up, down = allocate([size, size], device, fraction=1.0)
    here, there = (torch.empty(size, dtype=torch.uint8, device=device) for _ in range(2))
    streams = module.Stream(device), module.Stream(device)
    best = float("inf")
    for _ in range(repeats + 1):  # the first is a warm-up
        module.synchronize()
        start = time.perf_counter()
        with module.stream(streams[0]):
            here.copy_(up, non_blocking=True)
        with module.stream(streams[1]):
            down.copy_(there, non_blocking=True)
        module.synchronize()
        best = min(best, time.perf_counter() - start)
    return size / best
