"""``npu_mrope`` with gradients: torch_npu has none for it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from torchtitan_npu.errors import UsageError


def mrope(
    positions: Tensor,
    query: Tensor,
    key: Tensor,
    cos_sin_cache: Tensor,
    head_size: int,
    *,
    mrope_section: Sequence[int] | None = None,
    rotary_mode: str = "half",
    cache_mode: str = "default",
) -> tuple[Tensor, Tensor]:
    """``torch.ops.npu.npu_mrope``, with gradients for ``query`` and ``key``.

    ``positions`` (T,) or (3 or 4, T), ``query`` and ``key`` (T, heads * head_size), ``cos_sin_cache`` (max_position,
    rotary_dim), all three of one dtype. Returns the rotated query and key, shaped as they came.
    """
    if cos_sin_cache.requires_grad:
        raise UsageError("mrope: cos_sin_cache has no gradient; detach it")
    return _MRope.apply(positions, query, key, cos_sin_cache, head_size, mrope_section, rotary_mode, cache_mode)


class _MRope(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, positions: Tensor, query: Tensor, key: Tensor, cos_sin_cache: Tensor, head_size: int, *modes: Any
    ) -> tuple[Tensor, Tensor]:
        ctx.save_for_backward(positions, cos_sin_cache)
        ctx.head_size, ctx.modes = head_size, modes
        ctx.set_materialize_grads(False)  # zeros would be plain tensors where query and key are DTensors
        mrope_section, rotary_mode, cache_mode = modes
        return torch.ops.npu.npu_mrope(
            positions,
            query,
            key,
            cos_sin_cache,
            head_size,
            mrope_section=mrope_section,
            rotary_mode=rotary_mode,
            cache_mode=cache_mode,
        )

    @staticmethod
    def backward(ctx: Any, *output_grads: Tensor | None) -> tuple[Tensor | None, ...]:
        used = [grad for grad in output_grads if grad is not None]
        if not used:
            return (None,) * 8
        # the transpose of a rotation is the rotation the other way: the same op with the sines negated
        positions, cos_sin_cache = ctx.saved_tensors
        cos, sin = cos_sin_cache.chunk(2, dim=-1)
        back = torch.cat((cos, -sin), dim=-1)
        # the op wants two: where the loss used only one of query and key, its gradient goes in twice
        turned = _MRope.apply(positions, used[0], used[-1], back, ctx.head_size, *ctx.modes)
        grads = (new if old is not None else None for new, old in zip(turned, output_grads, strict=True))
        return None, *grads, None, None, None, None, None
