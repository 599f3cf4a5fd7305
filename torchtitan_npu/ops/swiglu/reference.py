"""The gated activation SwiGLU and its gradient in plain PyTorch."""

from __future__ import annotations

import torch
from torch import Tensor


def npu_swiglu(input: Tensor, dim: int) -> Tensor:
    r"""Gate one half of ``input``, along ``dim``, by the other.

    .. math:: y = a \, \sigma(a) \, b, \qquad (a, b) = \mathrm{halves}(x)

    ``input`` (..., 2N, ...); returns (..., N, ...) in its dtype. Computes in float32, or in float64 for float64 input.
    """
    a, b = _upcast(input).chunk(2, dim)
    return (a * a.sigmoid() * b).to(input.dtype).contiguous()


def npu_swiglu_backward(grad_output: Tensor, input: Tensor, dim: int) -> Tensor:
    r"""Return the gradient of :func:`npu_swiglu` with respect to ``input``.

    .. math:: da = g \, b \, \sigma(a) \, (1 + a \, (1 - \sigma(a))), \qquad db = g \, a \, \sigma(a)

    ``grad_output`` (..., N, ...), ``input`` (..., 2N, ...); returns (..., 2N, ...).
    """
    g = _upcast(grad_output)
    a, b = _upcast(input).chunk(2, dim)
    s = a.sigmoid()
    return torch.empty_like(input).copy_(torch.cat((g * b * s * (1 + a * (1 - s)), g * a * s), dim))


def _upcast(x: Tensor) -> Tensor:
    return x if x.dtype == torch.float64 else x.float()
