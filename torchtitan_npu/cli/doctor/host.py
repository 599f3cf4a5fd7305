"""Check the limits of the host: cores and NUMA, memory, pinned memory, shared memory, open files, interfaces."""

from __future__ import annotations

import os
import resource
from collections.abc import Iterator, Mapping
from pathlib import Path

from torchtitan_npu.cli.doctor.environment import SELECTORS, hccl_choice
from torchtitan_npu.cli.doctor.findings import Finding, green, yellow
from torchtitan_npu.components import available_memory

GIB = 1 << 30
SHARED_MEMORY = GIB
"""Data loaders, gloo and NCCL use shared memory. A container has 64 MiB by default."""
OPEN_FILES = 8192
"""One socket per peer and process group: enough for 16 groups of 512 ranks."""
NODES = Path("/sys/devices/system/node")


def check_host(with_device: bool, ranks: int) -> Iterator[Finding]:
    """Run all checks. ``ranks`` is the number of ranks of a job on this machine."""
    yield cores(ranks)
    yield memory()
    yield from check_limits(with_device)


def cores(ranks: int) -> Finding:
    usable, total = len(os.sched_getaffinity(0)), os.cpu_count() or 1
    numa = len(list(NODES.glob("node[0-9]*"))) or 1
    what = f"{usable} of {total} cores, {numa} NUMA node{'s' * (numa > 1)}"
    binding = os.environ.get("CPU_AFFINITY_CONF", "0")
    if usable < ranks:
        return yellow("cores", f"{what}, for {ranks} ranks", "give the job more cores, or fewer ranks")
    if usable < total and not binding.startswith("0") and "force:1" not in binding:
        advice = f"set CPU_AFFINITY_CONF={binding},force:1, or allow this process to use every core"
        return yellow("cores", f"{what}: torch_npu then ignores CPU_AFFINITY_CONF={binding}", advice)
    return green("cores", what)


def memory() -> Finding:
    """Check host memory, which the swap optimizer and checkpoints need."""
    free, total, installed = available_memory.available(), available_memory.total(), available_memory.installed()
    what = f"{free / GIB:.0f} of {total / GIB:.0f} GiB free"
    if total < installed:
        what += f", the limit of the control group; the machine has {installed / GIB:.0f} GiB"
    if free < total / 2:
        return yellow("host memory", what, "another process uses it: see top")
    return green("host memory", what)


def check_limits(with_device: bool) -> Iterator[Finding]:
    """Check pinned memory, shared memory and open files."""
    # if it is too low, the first collective fails to register its buffers
    pinned, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    what = f"at most {pinned / GIB:.3g} GiB per process"
    if pinned == resource.RLIM_INFINITY:
        yield green("pinned memory", "no limit")
    elif not with_device:
        yield green("pinned memory", f"{what}; none is needed on the CPU")
    else:
        yield yellow("pinned memory", what, "ulimit -l unlimited (in a container: --ulimit memlock=-1)")
    space = os.statvfs("/dev/shm")
    size = space.f_blocks * space.f_frsize
    what = f"/dev/shm has {size / GIB:.3g} GiB"
    if size < SHARED_MEMORY:
        advice = "in a container: --shm-size=16g (Kubernetes: an emptyDir volume with medium Memory)"
        yield yellow("shared memory", what, advice)
    else:
        yield green("shared memory", what)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    what = f"at most {soft} per process"
    if soft != resource.RLIM_INFINITY and soft < OPEN_FILES:
        yield yellow("open files", what, f"ulimit -n {OPEN_FILES} (the hard limit is {hard})")
    else:
        yield green("open files", what)


def check_interfaces(found: Mapping[str, str], environment: Mapping[str, str]) -> Finding:
    """Return a warning if HCCL has to choose among several of the interfaces ``found``, addresses by name."""
    chosen = next((f"{name}={environment[name]}" for name in SELECTORS if name in environment), None)
    listed = ", ".join(f"{name} ({address})" for name, address in sorted(found.items())) or "none"
    if chosen is not None:
        return green("network interfaces", f"{listed}; {chosen}")
    if len(found) < 2:
        return green("network interfaces", listed)
    return yellow(
        "network interfaces",
        f"{listed}; HCCL takes {hccl_choice(found)}, the first by name",
        "for several nodes set HCCL_SOCKET_IFNAME and GLOO_SOCKET_IFNAME; torchtitan-npu launch sets them itself",
    )
