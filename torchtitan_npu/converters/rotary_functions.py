"""The functions that ``npu_rope`` calls in place of a model's rotations, on ``npu_rotary_mul``."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate

from torchtitan_npu.dist_utils import local
from torchtitan_npu.layers.rotary.registry import ROTATIONS
from torchtitan_npu.layers.rotary.tables import (
    HALF,
    HALF_OF_COMPLEX,
    HALF_OF_TABLES,
    INTERLEAVE,
    Pairing,
    RotaryTables,
)

Angles = Tensor | RotaryTables
"""The argument that a model passes its buffer of angles in."""
Positions = Tensor | RotaryTables | None
"""Positions as TorchTitan passes them, (1 or batch, sequence) or ``None`` for 0, 1, 2, ...; or tables."""


def rotate(pairing: Pairing, angles: Angles, positions: Positions, *tensors: Tensor) -> tuple[Tensor, ...]:
    """Rotate ``tensors`` (batch, sequence, heads, dim) in float32; each result has its tensor's dtype."""
    batch, sequence = tensors[0].shape[:2]
    given = next((value for value in (positions, angles) if isinstance(value, RotaryTables)), None)
    if given is not None:
        tables = given.cos_sin(pairing.rotary_mode)
    elif positions is None:
        tables = pairing.tables(local(angles)[None, :sequence])  # type: ignore[arg-type]
    else:
        tables = pairing.tables(rows(local(angles), 0, local(positions)))  # type: ignore[arg-type]
    longer = given is not None and given.covers_all_positions and tables.shape[2] > sequence
    if tables.shape[1] not in (1, batch) or not (tables.shape[2] == sequence or longer):
        given_tokens = tuple(tables.shape[1:3])
        raise ValueError(
            f"positions or angles for {given_tokens} tokens, for a batch of sequences ({batch}, {sequence})"
        )
    cos, sin = tables[:, :, :sequence]  # (1 or batch, sequence, 1, dim)
    return tuple(rotated(x, cos, sin, pairing.rotary_mode) for x in tensors)


def rotated(x: Tensor, cos: Tensor, sin: Tensor, rotary_mode: str) -> Tensor:
    """Rotate ``x`` (batch, sequence, heads, dim) by tables (1 or batch, sequence, 1, dim) in float32."""
    if cos.shape[0] > 1 and isinstance(x, DTensor) and not any(p.is_shard(0) or p.is_shard(1) for p in x.placements):
        # The gradient of the flattened sequence could be sharded where rows do not end, and not be split into rows.
        result = rotated(x.to_local(), cos, sin, rotary_mode)
        return DTensor.from_local(result, x.device_mesh, x.placements, run_check=False)
    heads, dim = x.shape[2:]
    y = x.to(torch.promote_types(x.dtype, torch.float32))
    if cos.shape[0] > 1:  # in mode interleave an NPU takes no cosines per batch row: flatten to one long sequence
        cos, sin = (table.reshape(1, -1, 1, dim) for table in (cos, sin))
        y = y.reshape(1, -1, heads, dim)
    if isinstance(y, DTensor):
        cos, sin = (_replicated(table, y) for table in (cos, sin))
    y = torch.ops.npu.npu_rotary_mul(y, cos, sin, rotary_mode)
    return y.reshape(x.shape).to(x.dtype)


def rows(table: Tensor, dim: int, positions: Tensor) -> Tensor:
    """Return ``table[positions]`` along ``dim``; unlike indexing, a negative position is an error."""
    return table.index_select(dim, positions.flatten()).unflatten(dim, positions.shape)


def _replicated(table: Tensor, like: DTensor) -> DTensor:
    return DTensor.from_local(table, like.device_mesh, [Replicate()] * like.device_mesh.ndim, run_check=False)


def rotate_pairs(x: Tensor, freqs_cis: Angles, positions: Positions = None) -> Tensor:
    """Rotate neighbouring elements of ``x`` (batch, sequence, heads, dim)."""
    return rotate(INTERLEAVE, freqs_cis, positions, x)[0]


def rotate_pairs_of_both(xq: Tensor, xk: Tensor, freqs_cis: Angles, positions: Positions = None) -> tuple[Tensor, ...]:
    """Rotate queries and keys as :func:`rotate_pairs` does."""
    return rotate(INTERLEAVE, freqs_cis, positions, xq, xk)


def rotate_halves(x: Tensor, freqs_cis: Angles, positions: Positions = None) -> Tensor:
    """Rotate elements of ``x`` (batch, sequence, heads, dim) that are half a head apart."""
    return rotate(HALF_OF_COMPLEX, freqs_cis, positions, x)[0]


def rotate_halves_of_both(
    xq: Tensor, xk: Tensor, rope_cache: Angles, positions: Positions = None
) -> tuple[Tensor, ...]:
    """Rotate queries and keys as :func:`rotate_halves` does, by a table of cosines and sines."""
    return rotate(HALF, rope_cache, positions, xq, xk)


def rotate_patches(xq: Tensor, xk: Tensor, tables: RotaryTables) -> tuple[Tensor, ...]:
    """Rotate queries and keys (patches, heads, dim); elements half a head apart form a pair."""
    cos, sin = tables.cos_sin(HALF_OF_TABLES.rotary_mode)  # (1, patches, 1, dim)
    return tuple(rotated(x.unsqueeze(0), cos, sin, HALF_OF_TABLES.rotary_mode).squeeze(0) for x in (xq, xk))


REPLACEMENTS: dict[tuple[Pairing, int], Callable[..., Any]] = {
    (INTERLEAVE, 1): rotate_pairs,
    (INTERLEAVE, 2): rotate_pairs_of_both,
    (HALF_OF_COMPLEX, 1): rotate_halves,
    (HALF, 2): rotate_halves_of_both,
    (HALF_OF_TABLES, 2): rotate_patches,
}
"""By pairing and number of rotated tensors, the function with the same arguments as a registered rotation."""


def replacements() -> dict[Callable[..., Any], Callable[..., Any]]:
    """Return the replacement of every registered rotation."""
    return {function: REPLACEMENTS[kind.pairing, kind.tensors] for function, kind in ROTATIONS.items()}
