"""Rotary position embedding by several positions per token (MRoPE): time, height and width.

The angles of a head are divided among the axes: ``section[a]`` of them follow the token's position on axis ``a``. Two
orders exist. Blocked (Qwen2-VL, Qwen2.5-VL): the first angles follow time, the next height, the last width. Interleaved
(Qwen3-VL): time, height, width, time, ... until an axis has no angles left; the remaining angles follow time. A text
token has the same position on all axes. In both orders, elements half the rotated width apart rotate together, as in
Qwen3.

:class:`MRoPETables` makes the cosines and sines once per forward, :class:`MRoPERotation` rotates by them in each layer.
``npu_mrope`` replaces both in any model that has them.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from torchtitan_npu.errors import UsageError
from torchtitan_npu.layers.rotary import RotaryTables


def arrange(rows: Tensor, section: Sequence[int], interleaved: bool) -> Tensor:
    """Select from ``rows`` (axes, ..., angles) each angle's own axis: (..., angles)."""
    if not interleaved:
        blocks = [block[axis] for axis, block in enumerate(rows.split(list(section), dim=-1))]
        return torch.cat(blocks, dim=-1)
    arranged = rows[0].clone()
    for axis in (1, 2):
        turns = slice(axis, 3 * section[axis], 3)
        arranged[..., turns] = rows[axis, ..., turns]
    return arranged


class MRoPETables(nn.Module):
    """Cosines and sines of a batch's tokens, made once per forward for all layers."""

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
        first, rest = x[..., : self.rotary_dim], x[..., self.rotary_dim :]
        a, b = first.chunk(2, dim=-1)
        first = (first * cos + torch.cat((-b, a), dim=-1) * sin).type_as(x)
        return first if self.rotary_dim == self.head_dim else torch.cat((first, rest), dim=-1)

    def extra_repr(self) -> str:
        return f"section={list(self.section)}, interleaved={self.interleaved}, rotary_dim={self.rotary_dim}"
