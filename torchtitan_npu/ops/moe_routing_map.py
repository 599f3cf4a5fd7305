"""``npu_moe_token_permute_with_routing_map`` and its gradient: tokens sorted by expert as a map says."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import Placement, Replicate, Shard

from torchtitan_npu.ops.autograd import Autograd
from torchtitan_npu.ops.moe_checks import EXACT_INTEGERS, FLOATS, NPU_FLOATS, has_dim, has_dtype, has_shape
from torchtitan_npu.ops.reference import moe_routing_map as reference
from torchtitan_npu.ops.vocabulary import Limit, Op, declare


def map_contract(routing_map: Tensor, tokens: int) -> Iterator[str]:
    yield from has_dim("routing_map", routing_map, 2)
    yield from has_dtype("routing_map", routing_map, torch.int8, torch.bool)
    if routing_map.shape[0] != tokens:
        yield f"routing_map must have a row for each of the {tokens} tokens, not {routing_map.shape[0]}"


def probs_dtype_contract(name: str, probs: Tensor, tokens: Tensor) -> Iterator[str]:
    allowed = (torch.float32, tokens.dtype) if tokens.dtype == torch.bfloat16 else (tokens.dtype,)
    if probs.dtype not in allowed:
        yield f"{name} must have the tokens' dtype, {tokens.dtype}, or be float32 with bfloat16; it is {probs.dtype}"


def _rows(routing_map: Tensor, num_out_tokens: int | None, drop_and_pad: bool) -> int:
    wanted = routing_map.shape[0] if num_out_tokens is None else num_out_tokens
    unit = routing_map.shape[1 if drop_and_pad else 0]
    return wanted // unit * unit if unit else 0


def contract(
    tokens: Tensor, routing_map: Tensor, probs: Tensor | None, num_out_tokens: int | None, **_: Any
) -> Iterator[str]:
    yield from has_dim("tokens", tokens, 2)
    yield from has_dtype("tokens", tokens, *FLOATS)
    yield from map_contract(routing_map, tokens.shape[0])
    if probs is not None:
        yield from probs_dtype_contract("probs", probs, tokens)
        yield from has_shape("probs", probs, *routing_map.shape)
    if num_out_tokens is not None and not 0 <= num_out_tokens <= routing_map.numel():
        yield f"num_out_tokens must be 0 to {routing_map.numel()}, the size of routing_map, not {num_out_tokens}"


def fake(
    tokens: Tensor,
    routing_map: Tensor,
    probs: Tensor | None,
    num_out_tokens: int | None,
    drop_and_pad: bool,
) -> tuple[Tensor, Tensor | None, Tensor]:
    rows = _rows(routing_map, num_out_tokens, drop_and_pad)
    permuted_probs = None if probs is None else probs.new_empty(rows)
    return tokens.new_empty(rows, tokens.shape[1]), permuted_probs, tokens.new_empty(rows, dtype=torch.int32)


def sharding(probs: Any, **_: Any) -> Iterator[tuple[list[Placement | None], dict[str, Placement]]]:
    yield [Shard(1), None if probs is None else Replicate(), Replicate()], {"tokens": Shard(1)}


def save(
    ctx: Any, output: tuple[Tensor, Tensor | None, Tensor], routing_map: Tensor, drop_and_pad: bool, **_: Any
) -> None:
    ctx.save_for_backward(output[2], routing_map)
    ctx.mark_non_differentiable(output[2])
    ctx.drop_and_pad = drop_and_pad


def backward(npu: Any, ctx: Any, grad: Tensor | None, grad_probs: Tensor | None, _: None) -> dict[str, Tensor | None]:
    if grad is None:
        raise RuntimeError(
            "npu_moe_token_permute_with_routing_map: the loss must depend on the permuted tokens, not on the permuted "
            "probs alone: torch_npu's backward takes no less"
        )
    sorted_indices, routing_map = ctx.saved_tensors
    tokens_num, experts_num = routing_map.shape
    grad_tokens, grad_probs = npu.npu_moe_token_permute_with_routing_map_grad(
        grad, grad_probs, sorted_indices, routing_map, experts_num, tokens_num, ctx.drop_and_pad
    )
    return {"tokens": grad_tokens, "probs": grad_probs}


LIMITS = (
    Limit("the number of tokens", lambda routing_map, **_: routing_map.shape[0], EXACT_INTEGERS),
    Limit("the number of experts", lambda routing_map, **_: routing_map.shape[1], EXACT_INTEGERS),
)

declare(
    Op(
        schema="npu::npu_moe_token_permute_with_routing_map(Tensor tokens, Tensor routing_map, *, Tensor? probs=None, "
        "int? num_out_tokens=None, bool drop_and_pad=False) -> (Tensor, Tensor, Tensor)",
        reference=reference.npu_moe_token_permute_with_routing_map,
        fake=fake,
        contract=contract,
        sharding=sharding,
        autograd=Autograd(save, backward),
        limits=(
            Limit("tokens.dtype", lambda tokens, **_: tokens.dtype, NPU_FLOATS),
            *LIMITS,
            Limit(
                "the top-k, num_out_tokens // tokens,",
                lambda tokens, num_out_tokens, drop_and_pad, **_: (
                    0 if drop_and_pad or num_out_tokens is None else num_out_tokens // max(tokens.shape[0], 1)
                ),
                range(512),
            ),
            Limit(
                "the number of permuted rows",
                lambda routing_map, num_out_tokens, drop_and_pad, **_: _rows(routing_map, num_out_tokens, drop_and_pad),
                EXACT_INTEGERS,
            ),
        ),
    )
)


def grad_contract(
    permuted_token_out_grad: Tensor,
    probs_grad: Tensor | None,
    sorted_indices: Tensor,
    routing_map: Tensor,
    experts_num: int,
    tokens_num: int,
    drop_and_pad: bool,
) -> Iterator[str]:
    yield from has_dim("permuted_token_out_grad", permuted_token_out_grad, 2)
    yield from has_dtype("permuted_token_out_grad", permuted_token_out_grad, *FLOATS)
    rows = permuted_token_out_grad.shape[0]
    if probs_grad is not None:
        yield from probs_dtype_contract("probs_grad", probs_grad, permuted_token_out_grad)
        yield from has_shape("probs_grad", probs_grad, rows)
    yield from has_dtype("sorted_indices", sorted_indices, torch.int32)
    yield from has_shape("sorted_indices", sorted_indices, rows)
    yield from map_contract(routing_map, tokens_num)
    if routing_map.shape[1] != experts_num:
        yield f"experts_num must be the number of columns of routing_map, {routing_map.shape[1]}, not {experts_num}"
    unit, what = (experts_num, "experts_num") if drop_and_pad else (tokens_num, "tokens_num")
    if rows % max(unit, 1):
        yield f"permuted_token_out_grad must have a multiple of {what}, {unit}, rows, not {rows}"


def grad_fake(
    permuted_token_out_grad: Tensor, probs_grad: Tensor | None, experts_num: int, tokens_num: int, **_: Any
) -> tuple[Tensor, Tensor | None]:
    grad = permuted_token_out_grad
    grad_probs = None if probs_grad is None else probs_grad.new_empty(tokens_num, experts_num)
    return grad.new_empty(tokens_num, grad.shape[1]), grad_probs


def grad_sharding(probs_grad: Any, **_: Any) -> Iterator[tuple[list[Placement | None], dict[str, Placement]]]:
    yield [Shard(1), None if probs_grad is None else Replicate()], {"permuted_token_out_grad": Shard(1)}


declare(
    Op(
        schema="npu::npu_moe_token_permute_with_routing_map_grad(Tensor permuted_token_out_grad, Tensor? probs_grad, "
        "Tensor sorted_indices, Tensor routing_map, SymInt experts_num, SymInt tokens_num, bool drop_and_pad) "
        "-> (Tensor, Tensor)",
        reference=reference.npu_moe_token_permute_with_routing_map_grad,
        fake=grad_fake,
        contract=grad_contract,
        sharding=grad_sharding,
        limits=(
            Limit(
                "permuted_token_out_grad.dtype",
                lambda permuted_token_out_grad, **_: permuted_token_out_grad.dtype,
                NPU_FLOATS,
            ),
            *LIMITS,
        ),
    )
)
