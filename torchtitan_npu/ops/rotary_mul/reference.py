"""Rotary position embedding and its gradient in plain PyTorch. Computes in float32, or in float64 for float64 input."""

from __future__ import annotations

import torch
from torch import Tensor


def rotate_pairs(x: Tensor, rotary_mode: str) -> Tensor:
    """Rotate every pair of channels (a, b) of ``x`` (..., D) by a right angle, to (-b, a).

    ``half`` pairs channel i with i + D/2, ``interleave`` pairs 2i with 2i + 1.
    """
    if rotary_mode == "interleave":
        return torch.stack((-x[..., 1::2], x[..., ::2]), dim=-1).flatten(-2)
    a, b = x.chunk(2, dim=-1)
    return torch.cat((-b, a), dim=-1)


def npu_rotary_mul(input: Tensor, r1: Tensor, r2: Tensor, rotary_mode: str, rotate: Tensor | None) -> Tensor:
    r"""Rotate ``input`` by the angles whose cosines are ``r1`` and whose sines are ``r2``.

    .. math:: y = x \, r_1 + \mathrm{rotate\_pairs}(x) \, r_2

    ``input`` (..., D); ``r1`` and ``r2`` broadcast to it. With a matrix ``rotate`` (D, D), the second term is
    :math:`(x \, \mathrm{rotate}) \, r_2`. As in torch_npu, ``r1`` and ``r2`` are first rounded to the dtype
    of ``input``.
    """
    x, cos, sin = upcast(input, r1.to(input.dtype), r2.to(input.dtype))
    rotated = rotate_pairs(x, rotary_mode) if rotate is None else x @ rotate.to(x.dtype)
    return (x * cos + rotated * sin).to(input.dtype).contiguous()


def npu_rotary_mul_backward(
    grad: Tensor, input: Tensor, r1: Tensor, r2: Tensor, rotary_mode: str
) -> tuple[Tensor, Tensor, Tensor]:
    r"""Return the gradients of :func:`npu_rotary_mul` with respect to ``input``, ``r1`` and ``r2``.

    The transpose of a rotation by a right angle is its negative, so

    .. math::
        dx = g \, r_1 - \mathrm{rotate\_pairs}(g \, r_2), \qquad
        dr_1 = \sum g \, x, \qquad dr_2 = \sum g \, \mathrm{rotate\_pairs}(x)

    summed over the dimensions along which ``r1`` was broadcast. ``grad`` and ``input`` (..., D). All three results have
    the dtype of ``input``.
    """
    g, x, cos, sin = upcast(grad, input, r1.to(input.dtype), r2.to(input.dtype))
    dx = g * cos - rotate_pairs(g * sin, rotary_mode)
    dr1, dr2 = (g * x).sum_to_size(r1.shape), (g * rotate_pairs(x, rotary_mode)).sum_to_size(r2.shape)
    return (
        torch.empty_like(input).copy_(dx),
        torch.empty_like(r1, dtype=input.dtype).copy_(dr1),
        torch.empty_like(r2, dtype=input.dtype).copy_(dr2),
    )


def upcast(*tensors: Tensor) -> tuple[Tensor, ...]:
    """Return the tensors in the dtype to compute in."""
    return tuple(tensor if tensor.dtype == torch.float64 else tensor.float() for tensor in tensors)
