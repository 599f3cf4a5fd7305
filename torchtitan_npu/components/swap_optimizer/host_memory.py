"""Read the host's total and available memory, within the limits of the container.

This module does not import torch: the doctor uses it on machines where torch does not load.
"""

from __future__ import annotations

import contextlib
import math
import os
import resource
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import torch

from torchtitan_npu.errors import UsageError

MEMINFO = Path("/proc/meminfo")
MEMBERSHIP = Path("/proc/self/cgroup")
GROUPS = Path("/sys/fs/cgroup")
FILES_V1 = ("memory.limit_in_bytes", "memory.usage_in_bytes")
FILES_V2 = ("memory.max", "memory.current")


def available() -> int:
    """Return the bytes that processes can still allocate."""
    return min([_meminfo("MemAvailable"), *(left for _, left in _groups(GROUPS, _membership()))])


def total() -> int:
    """Return the bytes that all processes can have together."""
    return min([installed(), *(limit for limit, _ in _groups(GROUPS, _membership()))])


def installed() -> int:
    """Return the bytes of the machine, regardless of container limits."""
    return _meminfo("MemTotal")


def _meminfo(name: str) -> int:
    """Return the bytes of a line such as ``MemTotal:  1024 kB``."""
    return int(MEMINFO.read_text().split(f"{name}:")[1].split()[0]) * 1024


def _membership() -> str:
    return MEMBERSHIP.read_text() if MEMBERSHIP.exists() else ""  # the system may have no control groups


def _groups(root: Path, membership: str) -> Iterator[tuple[int, int]]:
    """Yield the limit and the remaining bytes of each control group of this process, version 2 or 1, up to the root."""
    for line in membership.splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers and "memory" not in controllers.split(","):
            continue
        limit, usage = FILES_V1 if controllers else FILES_V2
        top = root / "memory" if controllers else root
        group = top / path.lstrip("/")
        for folder in (group, *group.parents):
            if not folder.is_relative_to(top):
                break
            if not (folder / limit).exists():  # in a container the root is its own group
                continue
            text = (folder / limit).read_text().strip()
            if text != "max":
                used = int((folder / usage).read_text()) - _file_cache(folder)
                yield int(text), max(0, int(text) - used)


def _file_cache(folder: Path) -> int:
    """Return the bytes of cached files, which count as used but are freed on demand."""
    lines = (folder / "memory.stat").read_text().splitlines()
    return sum(int(line.split()[1]) for line in lines if line.split()[0] in ("inactive_file", "active_file"))


GIB = 1 << 30
SMALLEST_BLOCK = 64 << 20
ALIGNMENT = 512


def pack(sizes: list[int]) -> tuple[list[int], list[tuple[int, int]]]:
    """Pack regions of ``sizes`` bytes into blocks; return the blocks' sizes, and each region's block and offset.

    torch's pinned-memory allocator rounds up to a power of two. The blocks are therefore powers of two, each the
    largest that the remaining regions would fill. Large regions are placed first, and small ones fill the gaps.
    """
    blocks: list[int] = []
    used: list[int] = []
    places: list[tuple[int, int]] = [(0, 0)] * len(sizes)
    aligned = [-(-size // ALIGNMENT) * ALIGNMENT for size in sizes]
    left = sum(aligned)
    for region in sorted(range(len(sizes)), key=lambda r: -aligned[r]):
        size = aligned[region]
        block = next((b for b, total in enumerate(blocks) if used[b] + size <= total), len(blocks))
        if block == len(blocks):
            largest = _power_of_two(left) if left <= SMALLEST_BLOCK else 1 << (left.bit_length() - 1)
            blocks.append(max(largest, _power_of_two(size)))
            used.append(0)
        places[region] = (block, used[block])
        used[block] += size
        left -= size
    return blocks, places


def _power_of_two(size: int) -> int:
    return 1 << max(0, size - 1).bit_length()


def allocate(sizes: list[int], device: torch.device, fraction: float) -> list[torch.Tensor]:
    """Return a uint8 tensor of each of ``sizes`` bytes, in pinned memory near ``device``; pageable for the CPU.

    ``fraction`` is the job's ``optimizer.swap_fraction``; an error suggests a smaller one.
    """
    blocks, places = pack(sizes)
    memory: list[torch.Tensor] = []
    with _near(device):
        for size in blocks:
            try:
                memory.append(torch.empty(size, dtype=torch.uint8, pin_memory=device.type != "cpu"))
            except RuntimeError as error:
                raise UsageError(_allocation_error(sum(blocks), sum(map(len, memory)), fraction, error)) from error
    return [memory[block][offset : offset + size] for size, (block, offset) in zip(sizes, places, strict=True)]


def _allocation_error(needed: int, given: int, fraction: float, error: RuntimeError) -> str:
    limit = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
    locked = "unlimited" if limit == resource.RLIM_INFINITY else f"{limit / GIB:.2f} GiB"
    fitting = math.floor(100 * fraction * given / needed) / 100
    advice = f"optimizer.swap_fraction can be {fitting} at most" if fitting else "no optimizer.swap_fraction would fit"
    return (
        f"optimizer.swap: allocating pinned host memory failed after {given / GIB:.2f} of the {needed / GIB:.2f} GiB "
        f"that this rank needs (available {available() / GIB:.2f} GiB, RLIMIT_MEMLOCK {locked}); {advice}. "
        f"Error: {str(error).splitlines()[0]}"
    )


def check(needed: Callable[[float], int], fraction: float, ranks: int, free: int) -> None:
    """Raise :class:`UsageError` if ``free`` bytes are too few for ``fraction`` of the states of this host's ``ranks``.

    ``needed`` maps a fraction to the bytes of this rank. ``free`` was read before any rank allocated.
    """
    if needed(fraction) * ranks <= free:
        return
    smaller = (percent / 100 for percent in range(int(100 * fraction), 0, -1))
    fitting = next((f for f in smaller if 0 < needed(f) * ranks <= free), None)
    advice = f"optimizer.swap_fraction = {fitting} would fit" if fitting else "no optimizer.swap_fraction would fit"
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
    spans = [span.split("-") for span in cpus.strip().split(",") if span]
    return {cpu for span in spans for cpu in range(int(span[0]), int(span[-1]) + 1)}


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
