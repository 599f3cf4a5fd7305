"""``npu_swiglu`` and ``npu_swiglu_backward``: one half of the input gates the other through SiLU."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import Shard

from torchtitan_npu.ops.core.autograd import Autograd
from torchtitan_npu.ops.core.call_description import TensorDescription
from torchtitan_npu.ops.core.checks import FLOATS, NPU_FLOATS, check_dtype
from torchtitan_npu.ops.core.op import Limit, Op, declare
from torchtitan_npu.ops.core.samples import HIDDEN, MATRIX, randn_like
from torchtitan_npu.ops.core.sharding import Strategy
from torchtitan_npu.ops.core.triton_kernel import kernel
from torchtitan_npu.ops.swiglu import reference

MAX_DIMS = 8
"""CANN's kernels take no tensor with more dimensions."""


def _halved(input: Tensor, dim: int) -> list[int]:
    shape = list(input.shape)
    shape[dim] //= 2
    return shape


def checks(input: Tensor, dim: int, **_: Any) -> Iterator[str]:
    yield from check_dtype("input", input, *FLOATS)
    if not 1 <= input.dim() <= MAX_DIMS:
        yield f"input must have 1 to {MAX_DIMS} dimensions, not {input.dim()}"
    if not -input.dim() <= dim < input.dim():
        yield f"dim must be one of the {input.dim()} dimensions of input, not {dim}"
    if input.shape[dim] % 2:
        yield f"input must have an even size along dim {dim}, not {input.shape[dim]}"


def fake(input: Tensor, dim: int) -> Tensor:
    return input.new_empty(_halved(input, dim))


def sharding(input: Any, dim: int) -> Iterator[Strategy]:
    for other in range(input.ndim):
        if other != dim % input.ndim:
            yield [Shard(other)], {"input": Shard(other)}


def save(ctx: Any, output: Tensor, input: Tensor, dim: int) -> None:
    ctx.save_for_backward(input)
    ctx.dim = dim


def backward(npu: Any, ctx: Any, grad_output: Tensor) -> dict[str, Tensor]:
    return {"input": npu.npu_swiglu_backward(grad_output, *ctx.saved_tensors, ctx.dim)}


def sample(input: TensorDescription = MATRIX, **_: Any) -> dict[str, Any]:
    return {"input": randn_like(input, 2 * HIDDEN)}


LIMITS = (
    Limit("input.dtype", lambda input, **_: input.dtype, NPU_FLOATS),
    Limit("the number of dimensions of input", lambda input, **_: input.dim(), range(1, MAX_DIMS + 1)),
)

declare(
    Op(
        schema="npu::npu_swiglu(Tensor input, int dim=-1) -> Tensor",
        reference=reference.npu_swiglu,
        cuda=kernel(reference.npu_swiglu),
        fake=fake,
        checks=checks,
        sharding=sharding,
        autograd=Autograd(save, backward),
        limits=LIMITS,
        sample=sample,
    )
)


def backward_checks(grad_output: Tensor, input: Tensor, dim: int) -> Iterator[str]:
    yield from checks(input, dim)
    shape = _halved(input, dim)
    if (list(grad_output.shape), grad_output.dtype) != (shape, input.dtype):
        yield (
            f"grad_output must be {input.dtype} of shape {tuple(shape)}, input halved along dim {dim}, "
            f"not {grad_output.dtype} of shape {tuple(grad_output.shape)}"
        )


def backward_fake(input: Tensor, **_: Any) -> Tensor:
    return torch.empty_like(input)


def backward_sharding(input: Any, dim: int, **_: Any) -> Iterator[Strategy]:
    for other in range(input.ndim):
        if other != dim % input.ndim:
            yield [Shard(other)], {"grad_output": Shard(other), "input": Shard(other)}


declare(
    Op(
        schema="npu::npu_swiglu_backward(Tensor grad_output, Tensor input, int dim=-1) -> Tensor",
        reference=reference.npu_swiglu_backward,
        cuda=kernel(reference.npu_swiglu_backward),
        fake=backward_fake,
        checks=backward_checks,
        sharding=backward_sharding,
        limits=LIMITS,
        sample=lambda input=MATRIX, **_: {"grad_output": randn_like(input, HIDDEN), **sample(input)},
    )
)
