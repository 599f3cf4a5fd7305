"""Read the host's total and available memory, within the limits of the container.

This module does not import torch: the doctor uses it on machines where torch does not load.
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
                # cached files count as used but are freed on demand
                lines = map(str.split, (folder / "memory.stat").read_text().splitlines())
                cached = sum(int(count) for name, count in lines if name in ("inactive_file", "active_file"))
                yield int(text), max(0, int(text) - int((folder / usage).read_text()) + cached)
