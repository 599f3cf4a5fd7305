"""Rotary position embedding of image patches, by tables that the model makes for the patches of a batch."""

from __future__ import annotations

import torch
from torch import Tensor

from torchtitan_npu.layers.rotary.registry import register_rotation
from torchtitan_npu.layers.rotary.tables import HALF_OF_TABLES, RotaryTables


def apply_rotary_vision(xq: Tensor, xk: Tensor, tables: RotaryTables) -> tuple[Tensor, Tensor]:
    """Rotate ``xq`` and ``xk`` (patches, heads, head_dim) in float32; elements half a head apart form a pair.

    ``tables`` are (2, 1, patches, 1, head_dim).
    """
    cos, sin = tables.cos_sin("half").squeeze(1)  # (patches, 1, head_dim)

    def rotated(x: Tensor) -> Tensor:
        wide = x.to(torch.promote_types(x.dtype, torch.float32))
        a, b = wide.chunk(2, dim=-1)
        return (wide * cos + torch.cat((-b, a), dim=-1) * sin).to(x.dtype)

    return rotated(xq), rotated(xk)


register_rotation(apply_rotary_vision, HALF_OF_TABLES, tensors=2)
