"""What the environment asks of a launch: nodes, ranks, the profile and the folder of the logs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from torchtitan_npu.errors import UsageError


@dataclass(frozen=True)
class Asked:
    """By their variables: NNODES, NODE_RANK, MASTER_ADDR, MASTER_PORT, NPROC, PROFILE, LOGS."""

    nodes: int
    node: int
    master: str
    port: int
    nproc: int
    """0: as many as there are devices."""
    profile: str
    """Empty: that of the home."""
    logs: Path


def asked(environment: Mapping[str, str]) -> Asked:
    """Raise :class:`UsageError` for what is not right or not said."""
    wanted = Asked(
        nodes=_number("NNODES", 1, environment),
        node=_number("NODE_RANK", 0, environment),
        master=environment.get("MASTER_ADDR", ""),
        port=_number("MASTER_PORT", 29500, environment),
        nproc=_number("NPROC", 0, environment),
        profile=environment.get("PROFILE", ""),
        logs=Path(environment.get("LOGS") or "outputs/logs"),
    )
    last = wanted.nodes - 1
    if wanted.nodes < 1:
        raise UsageError("NNODES=0: at least one node trains")
    if wanted.nproc < 1 and environment.get("NPROC"):
        raise UsageError("NPROC=0: at least one rank trains")
    if not 1 <= wanted.port <= 65535:
        raise UsageError(f"MASTER_PORT={wanted.port} is not a port, 1 to 65535")
    if wanted.node > last:
        raise UsageError(f"NODE_RANK={wanted.node} is none of the {wanted.nodes} nodes, 0 to {last}")
    if wanted.nodes > 1 and not environment.get("NODE_RANK"):
        raise UsageError(f"NODE_RANK is not set: the number of this node, 0 to {last}")
    if wanted.nodes > 1 and not wanted.master:
        raise UsageError("MASTER_ADDR is not set: the name or address of node 0, as the others reach it")
    return wanted


def _number(name: str, default: int, environment: Mapping[str, str]) -> int:
    text = environment.get(name) or str(default)
    if not (text.isascii() and text.isdecimal()):
        raise UsageError(f"{name}={text} is not a number")
    return int(text)
