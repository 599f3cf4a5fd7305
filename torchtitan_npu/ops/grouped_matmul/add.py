"""``npu_grouped_matmul_add_``: the gradient of the experts' weights, accumulated in float32 in place."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import Shard

from torchtitan_npu.ops.core.op import Limit, Op, declare
from torchtitan_npu.ops.core.sharding import Way
from torchtitan_npu.ops.core.triton_kernel import kernel
from torchtitan_npu.ops.grouped_matmul import reference as reference
from torchtitan_npu.ops.grouped_matmul.op import INNER_LIMIT, MAX_GROUPS, group_list_contract, is_tiled, warn_of_waiting


def contract(
    input: Tensor,
    x: Tensor,
    weight: Tensor,
    group_list: Tensor,
    transpose_x: bool,
    transpose_weight: bool,
    group_type: int,
    group_list_type: int | None,
) -> Iterator[str]:
    if group_type != 2:
        yield f"group_type must be 2 (the summed dimension is grouped), not {group_type}"
    if not transpose_x or transpose_weight:
        yield f"transpose_x must be True and transpose_weight False, not {transpose_x} and {transpose_weight}"
    if x.dtype not in (torch.float16, torch.bfloat16, torch.float32, torch.float64) or weight.dtype != x.dtype:
        yield f"x and weight must both be float16 or both bfloat16, not {x.dtype} and {weight.dtype}"
    accumulator = torch.float64 if x.dtype == torch.float64 else torch.float32
    if input.dtype != accumulator:
        yield f"input must be {accumulator}, not {input.dtype}"
    if x.dim() != 2 or weight.dim() != 2 or x.shape[0] != weight.shape[0]:
        yield f"x (T, M) and weight (T, N) must agree in T, not be {tuple(x.shape)} and {tuple(weight.shape)}"
        return
    yield from group_list_contract(group_list, None, group_list_type)
    shape = (group_list.shape[0], x.shape[1], weight.shape[1])
    if tuple(input.shape) != shape:
        yield f"input must have shape {shape} (groups, M, N), not {tuple(input.shape)}"


def fake(input: Tensor, **_: Any) -> Tensor:
    return input


def sharding(**_: Any) -> Iterator[Way]:
    yield [Shard(2)], {"input": Shard(2), "weight": Shard(1)}


fused = kernel("grouped_matmul.triton", "npu_grouped_matmul_add_", reference.npu_grouped_matmul_add_)


def cuda(input: Tensor, x: Tensor, weight: Tensor, **others: Any) -> Tensor:
    """The kernel for tensor cores; the reference, which waits for the groups' sizes, where that takes no tiles."""
    if is_tiled(x, weight) and input.is_contiguous():
        return fused(input=input, x=x, weight=weight, **others)
    if x.dtype != torch.float64:
        warn_of_waiting("npu_grouped_matmul_add_", (x.shape[1], weight.shape[1]), x.dtype)
    return reference.npu_grouped_matmul_add_(input=input, x=x, weight=weight, **others)


declare(
    Op(
        schema="npu::npu_grouped_matmul_add_(Tensor(a!) input, Tensor x, Tensor weight, Tensor group_list, *, "
        "bool transpose_x=True, bool transpose_weight=False, int group_type=2, int? group_list_type=0) -> Tensor(a!)",
        reference=reference.npu_grouped_matmul_add_,
        cuda=cuda,
        fake=fake,
        contract=contract,
        sharding=sharding,
        limits=(
            Limit("x.dtype", lambda x, **_: x.dtype, (torch.float16, torch.bfloat16)),
            Limit("the number of groups", lambda group_list, **_: group_list.shape[0], range(1, MAX_GROUPS + 1)),
            Limit("the last dimension of x", lambda x, **_: x.shape[1], range(INNER_LIMIT)),
            Limit("the last dimension of weight", lambda weight, **_: weight.shape[1], range(INNER_LIMIT)),
        ),
    )
)
