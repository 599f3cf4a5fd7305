"""The rotations that TorchTitan's models and ours call, and those that ``npu_rope`` has in their place."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor
from torchtitan.models.deepseek_v3.model import model as deepseek_v3
from torchtitan.models.gpt_oss.model import model as gpt_oss
from torchtitan.models.llama3.model import model as llama3
from torchtitan.models.llama4.model import model as llama4
from torchtitan.models.qwen3.model import model as qwen3

from torchtitan_npu.converters.rotary_tables import (
    HALF,
    HALF_OF_COMPLEX,
    HALF_OF_TABLE,
    INTERLEAVE,
    rotate,
    rotated,
)
from torchtitan_npu.models.deepseek_v32.indexer import apply_rotary_half
from torchtitan_npu.models.rotary.vision import apply_rotary_vision


def rotate_pairs(x: Tensor, freqs_cis: Tensor, positions: Tensor | None = None) -> Tensor:
    """``x`` (batch, sequence, heads, dim), its neighbouring elements rotated by the angles of ``freqs_cis``."""
    return rotate(INTERLEAVE, freqs_cis, positions, x)[0]


def rotate_pairs_of_both(
    xq: Tensor, xk: Tensor, freqs_cis: Tensor, positions: Tensor | None = None
) -> tuple[Tensor, ...]:
    """Queries and keys, rotated as :func:`rotate_pairs` does."""
    return rotate(INTERLEAVE, freqs_cis, positions, xq, xk)


def rotate_halves(x: Tensor, freqs_cis: Tensor, positions: Tensor | None = None) -> Tensor:
    """``x`` (batch, sequence, heads, dim), each element rotated with the one half a head away."""
    return rotate(HALF_OF_COMPLEX, freqs_cis, positions, x)[0]


def rotate_halves_of_both(
    xq: Tensor, xk: Tensor, rope_cache: Tensor, positions: Tensor | None = None
) -> tuple[Tensor, ...]:
    """Queries and keys, rotated as :func:`rotate_halves` does, by a table of cosines and sines."""
    return rotate(HALF, rope_cache, positions, xq, xk)


def rotate_patches(xq: Tensor, xk: Tensor, table: Tensor) -> tuple[Tensor, ...]:
    """Queries and keys (patches, heads, dim), each element with the one half a head away, by a table of the patches."""
    cos, sin = HALF_OF_TABLE.tables(table.unsqueeze(0))  # (1, patches, 1, dim)
    return tuple(rotated(x.unsqueeze(0), cos, sin, HALF_OF_TABLE.rotary_mode).squeeze(0) for x in (xq, xk))


ROTATIONS: dict[Callable[..., Any], Callable[..., Any]] = {
    llama3.apply_rotary_emb: rotate_pairs_of_both,
    llama4.apply_rotary_emb: rotate_pairs_of_both,
    deepseek_v3.apply_rotary_emb: rotate_pairs,
    qwen3.apply_rotary_emb: rotate_halves_of_both,
    gpt_oss.apply_rotary_emb: rotate_halves_of_both,
    apply_rotary_half: rotate_halves,
    apply_rotary_vision: rotate_patches,
}
"""The models' functions, and ours with the same arguments."""

PAIRINGS = {
    rotate_pairs: INTERLEAVE,
    rotate_pairs_of_both: INTERLEAVE,
    rotate_halves: HALF_OF_COMPLEX,
    rotate_halves_of_both: HALF,
    rotate_patches: HALF_OF_TABLE,
}
