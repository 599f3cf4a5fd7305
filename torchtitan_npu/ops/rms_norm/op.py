"""``npu_rms_norm``, ``npu_rms_norm_backward`` and ``npu_add_rms_norm``: root mean square normalisation."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import Partial, Placement, Replicate, Shard

from torchtitan_npu.ops.core.autograd import Autograd, not_implemented
from torchtitan_npu.ops.core.op import Limit, Op, declare
from torchtitan_npu.ops.core.triton_kernel import kernel
from torchtitan_npu.ops.rms_norm import reference as reference

MAX_DIMS = 8  # CANN's kernels take no tensor of more


def _statistics_dtype(input: Tensor) -> torch.dtype:
    """float32, as torch_npu keeps it; float64 only for float64 input, which the NPU does not take."""
    return torch.float64 if input.dtype == torch.float64 else torch.float32


def _rstd_shape(input: Tensor, gamma: Tensor) -> list[int]:
    return [*input.shape[: input.dim() - gamma.dim()], *([1] * gamma.dim())]


def _problems(name: str, x: Tensor, gamma: Tensor) -> Iterator[str]:
    """What is wrong with normalising ``x``, the argument ``name``."""
    if x.dtype not in (torch.float16, torch.bfloat16, torch.float32, torch.float64):
        yield f"{name} must be float16, bfloat16 or float32, not {x.dtype}"
    if x.dim() > MAX_DIMS:
        yield f"{name} must have at most {MAX_DIMS} dimensions, not {x.dim()}"
    if gamma.dtype != x.dtype:
        yield f"gamma must have the dtype of {name}, {x.dtype}, not {gamma.dtype}"
    if not 1 <= gamma.dim() <= x.dim() or gamma.shape != x.shape[x.dim() - gamma.dim() :]:
        yield f"gamma must have the trailing shape of {name} {tuple(x.shape)}, not {tuple(gamma.shape)}"


def contract(input: Tensor, gamma: Tensor, **_: Any) -> Iterator[str]:
    yield from _problems("input", input, gamma)


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


MAX_CUDA_WIDTH = 16384


def on_cuda(name: str) -> Callable[..., Any]:
    """The Triton kernel of the op ``name``, which keeps a row in registers; the reference for rows too wide for that,
    and where there is nothing to compute."""
    reference_kernel = getattr(reference, name)
    fused = kernel("rms_norm.triton", name, reference_kernel)

    def run(gamma: Tensor, **arguments: Any) -> Any:
        x = arguments["x1" if "x1" in arguments else "input"]
        chosen = fused if gamma.numel() <= MAX_CUDA_WIDTH and x.numel() else reference_kernel
        return chosen(gamma=gamma, **arguments)

    return run


LIMITS = (
    Limit("input.dtype", lambda input, **_: input.dtype, (torch.float16, torch.bfloat16, torch.float32)),
    Limit("the number of dimensions of input", lambda input, **_: input.dim(), range(2, MAX_DIMS + 1)),
)

declare(
    Op(
        schema="npu::npu_rms_norm(Tensor input, Tensor gamma, float epsilon=9.9999999999999995e-07) "
        "-> (Tensor, Tensor)",
        reference=reference.npu_rms_norm,
        cuda=on_cuda("npu_rms_norm"),
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
        cuda=on_cuda("npu_rms_norm_backward"),
        fake=backward_fake,
        contract=backward_contract,
        sharding=backward_sharding,
        limits=LIMITS,
    )
)


def add_contract(x1: Tensor, x2: Tensor, gamma: Tensor, **_: Any) -> Iterator[str]:
    yield from _problems("x1", x1, gamma)
    if (x2.shape, x2.dtype) != (x1.shape, x1.dtype):
        yield (
            f"x2 must have the shape and dtype of x1, {tuple(x1.shape)} and {x1.dtype}, "
            f"not {tuple(x2.shape)} and {x2.dtype}"
        )


def add_fake(x1: Tensor, gamma: Tensor, **_: Any) -> tuple[Tensor, Tensor, Tensor]:
    rstd = x1.new_empty(_rstd_shape(x1, gamma), dtype=_statistics_dtype(x1))
    return torch.empty_like(x1), rstd, torch.empty_like(x1)


def add_sharding(x1: Any, gamma: Any, **_: Any) -> Iterator[tuple[list[Placement], dict[str, Placement]]]:
    for dim in range(x1.ndim - gamma.ndim):
        yield [Shard(dim), Shard(dim), Shard(dim)], {"x1": Shard(dim), "x2": Shard(dim)}


declare(
    Op(
        schema="npu::npu_add_rms_norm(Tensor x1, Tensor x2, Tensor gamma, float epsilon=9.9999999999999995e-07) "
        "-> (Tensor, Tensor, Tensor)",
        reference=reference.npu_add_rms_norm,
        cuda=on_cuda("npu_add_rms_norm"),
        fake=add_fake,
        contract=add_contract,
        sharding=add_sharding,
        autograd=not_implemented("npu_add_rms_norm"),
        limits=(
            Limit("x1.dtype", lambda x1, **_: x1.dtype, (torch.float16, torch.bfloat16, torch.float32)),
            Limit("the number of dimensions of x1", lambda x1, **_: x1.dim(), range(1, MAX_DIMS + 1)),
        ),
    )
)
