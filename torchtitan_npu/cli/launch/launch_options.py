"""Read the options of a launch from the environment: nodes, ranks, profile and log folder."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from torchtitan_npu.errors import UsageError


@dataclass(frozen=True)
class LaunchOptions:
    """Hold NNODES, NODE_RANK, MASTER_ADDR, MASTER_PORT, NPROC, PROFILE and LOGS."""

    nodes: int
    node: int
    master: str
    port: int
    nproc: int
    """0 means one rank per device."""
    profile: str
    """Empty means the profile of the backend."""
    logs: Path


def read_options(environment: Mapping[str, str]) -> LaunchOptions:
    """Read and check the options. Raise :class:`UsageError` for an invalid or missing one."""
    options = LaunchOptions(
        nodes=_number("NNODES", 1, environment),
        node=_number("NODE_RANK", 0, environment),
        master=environment.get("MASTER_ADDR", ""),
        port=_number("MASTER_PORT", 29500, environment),
        nproc=_number("NPROC", 0, environment),
        profile=environment.get("PROFILE", ""),
        logs=Path(environment.get("LOGS") or "outputs/logs"),
    )
    last = options.nodes - 1
    if options.nodes < 1:
        raise UsageError("NNODES=0: must be at least 1")
    if options.nproc < 1 and environment.get("NPROC"):
        raise UsageError("NPROC=0: must be at least 1")
    if not 1 <= options.port <= 65535:
        raise UsageError(f"MASTER_PORT={options.port}: must be 1 to 65535")
    if options.node > last:
        raise UsageError(f"NODE_RANK={options.node}: must be 0 to {last} with NNODES={options.nodes}")
    if options.nodes > 1 and not environment.get("NODE_RANK"):
        raise UsageError(f"NODE_RANK is not set: set it to the number of this node, 0 to {last}")
    if options.nodes > 1 and not options.master:
        raise UsageError("MASTER_ADDR is not set: set it to the name or address of node 0")
    return options


def _number(name: str, default: int, environment: Mapping[str, str]) -> int:
    text = environment.get(name) or str(default)
    if not (text.isascii() and text.isdecimal()):
        raise UsageError(f"{name}={text} is not a number")
    return int(text)
