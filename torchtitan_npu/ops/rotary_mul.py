"""``npu_rotary_mul`` and its gradient: rotary position embedding by cosines and sines.

The kernels compute in float32, or in float64 for float64 input.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import Partial, Placement, Shard

from torchtitan_npu.ops.core.arguments import Call
from torchtitan_npu.ops.core.autograd import Autograd
from torchtitan_npu.ops.core.checks import FLOATS, NPU_FLOATS, check_alike, check_dtype
from torchtitan_npu.ops.core.dtypes import upcast
from torchtitan_npu.ops.core.op import Limit, declare
from torchtitan_npu.ops.core.sharding import Strategy


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
) -> tuple[Tensor, ...]:
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
    results = (input, dx), (r1, dr1), (r2, dr2)
    return tuple(torch.empty_like(like, dtype=input.dtype).copy_(grad) for like, grad in results)


def checks(call: Call) -> Iterator[str]:
    if call.rotary_mode not in ("half", "interleave"):
        yield f"rotary_mode must be half or interleave, not {call.rotary_mode!r}"
    x, rotate = call.input, call.rotate
    for name, tensor in (("input", x), ("r1", call.r1), ("r2", call.r2), ("rotate", rotate)):
        if tensor is not None:
            yield from check_dtype(name, tensor, *FLOATS)
    if x.dim() != 4:
        yield f"input must have 4 dimensions (BNSD, BSND or SBND), not {x.dim()}"
    if x.shape[-1] % 2:
        yield f"input must have an even last dimension, not {x.shape[-1]}"
    for name, r in (("r1", call.r1), ("r2", call.r2)):
        if (
            r.dim() != 4
            or r.shape[-1] != x.shape[-1]
            or any(size not in (1, full) for size, full in zip(r.shape[:-1], x.shape[:-1], strict=True))
        ):
            yield (
                f"{name} must have the shape of input {tuple(x.shape)}, or 1 in place of its batch, sequence or "
                f"heads, not {tuple(r.shape)}"
            )
    if call.r1.shape != call.r2.shape:
        yield f"r2 must have the shape of r1 {tuple(call.r1.shape)}, not {tuple(call.r2.shape)}"
    if rotate is not None and rotate.shape != (x.shape[-1], x.shape[-1]):
        size = x.shape[-1]
        yield f"rotate must have the shape ({size}, {size}) of the last dimension of input, not {tuple(rotate.shape)}"


def sharding(call: Call) -> Iterator[Strategy]:
    for dim in range(call.input.ndim - 1):
        angles: dict[str, Placement] = {} if call.r1.shape[dim] == 1 else {"r1": Shard(dim), "r2": Shard(dim)}
        yield [Shard(dim)], {"input": Shard(dim), **angles}


def save(ctx: Any, output: Tensor, call: Call) -> None:
    ctx.save_for_backward(call.input, call.r1, call.r2)
    ctx.rotary_mode = call.rotary_mode


def backward(npu: Any, ctx: Any, grad: Tensor) -> dict[str, Tensor]:
    # as torch_npu does, even with a matrix ``rotate``: correct only if that is the matrix of rotary_mode
    dx, dr1, dr2 = npu.npu_rotary_mul_backward(grad, *ctx.saved_tensors, ctx.rotary_mode)
    return {"input": dx, "r1": dr1, "r2": dr2}


LAYOUTS = {"BNSD": ("11SD", "B1SD", "BNSD"), "BSND": ("1S1D", "BS1D", "BSND"), "SBND": ("S11D", "SB1D", "SBND")}
"""The shapes of r1 and r2 that an NPU takes with each layout of the input. Mode interleave takes only the first."""
ALLOWED_LAYOUTS = (
    *(f"half: {name}" for names in LAYOUTS.values() for name in names),
    *(f"interleave: {names[0]}" for names in LAYOUTS.values()),
)


def _readings(input: Tensor, r1: Tensor) -> list[tuple[str, int, int]]:
    """Return each interpretation of the shapes as one of ``LAYOUTS``: the layout of ``r1``, batch size, heads."""
    return [
        (name, input.shape[layout.index("B")], input.shape[layout.index("N")])
        for layout, names in LAYOUTS.items()
        for name in names
        if tuple(r1.shape)
        == tuple(1 if letter == "1" else size for letter, size in zip(name, input.shape, strict=True))
    ]


def _layout_of(call: Call) -> str:
    """Return a layout that an NPU takes in this mode, such as ``"half: 1S1D"``, or the mode and shape if none fits."""
    names = [f"{call.rotary_mode}: {name}" for name, _, _ in _readings(call.input, call.r1)]
    return next((name for name in names if name in ALLOWED_LAYOUTS), f"{call.rotary_mode}: {tuple(call.r1.shape)}")


def _batch_or_heads(call: Call) -> int:
    sizes = [(batch, heads) for _, batch, heads in _readings(call.input, call.r1)]
    return min((max(s) if call.rotary_mode == "half" else s[0] * s[1] for s in sizes), default=0)


def _batch_times_heads_of_gradient(call: Call) -> int:
    sizes = [batch * heads for _, batch, heads in _readings(call.input, call.r1)]
    return min(sizes, default=0) if call.r1.requires_grad or call.r2.requires_grad else 0


LIMITS = (
    Limit("input.dtype", lambda call: call.input.dtype, NPU_FLOATS),
    Limit("the last dimension of input", lambda call: call.input.shape[-1], range(896)),
    Limit("the layout of r1 and r2", _layout_of, ALLOWED_LAYOUTS),
    Limit("the larger of B and N (their product in mode interleave)", _batch_or_heads, range(1000)),
    Limit("B * N with gradients for r1 and r2", _batch_times_heads_of_gradient, range(1025)),
)

declare(
    schema='npu::npu_rotary_mul(Tensor input, Tensor r1, Tensor r2, str rotary_mode="half", Tensor? rotate=None) '
    "-> Tensor",
    reference=npu_rotary_mul,
    fake=lambda call: call.input.new_empty(call.input.shape),
    checks=checks,
    sharding=sharding,
    autograd=Autograd(save, backward),
    limits=LIMITS,
)


def backward_checks(call: Call) -> Iterator[str]:
    yield from checks(Call(**vars(call), rotate=None))
    yield from check_alike("grad", call.grad, "input", call.input)


def backward_sharding(call: Call) -> Iterator[Strategy]:
    for dim in range(call.input.ndim - 1):
        sharded: dict[str, Placement] = {"grad": Shard(dim), "input": Shard(dim)}
        if call.r1.shape[dim] == 1:  # r1 was broadcast: each rank sums over its part
            yield [Shard(dim), Partial(), Partial()], sharded
        else:
            yield [Shard(dim), Shard(dim), Shard(dim)], {**sharded, "r1": Shard(dim), "r2": Shard(dim)}


declare(
    schema="npu::npu_rotary_mul_backward(Tensor grad, Tensor input, Tensor r1, Tensor r2, "
    'str rotary_mode="half") -> (Tensor, Tensor, Tensor)',
    reference=npu_rotary_mul_backward,
    fake=lambda call: tuple(torch.empty_like(x, dtype=call.input.dtype) for x in (call.input, call.r1, call.r2)),
    checks=backward_checks,
    sharding=backward_sharding,
    limits=LIMITS[:4],
)
