"""A float64 oracle for rotary embeddings, with error budgets for lower precision."""

from __future__ import annotations

import torch
from torch import Tensor

from tests._helpers.error_budget import unit_roundoff


def partners(size: int, mode: str) -> tuple[list[int], list[int]]:
    """Return, for each of ``size`` channels, the other channel of its pair and its sign in the result."""
    if mode == "interleave":
        return [c + 1 - 2 * (c % 2) for c in range(size)], [-1 if c % 2 == 0 else 1 for c in range(size)]
    half = size // 2
    return [(c + half) % size for c in range(size)], [-1 if c < half else 1 for c in range(size)]


def rotated(x: Tensor, cos: Tensor, sin: Tensor, mode: str, compute: torch.dtype) -> tuple[Tensor, Tensor]:
    """Rotate ``x`` (..., D) by angles that broadcast to it. Return the result and the error budget in ``compute``."""
    x, cos, sin = x.double(), cos.double(), sin.double()
    other, sign = partners(x.shape[-1], mode)
    same, turned = x * cos, x[..., other] * torch.tensor(sign, dtype=torch.float64) * sin
    # each product rounds once, their sum once more
    return same + turned, 2 * unit_roundoff(compute) * (same.abs() + turned.abs())


def unrotated(g: Tensor, cos: Tensor, sin: Tensor, mode: str, compute: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return the gradient of :func:`rotated` with respect to ``x``, and its budget."""
    g, cos, sin = g.double(), cos.double().expand(g.shape), sin.double().expand(g.shape)
    other, sign = partners(g.shape[-1], mode)
    same, turned = g * cos, (g * torch.tensor(sign, dtype=torch.float64) * sin)[..., other]
    return same + turned, 2 * unit_roundoff(compute) * (same.abs() + turned.abs())


def neighbours_apart(size: int) -> list[int]:
    """Return the order of channels that maps the pairs of ``interleave`` to those of ``half``."""
    return [*range(0, size, 2), *range(1, size, 2)]


def cos_sin(positions: Tensor, pairs: int, dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor]:
    """Return cosines and sines of ``positions`` (...) for ``pairs`` frequencies, (..., pairs) each."""
    frequencies = 10000.0 ** -(torch.arange(pairs, dtype=torch.float64) / max(pairs, 1))
    angles = positions.double()[..., None] * frequencies
    return angles.cos().to(dtype), angles.sin().to(dtype)
