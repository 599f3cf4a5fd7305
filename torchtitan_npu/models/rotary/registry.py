"""The rotations that models call, so that ``npu_rope`` finds them without knowing a model.

A model registers its rotation functions where they are defined. TorchTitan's are registered in
:mod:`torchtitan_npu.upstream.rotations`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torchtitan_npu.models.rotary.tables import Pairing


@dataclass(frozen=True)
class Rotation:
    """The signature of a rotation function: ``tensors`` tensors to rotate, then the angles, then positions if any."""

    pairing: Pairing
    tensors: int


ROTATIONS: dict[Callable[..., Any], Rotation] = {}
PASSTHROUGH_PACKAGES: list[str] = []


def register_rotation(function: Callable[..., Any], pairing: Pairing, tensors: int) -> None:
    """Declare that ``function`` rotates its first ``tensors`` arguments, so that ``npu_rope`` can replace it.

    The next arguments are the angles, as ``pairing`` describes them, and optionally the tokens' positions.
    """
    ROTATIONS[function] = Rotation(pairing, tensors)


def register_passthrough_package(name: str) -> None:
    """Declare that the methods of package ``name`` only pass positions and angles on, or rotate by them.

    ``npu_rope`` passes :class:`RotaryTables` in their place through such methods, and through no others.
    """
    PASSTHROUGH_PACKAGES.append(name)
