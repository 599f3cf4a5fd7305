"""Allocate host memory for the states: few large pinned blocks near the device; raise if there is too little."""

from __future__ import annotations

import contextlib
import math
import os
import resource
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import torch

from torchtitan_npu.components.available_memory import available
from torchtitan_npu.errors import UsageError

GIB = 1 << 30
SMALLEST_BLOCK = 64 << 20
ALIGNMENT = 512
NOTHING_FITS = "no optimizer.swap_fraction would fit"


def pack(sizes: list[int]) -> tuple[list[int], list[tuple[int, int]]]:
    """Pack regions of ``sizes`` bytes into blocks; return the blocks' sizes, and each region's block and offset.

    torch's pinned-memory allocator rounds up to a power of two. The blocks are therefore powers of two, each the
    largest that the remaining regions would fill. Large regions are placed first, and small ones fill the gaps.
    """
    blocks: list[int] = []
    used: list[int] = []
    slots: list[tuple[int, int]] = [(0, 0)] * len(sizes)
    aligned = [-(-size // ALIGNMENT) * ALIGNMENT for size in sizes]
    left = sum(aligned)
    for region in sorted(range(len(sizes)), key=lambda r: -aligned[r]):
        size = aligned[region]
        block = next((b for b, total in enumerate(blocks) if used[b] + size <= total), len(blocks))
        if block == len(blocks):
            largest = _power_of_two(left) if left <= SMALLEST_BLOCK else 1 << (left.bit_length() - 1)
            blocks.append(max(largest, _power_of_two(size)))
            used.append(0)
        slots[region] = (block, used[block])
        used[block] += size
        left -= size
    return blocks, slots


def _power_of_two(size: int) -> int:
    return 1 << max(0, size - 1).bit_length()


def allocate(sizes: list[int], device: torch.device, fraction: float) -> list[torch.Tensor]:
    """Return a uint8 tensor of each of ``sizes`` bytes, in pinned memory near ``device``; pageable for the CPU.

    ``fraction`` is the job's ``optimizer.swap_fraction``; an error suggests a smaller one.
    """
    blocks, slots = pack(sizes)
    memory: list[torch.Tensor] = []
    with _near(device):
        for size in blocks:
            try:
                memory.append(torch.empty(size, dtype=torch.uint8, pin_memory=device.type != "cpu"))
            except RuntimeError as error:
                allocated, needed = sum(map(len, memory)), sum(blocks)
                limit = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
                locked = "unlimited" if limit == resource.RLIM_INFINITY else f"{limit / GIB:.2f} GiB"
                fits = math.floor(100 * fraction * allocated / needed) / 100
                advice = f"optimizer.swap_fraction can be {fits} at most" if fits else NOTHING_FITS
                raise UsageError(
                    f"optimizer.swap: allocating pinned host memory failed after {allocated / GIB:.2f} of the "
                    f"{needed / GIB:.2f} GiB that this rank needs (available {available() / GIB:.2f} GiB, "
                    f"RLIMIT_MEMLOCK {locked}); {advice}. Error: {str(error).splitlines()[0]}"
                ) from error
    return [memory[block][offset : offset + size] for size, (block, offset) in zip(sizes, slots, strict=True)]


def check(needed: Callable[[float], int], fraction: float, ranks: int, free: int) -> None:
    """Raise :class:`UsageError` if ``free`` bytes are too few for ``fraction`` of the states of this host's ``ranks``.

    ``needed`` maps a fraction to the bytes of this rank. ``free`` was read before any rank allocated.
    """
    if needed(fraction) * ranks <= free:
        return
    smaller = (percent / 100 for percent in range(int(100 * fraction), 0, -1))
    fitting = next((f for f in smaller if 0 < needed(f) * ranks <= free), None)
    advice = f"optimizer.swap_fraction = {fitting} would fit" if fitting else NOTHING_FITS
    raise UsageError(
        f"optimizer.swap needs {needed(fraction) * ranks / GIB:.2f} GiB of host memory for the {ranks} "
        f"rank{'s' if ranks > 1 else ''} of this node, and {free / GIB:.2f} GiB are available; {advice}"
    )


@contextlib.contextmanager
def _near(device: torch.device) -> Iterator[None]:
    """Run on the processors of the device's NUMA node, so that its memory is the first touched."""
    before = os.sched_getaffinity(0)
    near = _node_cpus(device) & before
    if near:
        os.sched_setaffinity(0, near)
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


def _node_cpus(device: torch.device) -> set[int]:
    """Return the processors of the device's NUMA node; none if the device does not report its PCI address."""
    if device.type == "cpu":
        return set()
    properties = torch.get_device_module(device).get_device_properties(device)
    if not hasattr(properties, "pci_bus_id"):
        return set()
    address = f"{properties.pci_domain_id:04x}:{properties.pci_bus_id:02x}:{properties.pci_device_id:02x}.0"
    node = Path("/sys/bus/pci/devices") / address / "numa_node"
    if not node.exists() or int(node.read_text()) < 0:
        return set()
    cpus = Path(f"/sys/devices/system/node/node{int(node.read_text())}/cpulist").read_text()
    ranges = [span.split("-") for span in cpus.strip().split(",") if span]
    return {cpu for span in ranges for cpu in range(int(span[0]), int(span[-1]) + 1)}


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
