"""``npu_moe_token_unpermute`` and its gradients: the rows of each token, weighted and added up in the tokens' order.

torch_npu builds it on ``_npu_moe_token_unpermute``: that is the op that autograd, DTensor and activation checkpointing
see, in every backend.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import Partial, Placement, Replicate, Shard

from torchtitan_npu.ops.core.autograd import Autograd, Through
from torchtitan_npu.ops.core.op import Limit, Op, declare
from torchtitan_npu.ops.core.triton_kernel import kernel
from torchtitan_npu.ops.moe_permute import reference as reference
from torchtitan_npu.ops.moe_permute.checks import FLOATS, NPU_FLOATS, TOP_K, has_dim, has_dtype, has_shape, is_unpadded


def _tokens(sorted_indices: Tensor, probs: Tensor | None) -> int:
    return sorted_indices.shape[0] if probs is None else probs.shape[0]


def contract(
    permuted_tokens: Tensor,
    sorted_indices: Tensor,
    probs: Tensor | None,
    padded_mode: bool,
    restore_shape: list[int] | None,
) -> Iterator[str]:
    yield from is_unpadded(padded_mode, restore_shape)
    yield from has_dim("permuted_tokens", permuted_tokens, 2)
    yield from has_dtype("permuted_tokens", permuted_tokens, *FLOATS)
    yield from slots_contract(sorted_indices, probs, permuted_tokens.shape[0])


def slots_contract(sorted_indices: Tensor, probs: Tensor | None, rows: int) -> Iterator[str]:
    """The places and weights of the slots, for so many permuted ``rows``."""
    yield from has_dim("sorted_indices", sorted_indices, 1)
    yield from has_dtype("sorted_indices", sorted_indices, torch.int32)
    slots = sorted_indices.shape[0]
    if probs is not None:
        yield from has_dim("probs", probs, 2)
        yield from has_dtype("probs", probs, *FLOATS)
        if probs.numel() != slots:
            yield f"probs must have an element for each of the {slots} sorted_indices, not {probs.numel()}"
    if rows > slots:
        yield f"permuted_tokens must have at most a row for each of the {slots} sorted_indices, not {rows}"


def fake(permuted_tokens: Tensor, sorted_indices: Tensor, probs: Tensor | None, **_: Any) -> Tensor:
    return permuted_tokens.new_empty(_tokens(sorted_indices, probs), permuted_tokens.shape[1])


LIMITS = (
    Limit("permuted_tokens.dtype", lambda permuted_tokens, **_: permuted_tokens.dtype, NPU_FLOATS),
    Limit("the top-k of probs", lambda probs, **_: 1 if probs is None else probs.shape[1], TOP_K),
)

declare(
    Op(
        schema="npu::npu_moe_token_unpermute(Tensor permuted_tokens, Tensor sorted_indices, Tensor? probs=None, "
        "bool padded_mode=False, int[]? restore_shape=None) -> Tensor",
        reference=reference.npu_moe_token_unpermute,
        cuda=kernel("moe_permute.triton", "npu_moe_token_unpermute", reference.npu_moe_token_unpermute),
        fake=fake,
        contract=contract,
        sharding=lambda **_: [([Shard(1)], {"permuted_tokens": Shard(1)})],
        autograd=Through("_npu_moe_token_unpermute"),
        limits=LIMITS,
    )
)


def inner_fake(permuted_tokens: Tensor, **forward: Any) -> tuple[Tensor, Tensor]:
    return fake(permuted_tokens, **forward), torch.empty_like(permuted_tokens)


def save(
    ctx: Any,
    output: tuple[Tensor, Tensor],
    permuted_tokens: Tensor,
    sorted_indices: Tensor,
    probs: Tensor | None,
    **_: Any,
) -> None:
    # only the gradient of probs reads the rows, and the argument serves as well as its copy among the outputs
    ctx.save_for_backward(sorted_indices, probs, None if probs is None else permuted_tokens)
    ctx.rows, ctx.dtype = permuted_tokens.shape[0], permuted_tokens.dtype


def backward(npu: Any, ctx: Any, grad: Tensor | None, grad_of_copy: Tensor | None) -> dict[str, Tensor | None]:
    sorted_indices, probs, permuted_tokens = ctx.saved_tensors
    if grad is None:
        return {"permuted_tokens": grad_of_copy}
    grad_permuted, grad_probs = npu.npu_moe_token_unpermute_grad_v2(
        grad, sorted_indices, ctx.rows, ctx.dtype, probs, False, None, permuted_tokens
    )
    if grad_of_copy is not None:
        grad_permuted = grad_permuted + grad_of_copy
    return {"permuted_tokens": grad_permuted, "probs": grad_probs}


declare(
    Op(
        schema="npu::_npu_moe_token_unpermute(Tensor permuted_tokens, Tensor sorted_indices, Tensor? probs=None, "
        "bool padded_mode=False, int[]? restore_shape=None) -> "
        "(Tensor unpermuted_tokens, Tensor permuted_tokens_for_backward)",
        reference=reference._npu_moe_token_unpermute,
        cuda=kernel("moe_permute.triton", "_npu_moe_token_unpermute", reference._npu_moe_token_unpermute),
        fake=inner_fake,
        contract=contract,
        sharding=lambda **_: [([Shard(1), Shard(1)], {"permuted_tokens": Shard(1)})],
        autograd=Autograd(save, backward),
        limits=LIMITS,
    )
)


def grad_contract(permuted_tokens: Tensor, grad_unpermuted_tokens: Tensor, **forward: Any) -> Iterator[str]:
    yield from contract(permuted_tokens, **forward)
    yield from has_dtype("grad_unpermuted_tokens", grad_unpermuted_tokens, *FLOATS)
    shape = _tokens(forward["sorted_indices"], forward["probs"]), permuted_tokens.shape[1]
    yield from has_shape("grad_unpermuted_tokens", grad_unpermuted_tokens, *shape)


def grad_fake(permuted_tokens: Tensor, probs: Tensor | None, **_: Any) -> tuple[Tensor, Tensor | None]:
    return torch.empty_like(permuted_tokens), None if probs is None else torch.empty_like(probs)


def grad_sharding(
    probs: Any, permuted_tokens: Any, **_: Any
) -> Iterator[tuple[list[Placement | None], dict[str, Placement]]]:
    # each rank sums the gradient of probs over its own part of the hidden dimension
    placements: dict[str, Placement] = {"grad_unpermuted_tokens": Shard(1), "sorted_indices": Replicate()}
    if permuted_tokens is not None:
        placements["permuted_tokens"] = Shard(1)
    yield [Shard(1), None if probs is None else Partial()], placements


declare(
    Op(
        schema="npu::npu_moe_token_unpermute_grad(Tensor permuted_tokens, Tensor grad_unpermuted_tokens, "
        "Tensor sorted_indices, Tensor? probs=None, bool padded_mode=False, int[]? restore_shape=None) "
        "-> (Tensor, Tensor)",
        reference=reference.npu_moe_token_unpermute_grad,
        cuda=kernel("moe_permute.triton", "npu_moe_token_unpermute_grad", reference.npu_moe_token_unpermute_grad),
        fake=grad_fake,
        contract=grad_contract,
        sharding=grad_sharding,
        limits=LIMITS,
    )
)


def grad_v2_contract(
    grad_unpermuted_tokens: Tensor,
    sorted_indices: Tensor,
    permuted_tokens_size_0: int,
    permuted_tokens_dtype: torch.dtype,
    probs: Tensor | None,
    padded_mode: bool,
    restore_shape: list[int] | None,
    permuted_tokens: Tensor | None,
) -> Iterator[str]:
    yield from is_unpadded(padded_mode, restore_shape)
    yield from has_dim("grad_unpermuted_tokens", grad_unpermuted_tokens, 2)
    yield from has_dtype("grad_unpermuted_tokens", grad_unpermuted_tokens, *FLOATS)
    yield from slots_contract(sorted_indices, probs, permuted_tokens_size_0)
    tokens, hidden = _tokens(sorted_indices, probs), grad_unpermuted_tokens.shape[1]
    yield from has_shape("grad_unpermuted_tokens", grad_unpermuted_tokens, tokens, hidden)
    if permuted_tokens_dtype not in FLOATS:
        yield f"permuted_tokens_dtype must be float16, bfloat16 or float32, not {permuted_tokens_dtype}"
    if permuted_tokens is not None:
        yield from has_shape("permuted_tokens", permuted_tokens, permuted_tokens_size_0, hidden)
    elif probs is not None:
        yield "permuted_tokens must be given with probs, whose gradient reads it"


def grad_v2_fake(
    grad_unpermuted_tokens: Tensor,
    permuted_tokens_size_0: int,
    permuted_tokens_dtype: torch.dtype,
    probs: Tensor | None,
    **_: Any,
) -> tuple[Tensor, Tensor | None]:
    shape = permuted_tokens_size_0, grad_unpermuted_tokens.shape[1]
    grad = grad_unpermuted_tokens.new_empty(shape, dtype=permuted_tokens_dtype)
    return grad, None if probs is None else torch.empty_like(probs)


declare(
    Op(
        schema="npu::npu_moe_token_unpermute_grad_v2(Tensor grad_unpermuted_tokens, Tensor sorted_indices, "
        "SymInt permuted_tokens_size_0, ScalarType permuted_tokens_dtype, Tensor? probs=None, "
        "bool padded_mode=False, int[]? restore_shape=None, Tensor? permuted_tokens=None) -> (Tensor, Tensor)",
        reference=reference.npu_moe_token_unpermute_grad_v2,
        cuda=kernel("moe_permute.triton", "npu_moe_token_unpermute_grad_v2", reference.npu_moe_token_unpermute_grad_v2),
        fake=grad_v2_fake,
        contract=grad_v2_contract,
        sharding=grad_sharding,
        limits=(
            Limit("permuted_tokens_dtype", lambda permuted_tokens_dtype, **_: permuted_tokens_dtype, NPU_FLOATS),
            LIMITS[1],
        ),
    )
)
