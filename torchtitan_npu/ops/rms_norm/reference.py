"""RMS normalisation and its gradient in plain PyTorch."""

from __future__ import annotations

import torch
from torch import Tensor


def npu_rms_norm(input: Tensor, gamma: Tensor, epsilon: float) -> tuple[Tensor, Tensor]:
    r"""Normalise the trailing dimensions of ``input``, as many as ``gamma`` has, by their root mean square.

    .. math:: r = \frac{1}{\sqrt{\mathrm{mean}(x^2) + \epsilon}}, \qquad y = x \, r \, \gamma

    ``input`` (..., \*N), ``gamma`` (\*N). Returns ``y`` (..., \*N) in the dtype of ``input``, and ``rstd`` :math:`r`
    (..., 1 for each dimension of N) in float32. Computes in float32, or in float64 for float64 input.
    """
    x, gain = _upcast(input, gamma)
    normalised = tuple(range(input.dim() - gamma.dim(), input.dim()))
    rstd = (x.square().mean(normalised, keepdim=True) + epsilon).rsqrt()
    return torch.empty_like(input).copy_(x * rstd * gain), rstd


def npu_rms_norm_backward(dy: Tensor, input: Tensor, gamma: Tensor, rstd: Tensor) -> tuple[Tensor, Tensor]:
    r"""Return the gradients of :func:`npu_rms_norm`'s ``y`` with respect to ``input`` and ``gamma``.

    With :math:`\hat{x} = x r` and :math:`g = \gamma \, dy`:

    .. math:: dx = r \, (g - \hat{x} \, \mathrm{mean}(g \hat{x})), \qquad d\gamma = \sum_{tokens} dy \, \hat{x}

    ``dy`` and ``input`` (..., \*N), ``gamma`` (\*N), ``rstd`` (..., 1 for each dimension of N). Returns ``dx``
    (..., \*N) in the dtype of ``input``, and ``dgamma`` (\*N) in float32, or in float64 for float64 input.
    """
    x, gain, dy = _upcast(input, gamma, dy)
    tokens = tuple(range(input.dim() - gamma.dim()))
    normalised = tuple(range(input.dim() - gamma.dim(), input.dim()))
    x_hat = x * rstd
    g = dy * gain
    dx = rstd * (g - x_hat * (g * x_hat).mean(normalised, keepdim=True))
    dgamma = (dy * x_hat).sum(tokens) if tokens else dy * x_hat  # sum(()) would sum over every dimension
    return torch.empty_like(input).copy_(dx), torch.empty_like(gamma, dtype=dgamma.dtype).copy_(dgamma)


def npu_add_rms_norm(x1: Tensor, x2: Tensor, gamma: Tensor, epsilon: float) -> tuple[Tensor, Tensor, Tensor]:
    r"""Normalise the sum ``x = x1 + x2`` as :func:`npu_rms_norm` does.

    .. math:: x = x_1 + x_2, \qquad y = \frac{x \, \gamma}{\sqrt{\mathrm{mean}(x^2) + \epsilon}}

    The sum is rounded to its dtype before it is normalised, as a separate addition would round it.
    ``x1`` and ``x2`` (..., \*N), ``gamma`` (\*N). Returns ``y``, ``rstd`` and ``x``.
    """
    x = torch.empty_like(x1).copy_(x1 + x2)
    y, rstd = npu_rms_norm(x, gamma, epsilon)
    return y, rstd, x


def _upcast(*tensors: Tensor) -> tuple[Tensor, ...]:
    return tuple(tensor if tensor.dtype == torch.float64 else tensor.float() for tensor in tensors)
