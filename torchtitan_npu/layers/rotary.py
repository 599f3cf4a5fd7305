"""Rotary position embedding: cosines and sines that layers rotate queries and keys by, and which modules rotate.

A model registers its attention by :func:`register_rotation`. ``npu_rope`` converts the registered classes, and passes
:class:`RotaryTables` to them.

The tables are float32 and reach every layer as an argument. FSDP's mixed precision casts each floating-point tensor
among a block's arguments to the parameters' dtype, and angles lose too much precision in bfloat16. It looks for tensors
in containers and dataclasses, and leaves objects of any other class alone (torch 2.11 to 2.13). So the tables travel in
a plain class, :class:`RotaryTables`. A test fails if FSDP casts them.

An argument also keeps each forward pass apart from the next. Activation checkpointing saves it with the block's other
arguments, and recomputes an earlier microbatch with that microbatch's tables. A holder that the layers share would
need a key for this. ``torch.compile`` reads the fields as graph inputs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn


class RotaryTables:
    """Cosines and sines of the tokens of one forward pass, for all its layers. Not a dataclass: FSDP would cast it."""

    def __init__(
        self,
        tables: Tensor,
        modes: tuple[str, ...] = ("half",),
        argument: str = "positions",
        replaced: Tensor | None = None,
    ) -> None:
        self.tables = tables
        """(2 * number of modes, 1 or batch, sequence, 1, dim) float32: for each mode its cosines, then its sines."""
        self.modes = modes
        """The ``rotary_mode`` of each pair of tables."""
        self.argument = argument
        """The argument of a layer's forward that the tables are passed as."""
        self.replaced = replaced
        """The tensor that this argument would be without tables."""

    def cos_sin(self, mode: str) -> Tensor:
        """Return the tables (2, 1 or batch, sequence, 1, dim) for one ``rotary_mode``."""
        first = 2 * self.modes.index(mode)
        return self.tables[first : first + 2]

    @property
    def covers_all_positions(self) -> bool:
        """The tables start at position 0 and may be longer than the sequence."""
        return self.argument != "positions" or self.replaced is None


@dataclass(frozen=True)
class Pairing:
    """The elements of a head that rotate together, and the angles that a model keeps for them."""

    rotary_mode: str
    """The mode's name in ``npu_rotary_mul``."""
    cache: str | None
    """The model's buffer with the angles of all positions, or ``None`` if layers are called with RotaryTables."""
    tables: Callable[[Tensor], Tensor]
    """Make float32 cosines and sines (2, ..., 1, dim) from rows (..., width) of that buffer."""


def _neighbours_from_complex(freqs_cis: Tensor) -> Tensor:
    """Repeat each complex angle (..., dim / 2) for two neighbouring elements."""
    cos_sin = torch.view_as_real(freqs_cis).movedim(-1, 0)  # (2, ..., dim / 2)
    return cos_sin.repeat_interleave(2, dim=-1).unsqueeze(-2)


def _halves_from_complex(freqs_cis: Tensor) -> Tensor:
    """Repeat the complex angles (..., dim / 2) for both halves of a head."""
    cos_sin = torch.view_as_real(freqs_cis).movedim(-1, 0)  # (2, ..., dim / 2)
    return cos_sin.tile(2).unsqueeze(-2)


def from_concatenated(rope_cache: Tensor) -> Tensor:
    """Split rows (..., 2 * dim), cosines beside sines, into tables (2, ..., 1, dim)."""
    cos_sin = rope_cache.unflatten(-1, (2, -1)).movedim(-2, 0)  # (2, ..., dim)
    return cos_sin.float().unsqueeze(-2)


INTERLEAVE = Pairing("interleave", "freqs_cis", _neighbours_from_complex)
"""Neighbouring elements, by complex angles."""
HALF = Pairing("half", "rope_cache", from_concatenated)
"""Elements half a head apart, by cosines beside sines."""
HALF_OF_COMPLEX = Pairing("half", "freqs_cis", _halves_from_complex)
"""Elements half a head apart, by complex angles."""
HALF_OF_TABLES = Pairing("half", None, from_concatenated)
"""Elements half a head apart, by :class:`RotaryTables` that the model makes itself."""

FROM_COMPLEX = (INTERLEAVE, HALF_OF_COMPLEX)
"""The pairings that share one buffer. A model with both gets the tables of both, in this order."""


def apply_rotary_vision(xq: Tensor, xk: Tensor, tables: RotaryTables) -> tuple[Tensor, Tensor]:
    """Rotate ``xq`` and ``xk`` (patches, heads, head_dim) in float32; elements half a head apart form a pair.

    ``tables`` are those of image patches, (2, 1, patches, 1, head_dim).
    """
    cos, sin = tables.cos_sin("half").squeeze(1)  # (patches, 1, head_dim)

    def rotated(x: Tensor) -> Tensor:
        wide = x.to(torch.promote_types(x.dtype, torch.float32))
        a, b = wide.chunk(2, dim=-1)
        return (wide * cos + torch.cat((-b, a), dim=-1) * sin).to(x.dtype)

    return rotated(xq), rotated(xk)


@dataclass(frozen=True)
class Rotation:
    """A call of a rotation function in the methods of a class."""

    function: Callable[..., Any]
    pairing: Pairing
    tensors: int
    """The number of tensors that the function rotates: its first arguments."""
    methods: tuple[str, ...]
    runs_in: Callable[[Any], bool]
    """Return whether a module of the class rotates in its forward pass."""


ROTATIONS: dict[type[nn.Module], tuple[Rotation, ...]] = {}
"""By class of modules, what ``npu_rope`` replaces in it."""
PASSES_ANGLES: set[type[nn.Module]] = set()
"""The classes whose methods only pass positions and angles on, or rotate by them."""


def register_rotation(
    cls: type[nn.Module],
    function: Callable[..., Any],
    pairing: Pairing,
    tensors: int,
    *,
    methods: tuple[str, ...] = ("forward",),
    runs_in: Callable[[Any], bool] = lambda module: True,
    passed_by: Iterable[type[nn.Module]] = (),
) -> None:
    """Declare that ``cls`` rotates by ``function``, so that ``npu_rope`` can convert it.

    Args:
        cls: the class of an attention module. Subclasses that inherit ``methods`` are converted too.
        function: its arguments are the tensors to rotate, the angles, and optionally the tokens' positions
        pairing: the elements of a head that rotate together, and the angles
        tensors: the number of tensors to rotate
        methods: the methods of ``cls`` that call ``function`` by a global name, directly or through functions
        runs_in: false for modules that skip their rotation, which are not converted
        passed_by: ``cls`` and the classes of the modules around it, up to the model, if all that they do with positions
            and angles is to pass them on or to rotate by them. Then the model makes the tables once for all layers.
    """
    ROTATIONS[cls] = (*ROTATIONS.get(cls, ()), Rotation(function, pairing, tensors, methods, runs_in))
    PASSES_ANGLES.update(passed_by)
