"""A float64 oracle for rotary embeddings, channel by channel, with the error that lower precision may make of it."""

from __future__ import annotations

import torch
from torch import Tensor

from tests._helpers.error_budget import unit_roundoff


def partners(size: int, mode: str) -> tuple[list[int], list[int]]:
    """For each of ``size`` channels, the other one of its pair, and the sign with which that one enters its result."""
    if mode == "interleave":
        return [c + 1 - 2 * (c % 2) for c in range(size)], [-1 if c % 2 == 0 else 1 for c in range(size)]
    block = size // 2 if mode == "quarter" else size  # within which the two halves are paired
    first = [c % block < block // 2 for c in range(size)]
    return [c + block // 2 if f else c - block // 2 for c, f in enumerate(first)], [-1 if f else 1 for f in first]


def rotated(x: Tensor, cos: Tensor, sin: Tensor, mode: str, compute: torch.dtype) -> tuple[Tensor, Tensor]:
    """``x`` (..., D) rotated by angles that broadcast to it, and the error budget of doing so in ``compute``."""
    x, cos, sin = x.double(), cos.double(), sin.double()
    other, sign = partners(x.shape[-1], mode)
    kept, turned = x * cos, x[..., other] * torch.tensor(sign, dtype=torch.float64) * sin
    # each product rounds once, their sum once more
    return kept + turned, 2 * unit_roundoff(compute) * (kept.abs() + turned.abs())


def unrotated(g: Tensor, cos: Tensor, sin: Tensor, mode: str, compute: torch.dtype) -> tuple[Tensor, Tensor]:
    """The gradient of :func:`rotated` with respect to ``x``, given that of its result, and its budget."""
    g, cos, sin = g.double(), cos.double().expand(g.shape), sin.double().expand(g.shape)
    other, sign = partners(g.shape[-1], mode)
    kept, turned = g * cos, (g * torch.tensor(sign, dtype=torch.float64) * sin)[..., other]
    return kept + turned, 2 * unit_roundoff(compute) * (kept.abs() + turned.abs())


def neighbours_apart(size: int) -> list[int]:
    """The order of channels that turns the pairs of ``interleave`` into those of ``half``."""
    return [*range(0, size, 2), *range(1, size, 2)]


def cos_sin(positions: Tensor, pairs: int, dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor]:
    """Cosines and sines of ``positions`` (...) for ``pairs`` frequencies, (..., pairs) each."""
    frequencies = 10000.0 ** -(torch.arange(pairs, dtype=torch.float64) / max(pairs, 1))
    angles = positions.double()[..., None] * frequencies
    return angles.cos().to(dtype), angles.sin().to(dtype)
