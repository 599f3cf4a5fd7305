"""Check which network interface HCCL uses between nodes."""

from __future__ import annotations

from collections.abc import Mapping

from torchtitan_npu.cli.doctor.findings import Finding, green, yellow
from torchtitan_npu.cli.network_interfaces import SELECTORS, hccl_choice


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
