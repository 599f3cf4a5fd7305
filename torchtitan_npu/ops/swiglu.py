"""``npu_swiglu`` and ``npu_swiglu_backward``: one half of the input gates the other through SiLU."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from torchtitan_npu.ops.core.arguments import Call
from torchtitan_npu.ops.core.autograd import Autograd
from torchtitan_npu.ops.core.checks import FLOATS, MAX_DIMS, NPU_FLOATS, check_dtype, check_is
from torchtitan_npu.ops.core.dtypes import upcast
from torchtitan_npu.ops.core.op import Limit, declare
from torchtitan_npu.ops.core.sharding import shard_alike


def npu_swiglu(input: Tensor, dim: int) -> Tensor:
    r"""Gate one half of ``input``, along ``dim``, by the other.

    .. math:: y = a \, \sigma(a) \, b, \qquad (a, b) = \mathrm{halves}(x)

    ``input`` (..., 2N, ...); returns (..., N, ...) in its dtype. Computes in float32, or in float64 for float64 input.
    """
    (x,) = upcast(input)
    a, b = x.chunk(2, dim)
    return (a * a.sigmoid() * b).to(input.dtype).contiguous()


def npu_swiglu_backward(grad_output: Tensor, input: Tensor, dim: int) -> Tensor:
    r"""Return the gradient of :func:`npu_swiglu` with respect to ``input``.

    .. math:: da = g \, b \, \sigma(a) \, (1 + a \, (1 - \sigma(a))), \qquad db = g \, a \, \sigma(a)

    ``grad_output`` (..., N, ...), ``input`` (..., 2N, ...); returns (..., 2N, ...).
    """
    g, x = upcast(grad_output, input)
    a, b = x.chunk(2, dim)
    s = a.sigmoid()
    return torch.empty_like(input).copy_(torch.cat((g * b * s * (1 + a * (1 - s)), g * a * s), dim))


def _halved(call: Call) -> list[int]:
    """Return the shape of the input with half of ``dim``."""
    shape = list(call.input.shape)
    shape[call.dim] //= 2
    return shape


def checks(call: Call) -> Iterator[str]:
    yield from check_dtype("input", call.input, *FLOATS)
    if not 1 <= call.input.dim() <= MAX_DIMS:
        yield f"input must have 1 to {MAX_DIMS} dimensions, not {call.input.dim()}"
    if not -call.input.dim() <= call.dim < call.input.dim():
        yield f"dim must be one of the {call.input.dim()} dimensions of input, not {call.dim}"
    if call.input.shape[call.dim] % 2:
        yield f"input must have an even size along dim {call.dim}, not {call.input.shape[call.dim]}"


def _other_dims(call: Call) -> list[int]:
    return [dim for dim in range(call.input.ndim) if dim != call.dim % call.input.ndim]


def save(ctx: Any, output: Tensor, call: Call) -> None:
    ctx.save_for_backward(call.input)
    ctx.dim = call.dim


def backward(npu: Any, ctx: Any, grad_output: Tensor) -> dict[str, Tensor]:
    return {"input": npu.npu_swiglu_backward(grad_output, *ctx.saved_tensors, ctx.dim)}


LIMITS = (
    Limit("input.dtype", lambda call: call.input.dtype, NPU_FLOATS),
    Limit("the number of dimensions of input", lambda call: call.input.dim(), range(1, MAX_DIMS + 1)),
)

declare(
    schema="npu::npu_swiglu(Tensor input, int dim=-1) -> Tensor",
    reference=npu_swiglu,
    fake=lambda call: call.input.new_empty(_halved(call)),
    checks=checks,
    sharding=lambda call: shard_alike(_other_dims(call), 1, "input"),
    autograd=Autograd(save, backward),
    limits=LIMITS,
)


def backward_checks(call: Call) -> Iterator[str]:
    yield from checks(call)
    why = f"input halved along dim {call.dim}"
    yield from check_is("grad_output", call.grad_output, call.input.dtype, _halved(call), why)


declare(
    schema="npu::npu_swiglu_backward(Tensor grad_output, Tensor input, int dim=-1) -> Tensor",
    reference=npu_swiglu_backward,
    fake=lambda call: torch.empty_like(call.input),
    checks=backward_checks,
    sharding=lambda call: shard_alike(_other_dims(call), 1, "grad_output", "input"),
    limits=LIMITS,
)
