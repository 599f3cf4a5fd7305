"""``npu_rms_norm`` and ``npu_rms_norm_backward``: root mean square normalisation over trailing dimensions."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import Partial, Placement, Replicate, Shard

from torchtitan_npu.ops.autograd import Autograd
from torchtitan_npu.ops.reference import rms_norm as reference
from torchtitan_npu.ops.vocabulary import Limit, Op, declare

MAX_DIMS = 8  # CANN's kernels take no tensor of more


def _statistics_dtype(input: Tensor) -> torch.dtype:
    """float32, as torch_npu keeps it; float64 only for float64 input, which the NPU does not take."""
    return torch.float64 if input.dtype == torch.float64 else torch.float32


def _rstd_shape(input: Tensor, gamma: Tensor) -> list[int]:
    return [*input.shape[: input.dim() - gamma.dim()], *([1] * gamma.dim())]


def contract(input: Tensor, gamma: Tensor, **_: Any) -> Iterator[str]:
    if input.dtype not in (torch.float16, torch.bfloat16, torch.float32, torch.float64):
        yield f"input must be float16, bfloat16 or float32, not {input.dtype}"
    if input.dim() > MAX_DIMS:
        yield f"input must have at most {MAX_DIMS} dimensions, not {input.dim()}"
    if gamma.dtype != input.dtype:
        yield f"gamma must have the dtype of input, {input.dtype}, not {gamma.dtype}"
    if not 1 <= gamma.dim() <= input.dim() or gamma.shape != input.shape[input.dim() - gamma.dim() :]:
        yield f"gamma must have the trailing shape of input {tuple(input.shape)}, not {tuple(gamma.shape)}"


def fake(input: Tensor, gamma: Tensor, **_: Any) -> tuple[Tensor, Tensor]:
    rstd = input.new_empty(_rstd_shape(input, gamma), dtype=_statistics_dtype(input))
    return torch.empty_like(input), rstd


def sharding(input: Any, gamma: Any, **_: Any) -> Iterator[tuple[list[Placement], dict[str, Placement]]]:
    for dim in range(input.ndim - gamma.ndim):
        yield [Shard(dim), Shard(dim)], {"input": Shard(dim)}


def save(ctx: Any, output: tuple[Tensor, Tensor], input: Tensor, gamma: Tensor, **_: Any) -> None:
    rstd = output[1]
    ctx.save_for_backward(input, gamma, rstd)
    ctx.mark_non_differentiable(rstd)


def backward(npu: Any, ctx: Any, dy: Tensor, _: None) -> dict[str, Tensor]:
    dx, dgamma = npu.npu_rms_norm_backward(dy, *ctx.saved_tensors)
    return {"input": dx, "gamma": dgamma}


LIMITS = (
    Limit("input.dtype", lambda input, **_: input.dtype, (torch.float16, torch.bfloat16, torch.float32)),
    Limit("the number of dimensions of input", lambda input, **_: input.dim(), range(2, MAX_DIMS + 1)),
)

declare(
    Op(
        schema="npu::npu_rms_norm(Tensor input, Tensor gamma, float epsilon=9.9999999999999995e-07) "
        "-> (Tensor, Tensor)",
        reference=reference.npu_rms_norm,
        fake=fake,
        contract=contract,
        sharding=sharding,
        autograd=Autograd(save, backward),
        limits=LIMITS,
    )
)


def backward_contract(dy: Tensor, input: Tensor, gamma: Tensor, rstd: Tensor) -> Iterator[str]:
    yield from contract(input, gamma)
    if (dy.shape, dy.dtype) != (input.shape, input.dtype):
        yield (
            f"dy must have the shape and dtype of input, {tuple(input.shape)} and {input.dtype}, "
            f"not {tuple(dy.shape)} and {dy.dtype}"
        )
    shape, dtype = _rstd_shape(input, gamma), _statistics_dtype(input)
    if (list(rstd.shape), rstd.dtype) != (shape, dtype):
        yield f"rstd must be {dtype} of shape {tuple(shape)}, not {rstd.dtype} of shape {tuple(rstd.shape)}"


def backward_fake(input: Tensor, gamma: Tensor, **_: Any) -> tuple[Tensor, Tensor]:
    return torch.empty_like(input), torch.empty_like(gamma, dtype=_statistics_dtype(input))


def backward_sharding(input: Any, gamma: Any, **_: Any) -> Iterator[tuple[list[Placement], dict[str, Placement]]]:
    for dim in range(input.ndim - gamma.ndim):
        # each rank sums the gradient of gamma over its own tokens
        yield [Shard(dim), Partial()], {"dy": Shard(dim), "input": Shard(dim), "gamma": Replicate(), "rstd": Shard(dim)}


declare(
    Op(
        schema="npu::npu_rms_norm_backward(Tensor dy, Tensor input, Tensor gamma, Tensor rstd) -> (Tensor, Tensor)",
        reference=reference.npu_rms_norm_backward,
        fake=backward_fake,
        contract=backward_contract,
        sharding=backward_sharding,
        limits=LIMITS,
    )
)
