"""``npu_rms_norm``, ``npu_rms_norm_backward`` and ``npu_add_rms_norm``: root mean square normalisation."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import Partial, Replicate, Shard

from torchtitan_npu.ops.core.arguments import Call
from torchtitan_npu.ops.core.autograd import Autograd, not_implemented
from torchtitan_npu.ops.core.checks import FLOATS, MAX_DIMS, NPU_FLOATS, check_alike, check_dtype, check_is
from torchtitan_npu.ops.core.dtypes import compute_dtype, upcast
from torchtitan_npu.ops.core.op import Limit, declare
from torchtitan_npu.ops.core.sharding import Strategy, shard_alike


def npu_rms_norm(input: Tensor, gamma: Tensor, epsilon: float) -> tuple[Tensor, Tensor]:
    r"""Normalise the trailing dimensions of ``input``, as many as ``gamma`` has, by their root mean square.

    .. math:: r = \frac{1}{\sqrt{\mathrm{mean}(x^2) + \epsilon}}, \qquad y = x \, r \, \gamma

    ``input`` (..., \*N), ``gamma`` (\*N). Returns ``y`` (..., \*N) in the dtype of ``input``, and ``rstd`` :math:`r`
    (..., 1 for each dimension of N) in float32. Computes in float32, or in float64 for float64 input.
    """
    x, gain = upcast(input, gamma)
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
    x, gain, dy = upcast(input, gamma, dy)
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


def _rstd_shape(input: Tensor, gamma: Tensor) -> list[int]:
    return [*input.shape[: input.dim() - gamma.dim()], *([1] * gamma.dim())]


def _check_normalised(name: str, x: Tensor, gamma: Tensor) -> Iterator[str]:
    yield from check_dtype(name, x, *FLOATS)
    if x.dim() > MAX_DIMS:
        yield f"{name} must have at most {MAX_DIMS} dimensions, not {x.dim()}"
    if gamma.dtype != x.dtype:
        yield f"gamma must have the dtype of {name}, {x.dtype}, not {gamma.dtype}"
    if not 1 <= gamma.dim() <= x.dim() or gamma.shape != x.shape[x.dim() - gamma.dim() :]:
        yield f"gamma must have the trailing shape of {name} {tuple(x.shape)}, not {tuple(gamma.shape)}"


def checks(call: Call) -> Iterator[str]:
    yield from _check_normalised("input", call.input, call.gamma)


def fake(call: Call) -> tuple[Tensor, Tensor]:
    rstd = call.input.new_empty(_rstd_shape(call.input, call.gamma), dtype=compute_dtype(call.input))
    return torch.empty_like(call.input), rstd


def save(ctx: Any, output: tuple[Tensor, Tensor], call: Call) -> None:
    rstd = output[1]
    ctx.save_for_backward(call.input, call.gamma, rstd)
    ctx.mark_non_differentiable(rstd)


def backward(npu: Any, ctx: Any, dy: Tensor, _: None) -> dict[str, Tensor]:
    dx, dgamma = npu.npu_rms_norm_backward(dy, *ctx.saved_tensors)
    return {"input": dx, "gamma": dgamma}


LIMITS = (
    Limit("input.dtype", lambda call: call.input.dtype, NPU_FLOATS),
    Limit("the number of dimensions of input", lambda call: call.input.dim(), range(2, MAX_DIMS + 1)),
)

declare(
    schema="npu::npu_rms_norm(Tensor input, Tensor gamma, float epsilon=9.9999999999999995e-07) -> (Tensor, Tensor)",
    reference=npu_rms_norm,
    fake=fake,
    checks=checks,
    sharding=lambda call: shard_alike(range(call.input.ndim - call.gamma.ndim), 2, "input"),
    autograd=Autograd(save, backward),
    limits=LIMITS,
)


def backward_checks(call: Call) -> Iterator[str]:
    yield from checks(call)
    yield from check_alike("dy", call.dy, "input", call.input)
    yield from check_is("rstd", call.rstd, compute_dtype(call.input), _rstd_shape(call.input, call.gamma))


def backward_sharding(call: Call) -> Iterator[Strategy]:
    for dim in range(call.input.ndim - call.gamma.ndim):
        # each rank sums the gradient of gamma over its tokens
        yield [Shard(dim), Partial()], {"dy": Shard(dim), "input": Shard(dim), "gamma": Replicate(), "rstd": Shard(dim)}


declare(
    schema="npu::npu_rms_norm_backward(Tensor dy, Tensor input, Tensor gamma, Tensor rstd) -> (Tensor, Tensor)",
    reference=npu_rms_norm_backward,
    fake=lambda call: (torch.empty_like(call.input), torch.empty_like(call.gamma, dtype=compute_dtype(call.input))),
    checks=backward_checks,
    sharding=backward_sharding,
    limits=LIMITS,
)


def add_checks(call: Call) -> Iterator[str]:
    yield from _check_normalised("x1", call.x1, call.gamma)
    yield from check_alike("x2", call.x2, "x1", call.x1)


declare(
    schema="npu::npu_add_rms_norm(Tensor x1, Tensor x2, Tensor gamma, float epsilon=9.9999999999999995e-07) "
    "-> (Tensor, Tensor, Tensor)",
    reference=npu_add_rms_norm,
    fake=lambda call: (*fake(Call(input=call.x1, gamma=call.gamma)), torch.empty_like(call.x1)),
    checks=add_checks,
    sharding=lambda call: shard_alike(range(call.x1.ndim - call.gamma.ndim), 3, "x1", "x2"),
    autograd=not_implemented("npu_add_rms_norm"),
    limits=(
        Limit("x1.dtype", lambda call: call.x1.dtype, NPU_FLOATS),
        Limit("the number of dimensions of x1", lambda call: call.x1.dim(), range(1, MAX_DIMS + 1)),
    ),
)
