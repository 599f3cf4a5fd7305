"""``npu_moe_token_permute`` and its gradients: tokens copied once for each of their experts, sorted by expert."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import Placement, Replicate, Shard

from torchtitan_npu.ops.core.autograd import Autograd
from torchtitan_npu.ops.core.op import Limit, Op, declare
from torchtitan_npu.ops.core.triton_kernel import kernel
from torchtitan_npu.ops.moe_permute import reference as reference
from torchtitan_npu.ops.moe_permute.checks import (
    EXACT_INTEGERS,
    FLOATS,
    NPU_FLOATS,
    TOP_K,
    has_dim,
    has_dtype,
    has_shape,
    is_unpadded,
)


def _top_k(indices: Tensor) -> int:
    return indices.shape[1] if indices.dim() == 2 else 1


def _rows(indices: Tensor, num_out_tokens: int | None) -> int:
    """How many rows remain: as many as the slice ``[:num_out_tokens]`` keeps, all for ``None`` and 0."""
    limit, slots = num_out_tokens or 0, indices.numel()
    return min(limit, slots) if limit > 0 else slots + limit


def contract(tokens: Tensor, indices: Tensor, num_out_tokens: int | None, padded_mode: bool, **_: Any) -> Iterator[str]:
    yield from is_unpadded(padded_mode)
    yield from has_dim("tokens", tokens, 2)
    yield from has_dtype("tokens", tokens, *FLOATS)
    yield from has_dim("indices", indices, 1, 2)
    yield from has_dtype("indices", indices, torch.int32, torch.int64)
    if indices.shape[0] != tokens.shape[0]:
        yield f"indices must have a row for each of the {tokens.shape[0]} tokens, not {indices.shape[0]} rows"
    if _rows(indices, num_out_tokens) < 0:
        yield f"num_out_tokens must be at least -{indices.numel()}, the number of indices, not {num_out_tokens}"


def fake(tokens: Tensor, indices: Tensor, num_out_tokens: int | None, **_: Any) -> tuple[Tensor, Tensor]:
    permuted = tokens.new_empty(_rows(indices, num_out_tokens), tokens.shape[1])
    return permuted, tokens.new_empty(indices.numel(), dtype=torch.int32)


def sharding(**_: Any) -> Iterator[tuple[list[Placement | None], dict[str, Placement]]]:
    yield [Shard(1), Replicate()], {"tokens": Shard(1)}


def save(ctx: Any, output: tuple[Tensor, Tensor], tokens: Tensor, indices: Tensor, **_: Any) -> None:
    ctx.save_for_backward(output[1])
    ctx.mark_non_differentiable(output[1])
    ctx.tokens, ctx.dtype, ctx.top_k = tokens.shape[0], tokens.dtype, _top_k(indices)


def backward(npu: Any, ctx: Any, grad: Tensor, _: None) -> dict[str, Tensor]:
    (sorted_indices,) = ctx.saved_tensors
    return {"tokens": npu.npu_moe_token_permute_grad_v2(grad, sorted_indices, ctx.tokens, ctx.dtype, ctx.top_k)}


LIMITS = (
    Limit("tokens.dtype", lambda tokens, **_: tokens.dtype, NPU_FLOATS),
    Limit("the number of indices", lambda indices, **_: indices.numel(), EXACT_INTEGERS),
    Limit("the top-k of indices", lambda indices, **_: _top_k(indices), TOP_K),
)

declare(
    Op(
        schema="npu::npu_moe_token_permute(Tensor tokens, Tensor indices, int? num_out_tokens=None, "
        "bool padded_mode=False) -> (Tensor, Tensor)",
        reference=reference.npu_moe_token_permute,
        cuda=kernel("moe_permute.triton", "npu_moe_token_permute", reference.npu_moe_token_permute),
        fake=fake,
        contract=contract,
        sharding=sharding,
        autograd=Autograd(save, backward),
        limits=LIMITS,
    )
)


def grad_contract(
    tokens: Tensor,
    grad_permuted_tokens: Tensor,
    indices: Tensor,
    sorted_indices: Tensor,
    padded_mode: bool,
) -> Iterator[str]:
    yield from contract(tokens, indices, None, padded_mode)
    yield from grad_v2_contract(
        grad_permuted_tokens, sorted_indices, tokens.shape[0], tokens.dtype, _top_k(indices), padded_mode
    )
    if grad_permuted_tokens.shape[1] != tokens.shape[1]:
        yield (
            f"grad_permuted_tokens must have the hidden size of tokens, {tokens.shape[1]}, "
            f"not {grad_permuted_tokens.shape[1]}"
        )


declare(
    Op(
        schema="npu::npu_moe_token_permute_grad(Tensor tokens, Tensor grad_permuted_tokens, Tensor indices, "
        "Tensor sorted_indices, bool padded_mode=False) -> Tensor",
        reference=reference.npu_moe_token_permute_grad,
        cuda=kernel("moe_permute.triton", "npu_moe_token_permute_grad", reference.npu_moe_token_permute_grad),
        fake=lambda tokens, **_: tokens.new_empty(tokens.shape),
        contract=grad_contract,
        sharding=lambda **_: [([Shard(1)], {"tokens": Shard(1), "grad_permuted_tokens": Shard(1)})],
        limits=LIMITS,
    )
)


def grad_v2_contract(
    grad_permuted_tokens: Tensor,
    sorted_indices: Tensor,
    tokens_size_0: int,
    tokens_dtype: torch.dtype,
    num_topK: int,
    padded_mode: bool,
) -> Iterator[str]:
    yield from is_unpadded(padded_mode)
    yield from has_dim("grad_permuted_tokens", grad_permuted_tokens, 2)
    yield from has_dtype("grad_permuted_tokens", grad_permuted_tokens, *FLOATS)
    yield from has_dim("sorted_indices", sorted_indices, 1)
    yield from has_dtype("sorted_indices", sorted_indices, torch.int32)
    yield from has_shape("sorted_indices", sorted_indices, tokens_size_0 * num_topK)
    if tokens_dtype not in FLOATS:
        yield f"tokens_dtype must be float16, bfloat16 or float32, not {tokens_dtype}"
    if grad_permuted_tokens.shape[0] > sorted_indices.shape[0]:
        yield (
            f"grad_permuted_tokens must have at most a row for each of the {sorted_indices.shape[0]} sorted_indices, "
            f"not {grad_permuted_tokens.shape[0]}"
        )


def grad_v2_fake(grad_permuted_tokens: Tensor, tokens_size_0: int, tokens_dtype: torch.dtype, **_: Any) -> Tensor:
    return grad_permuted_tokens.new_empty(tokens_size_0, grad_permuted_tokens.shape[1], dtype=tokens_dtype)


declare(
    Op(
        schema="npu::npu_moe_token_permute_grad_v2(Tensor grad_permuted_tokens, Tensor sorted_indices, "
        "SymInt tokens_size_0, ScalarType tokens_dtype, SymInt num_topK, bool padded_mode=False) -> Tensor",
        reference=reference.npu_moe_token_permute_grad_v2,
        cuda=kernel("moe_permute.triton", "npu_moe_token_permute_grad_v2", reference.npu_moe_token_permute_grad_v2),
        fake=grad_v2_fake,
        contract=grad_v2_contract,
        sharding=lambda **_: [([Shard(1)], {"grad_permuted_tokens": Shard(1)})],
        limits=(
            Limit("tokens_dtype", lambda tokens_dtype, **_: tokens_dtype, NPU_FLOATS),
            Limit("num_topK", lambda num_topK, **_: num_topK, TOP_K),
        ),
    )
)
