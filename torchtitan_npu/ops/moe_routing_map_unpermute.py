"""``npu_moe_token_unpermute_with_routing_map`` and its gradient: the rows of each token, weighted and added up.

torch_npu builds it on ``_npu_moe_token_unpermute_with_routing_map``: that is the op that autograd, DTensor and
activation checkpointing see, in every home.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import Partial, Placement, Replicate, Shard

from torchtitan_npu.ops.autograd import Autograd, Through
from torchtitan_npu.ops.moe_checks import FLOATS, NPU_FLOATS, TOP_K, has_dim, has_dtype, has_shape
from torchtitan_npu.ops.moe_routing_map import map_contract, probs_dtype_contract
from torchtitan_npu.ops.reference import moe_routing_map as reference
from torchtitan_npu.ops.vocabulary import Limit, Op, declare


def contract(
    permuted_tokens: Tensor,
    sorted_indices: Tensor,
    restore_shape: list[int],
    probs: Tensor | None,
    routing_map: Tensor | None,
    drop_and_pad: bool,
) -> Iterator[str]:
    yield from has_dim("permuted_tokens", permuted_tokens, 2)
    yield from has_dtype("permuted_tokens", permuted_tokens, *FLOATS)
    rows, hidden = permuted_tokens.shape
    yield from has_dtype("sorted_indices", sorted_indices, torch.int32)
    yield from has_shape("sorted_indices", sorted_indices, rows)
    if len(restore_shape) != 2 or restore_shape[1] != hidden:
        yield f"restore_shape must be the number of tokens and the hidden size {hidden}, not {list(restore_shape)}"
    if probs is not None:
        if routing_map is None:
            yield "routing_map must be given with probs"
            return
        yield from probs_dtype_contract("probs", probs, permuted_tokens)
        yield from has_shape("probs", probs, *routing_map.shape)
    if routing_map is not None:
        yield from map_contract(routing_map, restore_shape[0])
    if drop_and_pad and routing_map is not None and rows % max(routing_map.shape[1], 1):
        yield f"permuted_tokens must have as many rows for each of {routing_map.shape[1]} experts, not {rows} in all"
    if not drop_and_pad and rows % max(restore_shape[0], 1):
        yield f"permuted_tokens must have as many rows for each of {restore_shape[0]} tokens, not {rows} in all"


def fake(permuted_tokens: Tensor, restore_shape: list[int], **_: Any) -> Tensor:
    return permuted_tokens.new_empty(restore_shape)


def localize(whole: Any, permuted_tokens: Tensor, restore_shape: list[int], **_: Any) -> dict[str, Any]:
    return {"restore_shape": [restore_shape[0], permuted_tokens.shape[1]]}


LIMITS = (
    Limit("permuted_tokens.dtype", lambda permuted_tokens, **_: permuted_tokens.dtype, NPU_FLOATS),
    Limit(
        "the top-k, permuted rows // tokens,",
        lambda permuted_tokens, restore_shape, drop_and_pad, **_: (
            0 if drop_and_pad else permuted_tokens.shape[0] // max(restore_shape[0], 1)
        ),
        TOP_K,
    ),
)

declare(
    Op(
        schema="npu::npu_moe_token_unpermute_with_routing_map(Tensor permuted_tokens, Tensor sorted_indices, "
        "int[] restore_shape, *, Tensor? probs=None, Tensor? routing_map=None, bool drop_and_pad=False) -> Tensor",
        reference=reference.npu_moe_token_unpermute_with_routing_map,
        fake=fake,
        contract=contract,
        sharding=lambda **_: [([Shard(1)], {"permuted_tokens": Shard(1)})],
        localize=localize,
        autograd=Through("_npu_moe_token_unpermute_with_routing_map"),
        limits=LIMITS,
    )
)


def inner_fake(
    permuted_tokens: Tensor, sorted_indices: Tensor, restore_shape: list[int], probs: Tensor | None, **_: Any
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    index = sorted_indices.new_empty(sorted_indices.shape)
    permuted_probs = None if probs is None else probs.new_empty(sorted_indices.shape)
    return fake(permuted_tokens, restore_shape), index, index.new_empty(index.shape), permuted_probs


def inner_sharding(probs: Any, **_: Any) -> Iterator[tuple[list[Placement | None], dict[str, Placement]]]:
    permuted_probs = None if probs is None else Replicate()
    yield [Shard(1), Replicate(), Replicate(), permuted_probs], {"permuted_tokens": Shard(1)}


def save(
    ctx: Any,
    output: tuple[Tensor, Tensor, Tensor, Tensor | None],
    permuted_tokens: Tensor,
    restore_shape: list[int],
    probs: Tensor | None,
    routing_map: Tensor | None,
    drop_and_pad: bool,
    **_: Any,
) -> None:
    out_index, permuted_token_id, permuted_probs = output[1:]
    # only the gradient of probs reads the rows
    ctx.save_for_backward(out_index, permuted_token_id, routing_map, None if probs is None else permuted_tokens, probs)
    ctx.mark_non_differentiable(*(t for t in (out_index, permuted_token_id, permuted_probs) if t is not None))
    ctx.drop_and_pad, ctx.restore_shape = drop_and_pad, restore_shape


def backward(npu: Any, ctx: Any, grad: Tensor, *_: None) -> dict[str, Tensor | None]:
    grad_permuted, grad_probs = npu.npu_moe_token_unpermute_with_routing_map_grad(
        grad, *ctx.saved_tensors, ctx.drop_and_pad, ctx.restore_shape
    )
    return {"permuted_tokens": grad_permuted, "probs": grad_probs}


declare(
    Op(
        schema="npu::_npu_moe_token_unpermute_with_routing_map(Tensor permuted_tokens, Tensor sorted_indices, "
        "int[] restore_shape, *, Tensor? probs=None, Tensor? routing_map=None, bool drop_and_pad=False) "
        "-> (Tensor, Tensor, Tensor, Tensor)",
        reference=reference._npu_moe_token_unpermute_with_routing_map,
        fake=inner_fake,
        contract=contract,
        sharding=inner_sharding,
        localize=localize,
        autograd=Autograd(save, backward),
        limits=LIMITS,
    )
)


def grad_contract(
    unpermuted_tokens_grad: Tensor,
    out_index: Tensor,
    permuted_token_id: Tensor,
    routing_map: Tensor | None,
    permuted_tokens: Tensor | None,
    probs: Tensor | None,
    drop_and_pad: bool,
    restore_shape: list[int],
) -> Iterator[str]:
    yield from has_dim("unpermuted_tokens_grad", unpermuted_tokens_grad, 2)
    yield from has_dtype("unpermuted_tokens_grad", unpermuted_tokens_grad, *FLOATS)
    yield from has_shape("unpermuted_tokens_grad", unpermuted_tokens_grad, *restore_shape)
    yield from has_dim("out_index", out_index, 1)
    yield from has_dtype("out_index", out_index, torch.int32)
    yield from has_dtype("permuted_token_id", permuted_token_id, torch.int32)
    yield from has_shape("permuted_token_id", permuted_token_id, *out_index.shape)
    if probs is not None:
        if routing_map is None or permuted_tokens is None:
            yield "routing_map and permuted_tokens must be given with probs, whose gradient reads them"
            return
        yield from map_contract(routing_map, restore_shape[0])
        yield from probs_dtype_contract("probs", probs, unpermuted_tokens_grad)
        yield from has_shape("probs", probs, *routing_map.shape)
        yield from has_shape("permuted_tokens", permuted_tokens, out_index.shape[0], restore_shape[1])


def grad_fake(
    unpermuted_tokens_grad: Tensor, out_index: Tensor, probs: Tensor | None, **_: Any
) -> tuple[Tensor, Tensor | None]:
    grad = unpermuted_tokens_grad
    grad_probs = None if probs is None else grad.new_empty(probs.shape)
    return grad.new_empty(out_index.shape[0], grad.shape[1]), grad_probs


def grad_sharding(
    permuted_tokens: Any, probs: Any, **_: Any
) -> Iterator[tuple[list[Placement | None], dict[str, Placement]]]:
    # each rank sums the gradient of probs over its own part of the hidden dimension
    placements: dict[str, Placement] = {"unpermuted_tokens_grad": Shard(1)}
    if permuted_tokens is not None:
        placements["permuted_tokens"] = Shard(1)
    yield [Shard(1), None if probs is None else Partial()], placements


def grad_localize(whole: Any, unpermuted_tokens_grad: Tensor, restore_shape: list[int], **_: Any) -> dict[str, Any]:
    return {"restore_shape": [restore_shape[0], unpermuted_tokens_grad.shape[1]]}


declare(
    Op(
        schema="npu::npu_moe_token_unpermute_with_routing_map_grad(Tensor unpermuted_tokens_grad, Tensor out_index, "
        "Tensor permuted_token_id, Tensor? routing_map, Tensor? permuted_tokens, Tensor? probs, bool drop_and_pad, "
        "int[] restore_shape) -> (Tensor, Tensor)",
        reference=reference.npu_moe_token_unpermute_with_routing_map_grad,
        fake=grad_fake,
        contract=grad_contract,
        sharding=grad_sharding,
        localize=grad_localize,
        limits=(
            Limit(
                "unpermuted_tokens_grad.dtype",
                lambda unpermuted_tokens_grad, **_: unpermuted_tokens_grad.dtype,
                NPU_FLOATS,
            ),
        ),
    )
)
