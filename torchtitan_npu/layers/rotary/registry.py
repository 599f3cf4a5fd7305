"""The rotations that models call, so that ``npu_rope`` finds them without knowing a model.

A model registers its rotation functions where they are defined. TorchTitan's are registered in
:mod:`torchtitan_npu.train_specs.rotations`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import nn

from torchtitan_npu.layers.rotary.tables import Pairing


def _always(module: nn.Module) -> bool:
    return True


@dataclass(frozen=True)
class Rotation:
    """The signature of a rotation function: ``tensors`` tensors to rotate, then the angles, then positions if any."""

    pairing: Pairing
    tensors: int
    runs_in: Callable[[nn.Module], bool] = _always
    """Return whether a module whose code calls the function does so in its forward pass."""


ROTATIONS: dict[Callable[..., Any], Rotation] = {}
PASSTHROUGH_PACKAGES: list[str] = []


def register_rotation(
    function: Callable[..., Any], pairing: Pairing, tensors: int, runs_in: Callable[[nn.Module], bool] = _always
) -> None:
    """Declare that ``function`` rotates its first ``tensors`` arguments, so that ``npu_rope`` can replace it.

    The next arguments are the angles, as ``pairing`` describes them, and optionally the tokens' positions. Modules for
    which ``runs_in`` is false are not converted: some of a model's layers may skip their rotation.
    """
    ROTATIONS[function] = Rotation(pairing, tensors, runs_in)


def register_passthrough_package(name: str) -> None:
    """Declare that the methods of package ``name`` only pass positions and angles on, or rotate by them.

    ``npu_rope`` passes :class:`RotaryTables` in their place through such methods, and through no others.
    """
    PASSTHROUGH_PACKAGES.append(name)
