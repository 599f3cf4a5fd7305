"""``npu_mrope`` with gradients, which torch_npu does not have."""

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
    """Call ``torch.ops.npu.npu_mrope`` with gradients for ``query`` and ``key``.

    ``positions`` (T,) or (3 or 4, T), ``query`` and ``key`` (T, heads * head_size), ``cos_sin_cache`` (max_position,
    rotary_dim), all three of one dtype. Returns the rotated query and key, with the shapes of ``query`` and ``key``.
    """
    if cos_sin_cache.requires_grad:
        raise UsageError("mrope: cos_sin_cache has no gradient; detach it")
    options = {"mrope_section": mrope_section, "rotary_mode": rotary_mode, "cache_mode": cache_mode}
    return _MRope.apply(positions, query, key, cos_sin_cache, head_size, options)


class _MRope(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        positions: Tensor,
        query: Tensor,
        key: Tensor,
        cos_sin_cache: Tensor,
        head_size: int,
        options: dict[str, Any],
    ) -> tuple[Tensor, Tensor]:
        ctx.save_for_backward(positions, cos_sin_cache)
        ctx.head_size, ctx.options = head_size, options
        ctx.set_materialize_grads(False)  # zeros would be plain tensors even if query and key are DTensors
        return torch.ops.npu.npu_mrope(positions, query, key, cos_sin_cache, head_size, **options)

    @staticmethod
    def backward(ctx: Any, *output_grads: Tensor | None) -> tuple[Tensor | None, ...]:
        used = [grad for grad in output_grads if grad is not None]
        if not used:
            return (None,) * 6
        # the transpose of a rotation is the rotation by the negative angle: the same operator with the sines negated
        positions, cos_sin_cache = ctx.saved_tensors
        cos, sin = cos_sin_cache.chunk(2, dim=-1)
        inverse = torch.cat((cos, -sin), dim=-1)
        # the operator takes two tensors: if only one of query and key has a gradient, pass that one twice
        rotated = _MRope.apply(positions, used[0], used[-1], inverse, ctx.head_size, ctx.options)
        grads = (new if old is not None else None for new, old in zip(rotated, output_grads, strict=True))
        return None, *grads, None, None, None
