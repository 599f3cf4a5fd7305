"""Rotary position embedding by several positions a token (MRoPE): time, height and width.

A head's angles are shared out among the axes: ``section[a]`` of them follow the token's position on axis ``a``. Two
layouts exist. Blocked (Qwen2-VL, Qwen2.5-VL): the first angles follow time, the next height, the last width.
Interleaved (Qwen3-VL): time, height, width, time, ... as long as an axis has angles left, the rest follow time. Text
has the same position on all axes and cannot tell them apart. Neither says which two elements of a head rotate
together: that are, here as in Qwen3, those half the rotated width apart.

:class:`MRoPETables` makes the cosines and sines once a forward, :class:`MRoPERotation` rotates by them in each layer;
``npu_mrope`` replaces both, in whatever model they are.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from torchtitan_npu.errors import UsageError


def arrange(rows: Tensor, section: Sequence[int], interleaved: bool) -> Tensor:
    """Of ``rows`` (axes, ..., angles), for each angle the one of its axis: (..., angles)."""
    if not interleaved:
        blocks = [block[axis] for axis, block in enumerate(rows.split(list(section), dim=-1))]
        return torch.cat(blocks, dim=-1)
    arranged = rows[0].clone()
    for axis in (1, 2):
        turns = slice(axis, 3 * section[axis], 3)
        arranged[..., turns] = rows[axis, ..., turns]
    return arranged


class MRoPETables(nn.Module):
    """Cosines and sines of a batch's tokens, once a forward for all layers."""

    def __init__(self, section: Sequence[int], interleaved: bool) -> None:
        super().__init__()
        self.section, self.interleaved = tuple(section), interleaved

    def forward(
        self, rope_cache: Tensor, positions: Tensor, shape: Sequence[int], dtype: torch.dtype
    ) -> tuple[Tensor, Tensor | None]:
        """What each layer takes to rotate by: here a table (bsz, seqlen, 2 * rotary_dim), and no positions.

        ``rope_cache`` (all positions, 2 * rotary_dim) is TorchTitan's for Qwen3: cosines beside sines, the same for
        either half of a head. ``positions`` (axes, bsz, seqlen) or (axes, bsz * seqlen), of tokens of that ``shape``.
        """
        return self.table(rope_cache, self.checked(positions, shape)).to(dtype), None

    def table(self, rope_cache: Tensor, positions: Tensor) -> Tensor:
        """Cosines beside sines, in the dtype of ``rope_cache``, for ``positions`` (axes, bsz, seqlen)."""
        cos_sin = rope_cache.unflatten(-1, (2, 2, -1))[:, :, 0]  # (all positions, 2, angles)
        arranged = arrange(cos_sin[positions], self.section, self.interleaved)  # (bsz, seqlen, 2, angles)
        return arranged.tile(2).flatten(-2)

    def checked(self, positions: Tensor, shape: Sequence[int]) -> Tensor:
        """``positions`` as (axes, bsz, seqlen)."""
        axes, (batch, sequence) = len(self.section), shape
        if positions.shape not in ((axes, batch, sequence), (axes, batch * sequence)) or positions.is_floating_point():
            raise UsageError(
                f"positions must be integers of the shape ({axes}, {batch}, {sequence}), or packed "
                f"({axes}, {batch * sequence}): one for each axis of mrope_section {list(self.section)}; not "
                f"{positions.dtype} {tuple(positions.shape)}"
            )
        return positions.reshape(axes, batch, sequence)

    def extra_repr(self) -> str:
        return f"section={list(self.section)}, interleaved={self.interleaved}"


class MRoPERotation(nn.Module):
    """Rotates the queries and keys of one layer by what :class:`MRoPETables` made."""

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
        """Of a head's elements the first so many are rotated, the others kept."""

    def forward(self, xq: Tensor, xk: Tensor, table: Tensor, positions: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """``xq`` and ``xk`` (bsz, seqlen, heads, head_dim) by ``table`` (bsz, seqlen, 2 * rotary_dim)."""
        cos, sin = table.unsqueeze(2).chunk(2, dim=-1)  # (bsz, seqlen, 1, rotary_dim)
        return self._rotated(xq, cos, sin), self._rotated(xk, cos, sin)

    def _rotated(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        turned, kept = x[..., : self.rotary_dim], x[..., self.rotary_dim :]
        a, b = turned.chunk(2, dim=-1)
        turned = (turned * cos + torch.cat((-b, a), dim=-1) * sin).type_as(x)
        return turned if self.rotary_dim == self.head_dim else torch.cat((turned, kept), dim=-1)

    def extra_repr(self) -> str:
        return f"section={list(self.section)}, interleaved={self.interleaved}, rotary_dim={self.rotary_dim}"
