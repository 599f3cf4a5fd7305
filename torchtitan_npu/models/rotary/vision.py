"""Rotary position embedding of the patches of an image, by tables that the model makes for the patches at hand."""

from __future__ import annotations

import torch
from torch import Tensor


def apply_rotary_vision(xq: Tensor, xk: Tensor, table: Tensor) -> tuple[Tensor, Tensor]:
    """``xq`` and ``xk`` (patches, heads, head_dim), each element rotated with the one half a head away, in float32.

    ``table`` (patches, 2 * head_dim) int32: the bits of float32 cosines beside sines. FSDP casts what is floating among
    a layer's inputs to its parameters' dtype, and angles do not stand bfloat16.
    """
    cos, sin = table.view(torch.float32).unsqueeze(1).chunk(2, dim=-1)  # (patches, 1, head_dim)

    def rotated(x: Tensor) -> Tensor:
        wide = x.to(torch.promote_types(x.dtype, torch.float32))
        a, b = wide.chunk(2, dim=-1)
        return (wide * cos + torch.cat((-b, a), dim=-1) * sin).to(x.dtype)

    return rotated(xq), rotated(xk)
