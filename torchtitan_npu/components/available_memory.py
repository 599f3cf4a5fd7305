"""How much memory this host has, and how much of it is free, within the limits of the container that we run in.

Without torch: the doctor reads it on machines where torch does not load.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

MEMINFO = Path("/proc/meminfo")
MEMBERSHIP = Path("/proc/self/cgroup")
GROUPS = Path("/sys/fs/cgroup")
FILES_V1 = ("memory.limit_in_bytes", "memory.usage_in_bytes")
FILES_V2 = ("memory.max", "memory.current")


def available() -> int:
    """Bytes that processes can still take."""
    return min([_meminfo("MemAvailable"), *(left for _, left in _groups(GROUPS, _membership()))])


def total() -> int:
    """Bytes that all processes can have together."""
    return min([installed(), *(limit for limit, _ in _groups(GROUPS, _membership()))])


def installed() -> int:
    """Bytes that the machine has, whatever a container lets us have of them."""
    return _meminfo("MemTotal")


def _meminfo(name: str) -> int:
    """Bytes, from a line like ``MemTotal:  1024 kB``."""
    return int(MEMINFO.read_text().split(f"{name}:")[1].split()[0]) * 1024


def _membership() -> str:
    return MEMBERSHIP.read_text() if MEMBERSHIP.exists() else ""  # a system may be without control groups


def _groups(root: Path, membership: str) -> Iterator[tuple[int, int]]:
    """The limit of each control group that we belong to (version 2 or 1), and what it still lets us have; from ours up
    to the root."""
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
            if not (folder / limit).exists():  # a container sees its own group as the root
                continue
            text = (folder / limit).read_text().strip()
            if text != "max":
                used = int((folder / usage).read_text()) - _file_cache(folder)
                yield int(text), max(0, int(text) - used)


def _file_cache(folder: Path) -> int:
    """Bytes of cached files, which count as used and are given up when memory is asked for."""
    lines = (folder / "memory.stat").read_text().splitlines()
    return sum(int(line.split()[1]) for line in lines if line.split()[0] in ("inactive_file", "active_file"))
