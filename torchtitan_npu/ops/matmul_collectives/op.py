"""``npu_all_gather_base_mm`` and ``npu_mm_reduce_scatter_base``: matrix products that overlap with a collective."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from torchtitan_npu.ops.core.op import Limit, Op, declare
from torchtitan_npu.ops.core.sharding import Strategy
from torchtitan_npu.ops.matmul_collectives import reference

OPTIONS = "Tensor? bias=None, Tensor? x1_scale=None, Tensor? x2_scale=None"
WORLD_SIZES = (2, 4, 8, 16, 32)


def _checks(input: Tensor, x2: Tensor, **options: Any) -> Iterator[str]:
    if input.dim() != 2 or x2.dim() != 2:
        yield f"input and x2 must be matrices, not of {input.dim()} and {x2.dim()} dimensions"
    if input.shape[1] != x2.shape[0]:
        yield f"x2 must have as many rows as input has columns, {input.shape[1]}, not {x2.shape[0]}"
    if input.dtype != x2.dtype:
        yield f"input and x2 must have one dtype, not {input.dtype} and {x2.dtype}"
    for name in ("bias", "x1_scale", "x2_scale", "output_dtype", "comm_mode"):
        if options[name] is not None:
            yield f"{name} must be None: only torch_npu implements it"


def gather_checks(gather_index: int, **others: Any) -> Iterator[str]:
    yield from _checks(**others)
    if gather_index:
        yield f"gather_index must be 0, which gathers input, not {gather_index}"


def gather_fake(input: Tensor, x2: Tensor, world_size: int, gather_output: bool, **_: Any) -> tuple[Tensor, Tensor]:
    rows = input.shape[0] * world_size
    return input.new_empty(rows, x2.shape[1]), input.new_empty((rows, input.shape[1]) if gather_output else 0)


def scatter_checks(input: Tensor, world_size: int, reduce_op: str, **others: Any) -> Iterator[str]:
    yield from _checks(input, **others)
    if reduce_op != "sum":
        yield f'reduce_op must be "sum", not {reduce_op!r}'
    if input.shape[0] % world_size:
        yield f"input must have a number of rows that world_size {world_size} divides, not {input.shape[0]}"


def scatter_fake(input: Tensor, x2: Tensor, world_size: int, **_: Any) -> Tensor:
    return input.new_empty(input.shape[0] // world_size, x2.shape[1])


def no_sharding(**_: Any) -> Iterator[Strategy]:
    """Yield nothing: these operators communicate themselves and take local tensors only."""
    yield from ()


LIMITS = (
    Limit("input.dtype", lambda input, **_: input.dtype, (torch.float16, torch.bfloat16)),
    Limit("the number of rows of x2", lambda x2, **_: x2.shape[0], range(256, 65535)),
    Limit("world_size", lambda world_size, **_: world_size, WORLD_SIZES),
)

declare(
    Op(
        schema=f"npu::npu_all_gather_base_mm(Tensor input, Tensor x2, str hcom, int world_size, *, {OPTIONS}, "
        "int gather_index=0, bool gather_output=True, int comm_turn=0, ScalarType? output_dtype=None, "
        "str? comm_mode=None) -> (Tensor, Tensor)",
        reference=reference.npu_all_gather_base_mm,
        fake=gather_fake,
        checks=gather_checks,
        sharding=no_sharding,
        limits=LIMITS,
    )
)
declare(
    Op(
        schema="npu::npu_mm_reduce_scatter_base(Tensor input, Tensor x2, str hcom, int world_size, *, "
        f'str reduce_op="sum", {OPTIONS}, int comm_turn=0, ScalarType? output_dtype=None, str? comm_mode=None) '
        "-> Tensor",
        reference=reference.npu_mm_reduce_scatter_base,
        fake=scatter_fake,
        checks=scatter_checks,
        sharding=no_sharding,
        limits=LIMITS,
    )
)
