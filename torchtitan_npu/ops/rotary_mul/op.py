"""``npu_rotary_mul`` and ``npu_rotary_mul_backward``: rotary position embedding with given cosines and sines."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import Partial, Placement, Shard

from torchtitan_npu.ops.core.autograd import Autograd
from torchtitan_npu.ops.core.call_description import TensorDescription
from torchtitan_npu.ops.core.checks import FLOATS, NPU_FLOATS, check_alike, check_dtype
from torchtitan_npu.ops.core.op import Limit, Op, declare
from torchtitan_npu.ops.core.samples import BATCH, HEAD_SIZE, TOKENS, randn_like
from torchtitan_npu.ops.core.sharding import Strategy
from torchtitan_npu.ops.core.triton_kernel import kernel
from torchtitan_npu.ops.rotary_mul import reference

MODES = ("half", "interleave")


def checks(
    input: Tensor, r1: Tensor, r2: Tensor, rotary_mode: str, rotate: Tensor | None = None, **_: Any
) -> Iterator[str]:
    if rotary_mode not in MODES:
        yield f"rotary_mode must be half or interleave, not {rotary_mode!r}"
    for name, tensor in (("input", input), ("r1", r1), ("r2", r2), ("rotate", rotate)):
        if tensor is not None:
            yield from check_dtype(name, tensor, *FLOATS)
    if input.dim() != 4:
        yield f"input must have 4 dimensions (BNSD, BSND or SBND), not {input.dim()}"
    if input.shape[-1] % 2:
        yield f"input must have an even last dimension, not {input.shape[-1]}"
    for name, r in (("r1", r1), ("r2", r2)):
        if (
            r.dim() != 4
            or r.shape[-1] != input.shape[-1]
            or any(size not in (1, full) for size, full in zip(r.shape[:-1], input.shape[:-1], strict=True))
        ):
            yield (
                f"{name} must have the shape of input {tuple(input.shape)}, or 1 in place of its batch, sequence or "
                f"heads, not {tuple(r.shape)}"
            )
    if r1.shape != r2.shape:
        yield f"r2 must have the shape of r1 {tuple(r1.shape)}, not {tuple(r2.shape)}"
    if rotate is not None and rotate.shape != (input.shape[-1], input.shape[-1]):
        size = input.shape[-1]
        yield f"rotate must have the shape ({size}, {size}) of the last dimension of input, not {tuple(rotate.shape)}"


def fake(input: Tensor, **_: Any) -> Tensor:
    return input.new_empty(input.shape)


def sharding(input: Any, r1: Any, **_: Any) -> Iterator[Strategy]:
    for dim in range(input.ndim - 1):
        angles: dict[str, Placement] = {} if r1.shape[dim] == 1 else {"r1": Shard(dim), "r2": Shard(dim)}
        yield [Shard(dim)], {"input": Shard(dim), **angles}


def save(ctx: Any, output: Tensor, input: Tensor, r1: Tensor, r2: Tensor, rotary_mode: str, **_: Any) -> None:
    ctx.save_for_backward(input, r1, r2)
    ctx.rotary_mode = rotary_mode


def backward(npu: Any, ctx: Any, grad: Tensor) -> dict[str, Tensor]:
    # as torch_npu does, even with a matrix ``rotate``: correct only if that is the matrix of rotary_mode
    dx, dr1, dr2 = npu.npu_rotary_mul_backward(grad, *ctx.saved_tensors, ctx.rotary_mode)
    return {"input": dx, "r1": dr1, "r2": dr2}


fused = kernel(reference.npu_rotary_mul)


def cuda(rotate: Tensor | None, **arguments: Any) -> Tensor:
    """Run the Triton kernel, or the reference for a matrix ``rotate``, which the Triton kernel does not have."""
    return (fused if rotate is None else reference.npu_rotary_mul)(rotate=rotate, **arguments)


LAYOUTS = {
    "BNSD": ("11SD", "B1SD", "BNSD"),
    "BSND": ("1S1D", "BS1D", "BSND"),
    "SBND": ("S11D", "SB1D", "SBND"),
}
"""The shapes of r1 and r2 that an NPU takes with each layout of the input. Mode interleave takes only the first."""


def _readings(input: Tensor, r1: Tensor) -> list[tuple[str, int, int]]:
    """Return each interpretation of the shapes as one of ``LAYOUTS``: the layout of ``r1``, batch size, heads."""
    return [
        (name, input.shape[layout.index("B")], input.shape[layout.index("N")])
        for layout, names in LAYOUTS.items()
        for name in names
        if all(
            size == (1 if letter == "1" else full)
            for letter, size, full in zip(name, r1.shape, input.shape, strict=True)
        )
    ]


def _layout_of(r1: Tensor, input: Tensor, rotary_mode: str, **_: Any) -> str:
    """Return a layout that an NPU takes in this mode, such as ``"half: 1S1D"``, or the mode and shape if none fits."""
    names = [f"{rotary_mode}: {name}" for name, _, _ in _readings(input, r1)]
    return next((name for name in names if name in ALLOWED_LAYOUTS), f"{rotary_mode}: {tuple(r1.shape)}")


ALLOWED_LAYOUTS = (
    *(f"half: {name}" for names in LAYOUTS.values() for name in names),
    *(f"interleave: {names[0]}" for names in LAYOUTS.values()),
)


def _batch_or_heads(input: Tensor, r1: Tensor, rotary_mode: str, **_: Any) -> int:
    sizes = [(batch, heads) for _, batch, heads in _readings(input, r1)]
    return min((max(s) if rotary_mode == "half" else s[0] * s[1] for s in sizes), default=0)


def _batch_times_heads_of_gradient(input: Tensor, r1: Tensor, r2: Tensor, **_: Any) -> int:
    sizes = [batch * heads for _, batch, heads in _readings(input, r1)]
    return min(sizes, default=0) if r1.requires_grad or r2.requires_grad else 0


def sample(input: TensorDescription = BATCH, **_: Any) -> dict[str, Any]:
    cos, sin = angles(TOKENS, HEAD_SIZE, input.dtype)
    return {"input": randn_like(input, HEAD_SIZE), "r1": cos[None, :, None], "r2": sin[None, :, None]}


def backward_sample(input: TensorDescription = BATCH, **_: Any) -> dict[str, Any]:
    return {"grad": randn_like(input, HEAD_SIZE), **sample(input)}


def angles(positions: int, size: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return the cosines and sines of ``positions`` for a head of ``size`` channels, (positions, size) each."""
    frequencies = 10000 ** -torch.linspace(0, 1, size // 2)
    table = torch.outer(torch.arange(positions), frequencies).repeat(1, 2)
    return table.cos().to(dtype), table.sin().to(dtype)


LIMITS = (
    Limit("input.dtype", lambda input, **_: input.dtype, NPU_FLOATS),
    Limit("the last dimension of input", lambda input, **_: input.shape[-1], range(896)),
    Limit("the layout of r1 and r2", _layout_of, ALLOWED_LAYOUTS),
    Limit("the larger of B and N (their product in mode interleave)", _batch_or_heads, range(1000)),
    Limit("B * N with gradients for r1 and r2", _batch_times_heads_of_gradient, range(1025)),
)

declare(
    Op(
        schema='npu::npu_rotary_mul(Tensor input, Tensor r1, Tensor r2, str rotary_mode="half", Tensor? rotate=None) '
        "-> Tensor",
        reference=reference.npu_rotary_mul,
        cuda=cuda,
        fake=fake,
        checks=checks,
        sharding=sharding,
        autograd=Autograd(save, backward),
        limits=LIMITS,
        sample=sample,
    )
)


def backward_checks(grad: Tensor, input: Tensor, r1: Tensor, r2: Tensor, rotary_mode: str) -> Iterator[str]:
    yield from checks(input, r1, r2, rotary_mode)
    yield from check_alike("grad", grad, "input", input)


def backward_fake(input: Tensor, r1: Tensor, r2: Tensor, **_: Any) -> tuple[Tensor, Tensor, Tensor]:
    return torch.empty_like(input), torch.empty_like(r1, dtype=input.dtype), torch.empty_like(r2, dtype=input.dtype)


def backward_sharding(input: Any, r1: Any, **_: Any) -> Iterator[Strategy]:
    for dim in range(input.ndim - 1):
        sharded: dict[str, Placement] = {"grad": Shard(dim), "input": Shard(dim)}
        if r1.shape[dim] == 1:  # r1 was broadcast: each rank sums over its own part
            yield [Shard(dim), Partial(), Partial()], sharded
        else:
            yield [Shard(dim), Shard(dim), Shard(dim)], {**sharded, "r1": Shard(dim), "r2": Shard(dim)}


declare(
    Op(
        schema="npu::npu_rotary_mul_backward(Tensor grad, Tensor input, Tensor r1, Tensor r2, "
        'str rotary_mode="half") -> (Tensor, Tensor, Tensor)',
        reference=reference.npu_rotary_mul_backward,
        cuda=kernel(reference.npu_rotary_mul_backward),
        fake=backward_fake,
        checks=backward_checks,
        sharding=backward_sharding,
        limits=LIMITS[:4],
        sample=backward_sample,
        unused_outputs=(1, 2),  # the gradients of r1 and r2, which are constants
    )
)
