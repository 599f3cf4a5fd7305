"""Arithmetic over a model's parameters: how many devices hold them, before anything is rehearsed."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from rich.console import Console
from torch import nn
from torchtitan.config import TORCH_DTYPE_MAP
from torchtitan.protocols.train_spec import get_train_spec

from torchtitan_npu.config.job_config import JobConfig

GB = 10**9


@dataclass(frozen=True)
class Size:
    """Parameters: those of experts, and the others."""

    dense: int
    experts: int
    whole: int = 0
    """Of the others: what tensor parallel leaves whole on every rank; only :func:`.whole.sizes_under_tp` knows."""

    def __add__(self, other: Size) -> Size:
        return Size(self.dense + other.dense, self.experts + other.experts, self.whole + other.whole)

    @property
    def total(self) -> int:
        return self.dense + self.experts


def model_args(config: JobConfig) -> Any:
    """Of the job's flavor, as they are registered: not to be changed."""
    return get_train_spec(config.model.name).model_args[config.model.flavor]


def sizes(model: nn.Module) -> dict[str, Size]:
    """By module of a pipeline stage (``tok_embeddings``, ``layers.0``, ...): its parameters; those that two share are
    the first one's, and the other has none."""
    found = {module_of(name): Size(0, 0) for name, _ in model.named_parameters(remove_duplicate=False)}
    for name, parameter in model.named_parameters():
        experts = parameter.numel() if ".experts." in name else 0
        module = module_of(name)
        found[module] += Size(parameter.numel() - experts, experts)
    return found


def module_of(parameter: str) -> str:
    """The module of a pipeline stage that a ``parameter`` belongs to, by its name."""
    first, second, *_ = f"{parameter}.".split(".")
    return f"{first}.{second}" if first == "layers" else first


def arithmetic(size: Size, dtype: str, degrees: dict[str, int], world_size: int, device_memory: int) -> dict[str, Any]:
    """Weights and gradients in ``dtype``, in bytes: together, on a device, and on how many devices at the least."""
    weight_and_gradient = 2 * TORCH_DTYPE_MAP[dtype].itemsize
    total = weight_and_gradient * size.total
    return {
        "dtype": dtype,
        "weights_and_gradients": total,
        "on_a_device": total // world_size,
        "devices_at_least": math.ceil(total / device_memory),
        "not_in_experts_before_fsdp": weight_and_gradient * size.dense // (degrees["pp"] * degrees["tp"]),
    }


def print_arithmetic(
    console: Console, found: dict[str, Any], degrees: dict[str, int], world_size: int, device_memory: int
) -> None:
    total = found["weights_and_gradients"] / GB
    enough = "fit" if world_size >= found["devices_at_least"] else "[red]do not fit[/]"
    console.print(
        f"weights and gradients in {found['dtype']}: {total:.0f} GB; they {enough} {world_size} devices of "
        f"{device_memory / GB:.4g} GB, which takes {found['devices_at_least']} at the least"
    )
    dense = found["not_in_experts_before_fsdp"] / GB
    console.print(f"of those not in experts, PP{degrees['pp']} TP{degrees['tp']} leave {dense:.1f} GB before FSDP")
