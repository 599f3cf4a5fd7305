"""``npu_moe_re_routing``: tokens that arrived from other ranks, sorted by expert. torch_npu has no gradient for it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import Placement, Replicate, Shard

from torchtitan_npu.ops.moe_checks import FLOATS, has_dim, has_dtype, has_shape
from torchtitan_npu.ops.reference import moe_routing as reference
from torchtitan_npu.ops.triton import kernel
from torchtitan_npu.ops.vocabulary import Limit, Op, declare


def contract(
    tokens: Tensor,
    expert_token_num_per_rank: Tensor,
    per_token_scales: Tensor | None,
    expert_token_num_type: int,
    idx_type: int,
    tokens_dtype: int | None,
) -> Iterator[str]:
    yield from has_dim("tokens", tokens, 2)
    yield from has_dtype("tokens", tokens, *FLOATS, torch.int8)
    yield from has_dim("expert_token_num_per_rank", expert_token_num_per_rank, 2)
    yield from has_dtype("expert_token_num_per_rank", expert_token_num_per_rank, torch.int32, torch.int64)
    if per_token_scales is not None:
        yield from has_dtype("per_token_scales", per_token_scales, torch.float32)
        yield from has_shape("per_token_scales", per_token_scales, tokens.shape[0])
    if expert_token_num_type != 1:
        yield f"expert_token_num_type must be 1 (counts), the only one the NPU has, not {expert_token_num_type}"
    if idx_type != 0:
        yield f"idx_type must be 0 (gather), the only one that the NPU has, not {idx_type}"
    if tokens_dtype is not None:
        yield f"tokens_dtype names 4 and 8 bit formats that only the NPU has: it must be None, not {tokens_dtype}"


def fake(tokens: Tensor, expert_token_num_per_rank: Tensor, **_: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    rows, counts = tokens.shape[0], expert_token_num_per_rank
    return (
        tokens.new_empty(tokens.shape),
        tokens.new_empty(rows, dtype=torch.float32),
        tokens.new_empty(rows, dtype=torch.int32),
        counts.new_empty(counts.shape[1]),
    )


def sharding(**_: Any) -> Iterator[tuple[list[Placement | None], dict[str, Placement]]]:
    yield [Shard(1), Replicate(), Replicate(), Replicate()], {"tokens": Shard(1)}


declare(
    Op(
        schema="npu::npu_moe_re_routing(Tensor tokens, Tensor expert_token_num_per_rank, *, "
        "Tensor? per_token_scales=None, int expert_token_num_type=1, int idx_type=0, int? tokens_dtype=None) "
        "-> (Tensor, Tensor, Tensor, Tensor)",
        reference=reference.npu_moe_re_routing,
        cuda=kernel("moe_routing", "npu_moe_re_routing", reference.npu_moe_re_routing),
        fake=fake,
        contract=contract,
        sharding=sharding,
        limits=(
            Limit("tokens.dtype", lambda tokens, **_: tokens.dtype, (torch.float16, torch.bfloat16, torch.int8)),
            Limit("the hidden size of tokens", lambda tokens, **_: tokens.shape[1], range(1, 16384)),
        ),
    )
)
