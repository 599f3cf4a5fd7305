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

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from torchtitan_npu.errors import UsageError
from torchtitan_npu.ops.rotary_mul import rotate_pairs


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
    wide = [x.to(torch.promote_types(x.dtype, torch.float32)) for x in (xq, xk)]
    rotated = [x * cos + rotate_pairs(x, "half") * sin for x in wide]
    return rotated[0].to(xq.dtype), rotated[1].to(xk.dtype)


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


# several positions per token


def arrange(rows: Tensor, section: Sequence[int], interleaved: bool) -> Tensor:
    """Select from ``rows`` (axes, ..., angles) each angle's axis: (..., angles)."""
    if not interleaved:
        blocks = [block[axis] for axis, block in enumerate(rows.split(list(section), dim=-1))]
        return torch.cat(blocks, dim=-1)
    arranged = rows[0].clone()
    for axis in (1, 2):
        turns = slice(axis, 3 * section[axis], 3)
        arranged[..., turns] = rows[axis, ..., turns]
    return arranged


class MRoPETables(nn.Module):
    """Cosines and sines of a batch's tokens by several positions each, made once per forward for all layers.

    MRoPE has the axes time, height and width, and divides the angles of a head among them: ``section[a]`` follow the
    token's position on axis ``a``. Two orders exist. Blocked (Qwen2-VL, Qwen2.5-VL): the first angles follow time, the
    next height, the last width. Interleaved (Qwen3-VL): time, height, width, time, ... until an axis has no angles
    left; the remaining angles follow time. A text token has the same position on all axes. In both orders, elements
    half the rotated width apart rotate together, as in Qwen3. ``npu_mrope`` replaces this class and
    :class:`MRoPERotation` in any model that has them.
    """

    def __init__(self, section: Sequence[int], interleaved: bool) -> None:
        super().__init__()
        self.section, self.interleaved = tuple(section), interleaved

    def forward(
        self, rope_cache: Tensor, positions: Tensor, shape: Sequence[int], dtype: torch.dtype
    ) -> tuple[Tensor, Tensor | RotaryTables | None]:
        """Return the arguments ``rope_cache`` and ``positions`` of each layer.

        Here these are a table (bsz, seqlen, 2 * rotary_dim) in ``dtype``, and no positions. ``rope_cache`` (all
        positions, 2 * rotary_dim) is TorchTitan's for Qwen3: cosines beside sines, each repeated for both halves of a
        head. ``positions`` are (axes, bsz, seqlen) or (axes, bsz * seqlen), ``shape`` is (bsz, seqlen).
        """
        return self.table(rope_cache, self.checked(positions, shape)).to(dtype), None

    def table(self, rope_cache: Tensor, positions: Tensor) -> Tensor:
        """Return cosines beside sines in the dtype of ``rope_cache``, for ``positions`` (axes, bsz, seqlen)."""
        cos_sin = rope_cache.unflatten(-1, (2, 2, -1))[:, :, 0]  # (all positions, 2, angles)
        arranged = arrange(cos_sin[positions], self.section, self.interleaved)  # (bsz, seqlen, 2, angles)
        return arranged.tile(2).flatten(-2)

    def checked(self, positions: Tensor, shape: Sequence[int]) -> Tensor:
        """Check ``positions`` and return them as (axes, bsz, seqlen)."""
        axes, (batch, sequence) = len(self.section), shape
        if positions.shape not in ((axes, batch, sequence), (axes, batch * sequence)) or positions.is_floating_point():
            raise UsageError(
                f"positions must be integers of the shape ({axes}, {batch}, {sequence}), or packed "
                f"({axes}, {batch * sequence}), one per axis of mrope_section {list(self.section)}; not "
                f"{positions.dtype} {tuple(positions.shape)}"
            )
        return positions.reshape(axes, batch, sequence)

    def extra_repr(self) -> str:
        return f"section={list(self.section)}, interleaved={self.interleaved}"


class MRoPERotation(nn.Module):
    """Rotates the queries and keys of one layer by the output of :class:`MRoPETables`."""

    def __init__(
        self,
        section: Sequence[int],
        interleaved: bool,
        n_heads: int,
        n_kv_heads: int,
        head_dim: int,
        rotary_dim: int | None = None,
    ) -> None:
        super().__init__()
        self.section, self.interleaved = tuple(section), interleaved
        self.n_heads, self.n_kv_heads, self.head_dim = n_heads, n_kv_heads, head_dim
        self.rotary_dim = rotary_dim or head_dim
        """The number of elements at the start of a head that are rotated."""

    def forward(
        self, xq: Tensor, xk: Tensor, table: Tensor, positions: Tensor | RotaryTables | None = None
    ) -> tuple[Tensor, Tensor]:
        """Rotate ``xq`` and ``xk`` (bsz, seqlen, heads, head_dim) by ``table`` (bsz, seqlen, 2 * rotary_dim)."""
        cos, sin = table.unsqueeze(2).chunk(2, dim=-1)  # (bsz, seqlen, 1, rotary_dim)
        return self._rotated(xq, cos, sin), self._rotated(xk, cos, sin)

    def _rotated(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        rotated, unchanged = x.tensor_split([self.rotary_dim], dim=-1)
        rotated = (rotated * cos + rotate_pairs(rotated, "half") * sin).type_as(x)
        return rotated if self.rotary_dim == self.head_dim else torch.cat((rotated, unchanged), dim=-1)

    def extra_repr(self) -> str:
        return f"section={list(self.section)}, interleaved={self.interleaved}, rotary_dim={self.rotary_dim}"
