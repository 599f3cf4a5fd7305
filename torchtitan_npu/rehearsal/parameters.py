"""Arithmetic over a model's parameters: how many devices hold them, before anything is rehearsed."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from rich.console import Console
from torch import nn

GB = 10**9
WEIGHT_AND_GRADIENT = 8
"""Bytes of a parameter, both in float32."""


@dataclass(frozen=True)
class Size:
    """Parameters: those of experts, and the others."""

    dense: int
    experts: int

    def __add__(self, other: Size) -> Size:
        return Size(self.dense + other.dense, self.experts + other.experts)

    @property
    def total(self) -> int:
        return self.dense + self.experts


def sizes(model: nn.Module) -> dict[str, Size]:
    """By module of a pipeline stage (``tok_embeddings``, ``layers.0``, ...): its parameters."""
    found: dict[str, Size] = {}
    for name, parameter in model.named_parameters():
        parts = name.split(".")
        module = ".".join(parts[:2]) if parts[0] == "layers" else parts[0]
        experts = parameter.numel() if ".experts." in name else 0
        found[module] = found.get(module, Size(0, 0)) + Size(parameter.numel() - experts, experts)
    return found


def arithmetic(size: Size, degrees: dict[str, int], world_size: int, device_memory: int) -> dict[str, Any]:
    """Weights and gradients in float32, in bytes: together, on a device, and on how many devices at the least."""
    total = WEIGHT_AND_GRADIENT * size.total
    return {
        "weights_and_gradients": total,
        "on_a_device": total // world_size,
        "devices_at_least": math.ceil(total / device_memory),
        "not_in_experts_before_fsdp": WEIGHT_AND_GRADIENT * size.dense // (degrees["pp"] * degrees["tp"]),
    }


def print_arithmetic(
    console: Console, found: dict[str, Any], degrees: dict[str, int], world_size: int, device_memory: int
) -> None:
    total = found["weights_and_gradients"] / GB
    enough = "fit" if world_size >= found["devices_at_least"] else "[red]do not fit[/]"
    console.print(
        f"weights and gradients in float32: {total:.0f} GB; they {enough} {world_size} devices of "
        f"{device_memory / GB:.4g} GB, which takes {found['devices_at_least']} at the least"
    )
    dense = found["not_in_experts_before_fsdp"] / GB
    console.print(f"of those not in experts, PP{degrees['pp']} TP{degrees['tp']} leave {dense:.1f} GB before FSDP")
