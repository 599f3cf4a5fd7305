"""Parameter counts of a model, and how many devices hold them."""

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
    """Parameter counts of a module: those of experts, and the others (dense)."""

    dense: int
    experts: int
    replicated: int = 0
    """The part of ``dense`` that tensor parallel replicates; set by :func:`.replicated.sizes_under_tp` only."""

    def __add__(self, other: Size) -> Size:
        return Size(self.dense + other.dense, self.experts + other.experts, self.replicated + other.replicated)

    @property
    def total(self) -> int:
        return self.dense + self.experts


def model_args(config: JobConfig) -> Any:
    """Return the registered arguments of the job's flavor. Do not change them."""
    return get_train_spec(config.model.name).model_args[config.model.flavor]


def sizes(model: nn.Module) -> dict[str, Size]:
    """Return the size of each module of a pipeline stage (``tok_embeddings``, ``layers.0``, ...).

    Tied weights are counted in the first module that has them.
    """
    found = {module_of(name): Size(0, 0) for name, _ in model.named_parameters(remove_duplicate=False)}
    for name, parameter in model.named_parameters():
        experts = parameter.numel() if ".experts." in name else 0
        module = module_of(name)
        found[module] += Size(parameter.numel() - experts, experts)
    return found


def module_of(parameter: str) -> str:
    """Return the module of a pipeline stage that has the parameter of this name."""
    first, second, *_ = f"{parameter}.".split(".")
    return f"{first}.{second}" if first == "layers" else first


def arithmetic(size: Size, dtype: str, degrees: dict[str, int], world_size: int, device_memory: int) -> dict[str, Any]:
    """Return the bytes of weights and gradients in ``dtype``: in total and per device, and the devices they need."""
    weight_and_gradient = 2 * TORCH_DTYPE_MAP[dtype].itemsize
    total = weight_and_gradient * size.total
    return {
        "dtype": dtype,
        "weights_and_gradients": total,
        "per_device": total // world_size,
        "min_devices": math.ceil(total / device_memory),
        "dense_before_fsdp": weight_and_gradient * size.dense // (degrees["pp"] * degrees["tp"]),
    }


def print_arithmetic(
    console: Console, found: dict[str, Any], degrees: dict[str, int], world_size: int, device_memory: int
) -> None:
    total = found["weights_and_gradients"] / GB
    fits = "fit" if world_size >= found["min_devices"] else "[red]do not fit[/]"
    console.print(
        f"weights and gradients in {found['dtype']}: {total:.0f} GB; they {fits} {world_size} devices of "
        f"{device_memory / GB:.4g} GB; the minimum is {found['min_devices']} devices"
    )
    dense = found["dense_before_fsdp"] / GB
    console.print(
        f"weights and gradients outside experts: {dense:.1f} GB per device with PP{degrees['pp']} TP{degrees['tp']}, "
        "before FSDP"
    )
