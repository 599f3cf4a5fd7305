"""``npu_rms_norm``, ``npu_rms_norm_backward`` and ``npu_add_rms_norm``: root mean square normalisation."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import Partial, Replicate, Shard

from torchtitan_npu.ops.core.autograd import Autograd, not_implemented
from torchtitan_npu.ops.core.call_description import TensorDescription
from torchtitan_npu.ops.core.checks import FLOATS, NPU_FLOATS, check_alike, check_dtype, check_is
from torchtitan_npu.ops.core.op import Limit, Op, declare
from torchtitan_npu.ops.core.samples import HIDDEN, MATRIX, TOKENS, randn, randn_like
from torchtitan_npu.ops.core.sharding import Strategy
from torchtitan_npu.ops.core.triton_kernel import kernel
from torchtitan_npu.ops.rms_norm import reference

MAX_DIMS = 8
"""CANN's kernels take no tensor with more dimensions."""


def _statistics_dtype(input: Tensor) -> torch.dtype:
    """Return float32, as torch_npu does, or float64 for float64 input, which an NPU does not take."""
    return torch.float64 if input.dtype == torch.float64 else torch.float32


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


def checks(input: Tensor, gamma: Tensor, **_: Any) -> Iterator[str]:
    yield from _check_normalised("input", input, gamma)


def fake(input: Tensor, gamma: Tensor, **_: Any) -> tuple[Tensor, Tensor]:
    rstd = input.new_empty(_rstd_shape(input, gamma), dtype=_statistics_dtype(input))
    return torch.empty_like(input), rstd


def sharding(input: Any, gamma: Any, **_: Any) -> Iterator[Strategy]:
    for dim in range(input.ndim - gamma.ndim):
        yield [Shard(dim), Shard(dim)], {"input": Shard(dim)}


def save(ctx: Any, output: tuple[Tensor, Tensor], input: Tensor, gamma: Tensor, **_: Any) -> None:
    rstd = output[1]
    ctx.save_for_backward(input, gamma, rstd)
    ctx.mark_non_differentiable(rstd)


def backward(npu: Any, ctx: Any, dy: Tensor, _: None) -> dict[str, Tensor]:
    dx, dgamma = npu.npu_rms_norm_backward(dy, *ctx.saved_tensors)
    return {"input": dx, "gamma": dgamma}


def sample(input: TensorDescription = MATRIX, **_: Any) -> dict[str, Any]:
    return {"input": randn_like(input, HIDDEN), "gamma": randn(HIDDEN, dtype=input.dtype)}


MAX_CUDA_WIDTH = 16384


def on_cuda(reference_kernel: Callable[..., Any]) -> Callable[..., Any]:
    """Return the Triton kernel, which holds a row in registers.

    The reference runs for rows that are too wide for that, and for empty tensors.
    """
    fused = kernel(reference_kernel)

    def run(gamma: Tensor, **arguments: Any) -> Any:
        x = arguments["x1" if "x1" in arguments else "input"]
        chosen = fused if gamma.numel() <= MAX_CUDA_WIDTH and x.numel() else reference_kernel
        return chosen(gamma=gamma, **arguments)

    return run


LIMITS = (
    Limit("input.dtype", lambda input, **_: input.dtype, NPU_FLOATS),
    Limit("the number of dimensions of input", lambda input, **_: input.dim(), range(2, MAX_DIMS + 1)),
)

declare(
    Op(
        schema="npu::npu_rms_norm(Tensor input, Tensor gamma, float epsilon=9.9999999999999995e-07) "
        "-> (Tensor, Tensor)",
        reference=reference.npu_rms_norm,
        cuda=on_cuda(reference.npu_rms_norm),
        fake=fake,
        checks=checks,
        sharding=sharding,
        autograd=Autograd(save, backward),
        limits=LIMITS,
        sample=sample,
    )
)


def backward_checks(dy: Tensor, input: Tensor, gamma: Tensor, rstd: Tensor) -> Iterator[str]:
    yield from checks(input, gamma)
    yield from check_alike("dy", dy, "input", input)
    yield from check_is("rstd", rstd, _statistics_dtype(input), _rstd_shape(input, gamma))


def backward_fake(input: Tensor, gamma: Tensor, **_: Any) -> tuple[Tensor, Tensor]:
    return torch.empty_like(input), torch.empty_like(gamma, dtype=_statistics_dtype(input))


def backward_sharding(input: Any, gamma: Any, **_: Any) -> Iterator[Strategy]:
    for dim in range(input.ndim - gamma.ndim):
        # each rank sums the gradient of gamma over its own tokens
        yield [Shard(dim), Partial()], {"dy": Shard(dim), "input": Shard(dim), "gamma": Replicate(), "rstd": Shard(dim)}


def backward_sample(input: TensorDescription = MATRIX, **_: Any) -> dict[str, Any]:
    forward = sample(input)
    rstd = reference.npu_rms_norm(**forward, epsilon=1e-6)[1]
    return {"dy": randn_like(input, HIDDEN), **forward, "rstd": rstd}


declare(
    Op(
        schema="npu::npu_rms_norm_backward(Tensor dy, Tensor input, Tensor gamma, Tensor rstd) -> (Tensor, Tensor)",
        reference=reference.npu_rms_norm_backward,
        cuda=on_cuda(reference.npu_rms_norm_backward),
        fake=backward_fake,
        checks=backward_checks,
        sharding=backward_sharding,
        limits=LIMITS,
        sample=backward_sample,
    )
)


def add_checks(x1: Tensor, x2: Tensor, gamma: Tensor, **_: Any) -> Iterator[str]:
    yield from _check_normalised("x1", x1, gamma)
    yield from check_alike("x2", x2, "x1", x1)


def add_fake(x1: Tensor, gamma: Tensor, **_: Any) -> tuple[Tensor, Tensor, Tensor]:
    y, rstd = fake(x1, gamma)
    return y, rstd, torch.empty_like(x1)


def add_sharding(x1: Any, gamma: Any, **_: Any) -> Iterator[Strategy]:
    for dim in range(x1.ndim - gamma.ndim):
        yield [Shard(dim), Shard(dim), Shard(dim)], {"x1": Shard(dim), "x2": Shard(dim)}


declare(
    Op(
        schema="npu::npu_add_rms_norm(Tensor x1, Tensor x2, Tensor gamma, float epsilon=9.9999999999999995e-07) "
        "-> (Tensor, Tensor, Tensor)",
        reference=reference.npu_add_rms_norm,
        cuda=on_cuda(reference.npu_add_rms_norm),
        fake=add_fake,
        checks=add_checks,
        sharding=add_sharding,
        autograd=not_implemented("npu_add_rms_norm"),
        limits=(
            Limit("x1.dtype", lambda x1, **_: x1.dtype, NPU_FLOATS),
            Limit("the number of dimensions of x1", lambda x1, **_: x1.dim(), range(1, MAX_DIMS + 1)),
        ),
        sample=lambda **_: {"x1": randn(TOKENS, HIDDEN), "x2": randn(TOKENS, HIDDEN), "gamma": randn(HIDDEN)},
    )
)
