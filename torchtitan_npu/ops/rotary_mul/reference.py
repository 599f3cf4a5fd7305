"""Rotary position embedding and its gradient in plain PyTorch.

Every op here is ``x * cos + turn(x) * sin``; they differ in which two channels of a head form a pair, and in where
the cosines and sines come from. Computed in float32, or in float64 where the input is.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def turn_pairs(x: Tensor, rotary_mode: str) -> Tensor:
    """Turn every pair of channels (a, b) of ``x`` (..., D) by a right angle: (-b, a).

    ``half`` pairs channel i with i + D/2, ``interleave`` 2i with 2i + 1, ``quarter`` does ``half`` in each half of D.
    """
    if rotary_mode == "interleave":
        return torch.stack((-x[..., 1::2], x[..., ::2]), dim=-1).flatten(-2)
    if rotary_mode == "quarter":
        return torch.cat([turn_pairs(half, "half") for half in x.chunk(2, dim=-1)], dim=-1)
    a, b = x.chunk(2, dim=-1)
    return torch.cat((-b, a), dim=-1)


def npu_rotary_mul(input: Tensor, r1: Tensor, r2: Tensor, rotary_mode: str, rotate: Tensor | None) -> Tensor:
    r"""Rotate ``input`` by the angles whose cosines are ``r1`` and sines ``r2``.

    .. math:: y = x \, r_1 + \mathrm{turn}(x) \, r_2

    ``input`` (..., D), ``r1`` and ``r2`` broadcast to it. A matrix ``rotate`` (D, D) makes :math:`x` ``@ rotate`` of
    the second term. ``r1`` and ``r2`` are rounded to the dtype of ``input`` first, as torch_npu does.
    """
    x, cos, sin = _upcast(input, r1.to(input.dtype), r2.to(input.dtype))
    turned = turn_pairs(x, rotary_mode) if rotate is None else x @ rotate.to(x.dtype)
    return (x * cos + turned * sin).to(input.dtype).contiguous()


def npu_rotary_mul_backward(
    grad: Tensor, input: Tensor, r1: Tensor, r2: Tensor, rotary_mode: str
) -> tuple[Tensor, Tensor, Tensor]:
    r"""Gradients of :func:`npu_rotary_mul` with respect to ``input``, ``r1`` and ``r2``.

    A rotation by a right angle is undone by its negative, so

    .. math::
        dx = g \, r_1 - \mathrm{turn}(g \, r_2), \qquad
        dr_1 = \sum g \, x, \qquad dr_2 = \sum g \, \mathrm{turn}(x)

    summed over the dimensions along which ``r1`` was broadcast. ``grad`` and ``input`` (..., D). All three results are
    in the dtype of ``input``.
    """
    g, x, cos, sin = _upcast(grad, input, r1.to(input.dtype), r2.to(input.dtype))
    dx = g * cos - turn_pairs(g * sin, rotary_mode)
    dr1, dr2 = (g * x).sum_to_size(r1.shape), (g * turn_pairs(x, rotary_mode)).sum_to_size(r2.shape)
    return (
        torch.empty_like(input).copy_(dx),
        torch.empty_like(r1, dtype=input.dtype).copy_(dr1),
        torch.empty_like(r2, dtype=input.dtype).copy_(dr2),
    )


def npu_interleave_rope(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate ``x`` (B, N, S, D), whose pairs are neighbours, and leave the result with its pairs half of D apart.

    The channels (a0, b0, a1, b1, ...) become (a0, a1, ..., b0, b1, ...), and that is rotated as ``half`` does:
    DeepSeek's rotary embedding. ``cos`` and ``sin`` (B, 1, S or 1, D).
    """
    apart = torch.cat((x[..., ::2], x[..., 1::2]), dim=-1)
    return torch.empty_like(x).copy_(_apply(apart, cos, sin, "half"))


def npu_apply_rotary_pos_emb(
    query: Tensor, key: Tensor, cos: Tensor, sin: Tensor, layout: str, rotary_mode: str
) -> tuple[Tensor, Tensor]:
    """Rotate ``query`` and ``key`` by the same angles: ``x * cos + turn(x) * sin``.

    ``query`` and ``key`` in ``layout`` (BSND, SBND, BNSD or TND), ``cos`` and ``sin`` alike with one head.
    """
    return (
        torch.empty_like(query).copy_(_apply(query, cos, sin, rotary_mode)),
        torch.empty_like(key).copy_(_apply(key, cos, sin, rotary_mode)),
    )


def npu_mrope(
    positions: Tensor,
    query: Tensor,
    key: Tensor,
    cos_sin_cache: Tensor,
    head_size: int,
    mrope_section: Sequence[int] | None,
    rotary_mode: str | None,
    cache_mode: str | None,
) -> tuple[Tensor, Tensor]:
    """Rotate the first ``rotary_dim`` channels of each head of ``query`` and ``key`` by the angles of their positions.

    ``query`` and ``key`` (T, heads * head_size); ``cos_sin_cache`` (max_position, rotary_dim), each row the cosines
    and then the sines of ``rotary_dim / 2`` angles. ``positions`` (T,), or (A, T) with a position on each of A = 3 or
    4 axes (time, height, width): then ``mrope_section`` and ``cache_mode`` say which axis a channel's angle follows,
    see :func:`axis_of_channels`. ``rotary_mode`` says which channels form a pair, see :func:`turn_pairs`.
    """
    rotary_mode = rotary_mode or "half"
    pairs = cos_sin_cache.shape[1] // 2
    angles = cos_sin_cache.index_select(0, positions.flatten()).view(*positions.shape, 2 * pairs)
    if positions.dim() == 2:
        axis = axis_of_channels(mrope_section or (), pairs, cache_mode or "default").to(positions.device)
        angles = angles.gather(0, axis.repeat(2).expand(1, *angles.shape[1:]))[0]
    cos, sin = angles.chunk(2, dim=-1)
    # each angle serves both channels of its pair
    both = (lambda t: t.repeat_interleave(2, -1)) if rotary_mode == "interleave" else (lambda t: t.repeat(1, 2))
    cos, sin = both(cos).unsqueeze(1), both(sin).unsqueeze(1)  # (T, 1, rotary_dim)

    def of_heads(x: Tensor) -> Tensor:
        heads = x.reshape(x.shape[0], x.shape[1] // head_size, head_size)
        turned, passed = heads[..., : 2 * pairs], heads[..., 2 * pairs :]
        turned = _apply(turned, cos, sin, rotary_mode).to(x.dtype)
        return torch.empty_like(x).copy_(torch.cat((turned, passed), dim=-1).flatten(1))

    return of_heads(query), of_heads(key)


def axis_of_channels(mrope_section: Sequence[int], pairs: int, cache_mode: str) -> Tensor:
    """The axis of ``positions`` that each of the ``pairs`` angles follows, (pairs,) int64.

    ``default``: the first ``mrope_section[0]`` follow axis 0, the next ``mrope_section[1]`` axis 1, and so on
    (Qwen2.5-VL). ``interleave``: time, height, width, time, ... as long as an axis has channels left, then time
    (Qwen3-VL).
    """
    if cache_mode == "default":
        return torch.arange(len(mrope_section)).repeat_interleave(torch.tensor(mrope_section))
    axis = torch.zeros(pairs, dtype=torch.int64)
    for number in (1, 2):
        axis[number : 3 * mrope_section[number] : 3] = number
    return axis


def _apply(x: Tensor, cos: Tensor, sin: Tensor, rotary_mode: str) -> Tensor:
    x, cos, sin = _upcast(x, cos, sin)
    return x * cos + turn_pairs(x, rotary_mode) * sin


def _upcast(*tensors: Tensor) -> tuple[Tensor, ...]:
    return tuple(tensor if tensor.dtype == torch.float64 else tensor.float() for tensor in tensors)
