"""``npu_moe_token_permute``, ``npu_moe_token_unpermute`` and their gradients: MoE dispatch and combine.

Permute copies each token once for each of its experts and sorts the copies by expert. Unpermute sums the rows of each
token, weighted, in the order of the tokens. torch_npu implements unpermute as a call of ``_npu_moe_token_unpermute``:
on every backend, that is the operator that autograd, DTensor and activation checkpointing see.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import Partial, Placement, Replicate, Shard

from torchtitan_npu.ops.core.arguments import Call
from torchtitan_npu.ops.core.autograd import Autograd, Through
from torchtitan_npu.ops.core.checks import FLOATS, NPU_FLOATS, check_dim, check_dtype, check_shape
from torchtitan_npu.ops.core.op import Limit, Op, declare
from torchtitan_npu.ops.core.sharding import Strategy
from torchtitan_npu.ops.moe_permute import reference

EXACT_INTEGERS = range(16777215)
"""An NPU sorts integers as float32, which is exact for these."""
NPU_TOP_K = range(513)


def _check_unpadded(padded_mode: bool, restore_shape: Any = None) -> Iterator[str]:
    if padded_mode:
        yield "padded_mode must be False, the only mode the NPU has"
    if restore_shape is not None:
        yield f"restore_shape belongs to padded_mode, which the NPU does not have: it must be None, not {restore_shape}"


# npu_moe_token_permute


def _top_k(indices: Tensor) -> int:
    return indices.shape[1] if indices.dim() == 2 else 1


def _rows(call: Call) -> int:
    """Return the number of rows that the slice ``[:num_out_tokens]`` keeps; all of them for ``None`` and 0."""
    end, slots = call.num_out_tokens or 0, call.indices.numel()
    return min(end, slots) if end > 0 else slots + end


def permute_checks(call: Call) -> Iterator[str]:
    yield from _check_unpadded(call.padded_mode)
    yield from check_dim("tokens", call.tokens, 2)
    yield from check_dtype("tokens", call.tokens, *FLOATS)
    yield from check_dim("indices", call.indices, 1, 2)
    yield from check_dtype("indices", call.indices, torch.int32, torch.int64)
    if call.indices.shape[0] != call.tokens.shape[0]:
        yield f"indices must have a row for each of the {call.tokens.shape[0]} tokens, not {call.indices.shape[0]} rows"
    if _rows(call) < 0:
        slots = call.indices.numel()
        yield f"num_out_tokens must be at least -{slots}, the number of indices, not {call.num_out_tokens}"


def permute_fake(call: Call) -> tuple[Tensor, Tensor]:
    permuted = call.tokens.new_empty(_rows(call), call.tokens.shape[1])
    return permuted, call.tokens.new_empty(call.indices.numel(), dtype=torch.int32)


def permute_sharding(call: Call) -> Iterator[Strategy]:
    yield [Shard(1), Replicate()], {"tokens": Shard(1)}


def permute_save(ctx: Any, output: tuple[Tensor, Tensor], call: Call) -> None:
    ctx.save_for_backward(output[1])
    ctx.mark_non_differentiable(output[1])
    ctx.tokens, ctx.dtype, ctx.top_k = call.tokens.shape[0], call.tokens.dtype, _top_k(call.indices)


def permute_backward(npu: Any, ctx: Any, grad: Tensor, _: None) -> dict[str, Tensor]:
    (sorted_indices,) = ctx.saved_tensors
    return {"tokens": npu.npu_moe_token_permute_grad_v2(grad, sorted_indices, ctx.tokens, ctx.dtype, ctx.top_k)}


declare(
    Op(
        schema="npu::npu_moe_token_permute(Tensor tokens, Tensor indices, int? num_out_tokens=None, "
        "bool padded_mode=False) -> (Tensor, Tensor)",
        reference=reference.npu_moe_token_permute,
        fake=permute_fake,
        checks=permute_checks,
        sharding=permute_sharding,
        autograd=Autograd(permute_save, permute_backward),
        limits=(
            Limit("tokens.dtype", lambda call: call.tokens.dtype, NPU_FLOATS),
            Limit("the number of indices", lambda call: call.indices.numel(), EXACT_INTEGERS),
            Limit("the top-k of indices", lambda call: _top_k(call.indices), NPU_TOP_K),
        ),
    )
)


def permute_grad_checks(call: Call) -> Iterator[str]:
    yield from _check_unpadded(call.padded_mode)
    grad, slots = call.grad_permuted_tokens, call.sorted_indices.shape[0]
    yield from check_dim("grad_permuted_tokens", grad, 2)
    yield from check_dtype("grad_permuted_tokens", grad, *FLOATS)
    yield from check_dim("sorted_indices", call.sorted_indices, 1)
    yield from check_dtype("sorted_indices", call.sorted_indices, torch.int32)
    yield from check_shape("sorted_indices", call.sorted_indices, call.tokens_size_0 * call.num_topK)
    if call.tokens_dtype not in FLOATS:
        yield f"tokens_dtype must be float16, bfloat16 or float32, not {call.tokens_dtype}"
    if grad.shape[0] > slots:
        yield f"grad_permuted_tokens must have at most a row for each of the {slots} sorted_indices, not {len(grad)}"


def permute_grad_fake(call: Call) -> Tensor:
    grad = call.grad_permuted_tokens
    return grad.new_empty(call.tokens_size_0, grad.shape[1], dtype=call.tokens_dtype)


declare(
    Op(
        schema="npu::npu_moe_token_permute_grad_v2(Tensor grad_permuted_tokens, Tensor sorted_indices, "
        "SymInt tokens_size_0, ScalarType tokens_dtype, SymInt num_topK, bool padded_mode=False) -> Tensor",
        reference=reference.npu_moe_token_permute_grad_v2,
        fake=permute_grad_fake,
        checks=permute_grad_checks,
        sharding=lambda call: [([Shard(1)], {"grad_permuted_tokens": Shard(1)})],
        limits=(
            Limit("tokens_dtype", lambda call: call.tokens_dtype, NPU_FLOATS),
            Limit("num_topK", lambda call: call.num_topK, NPU_TOP_K),
        ),
    )
)


# npu_moe_token_unpermute


def _tokens(call: Call) -> int:
    return call.sorted_indices.shape[0] if call.probs is None else call.probs.shape[0]


def unpermute_checks(call: Call) -> Iterator[str]:
    yield from _check_unpadded(call.padded_mode, call.restore_shape)
    yield from check_dim("permuted_tokens", call.permuted_tokens, 2)
    yield from check_dtype("permuted_tokens", call.permuted_tokens, *FLOATS)
    yield from _check_slots(call, call.permuted_tokens.shape[0])


def _check_slots(call: Call, rows: int) -> Iterator[str]:
    """Check the positions and weights of the slots, given the number of permuted ``rows``."""
    sorted_indices, probs = call.sorted_indices, call.probs
    yield from check_dim("sorted_indices", sorted_indices, 1)
    yield from check_dtype("sorted_indices", sorted_indices, torch.int32)
    slots = sorted_indices.shape[0]
    if probs is not None:
        yield from check_dim("probs", probs, 2)
        yield from check_dtype("probs", probs, *FLOATS)
        if probs.numel() != slots:
            yield f"probs must have an element for each of the {slots} sorted_indices, not {probs.numel()}"
    if rows > slots:
        yield f"permuted_tokens must have at most a row for each of the {slots} sorted_indices, not {rows}"


def unpermute_fake(call: Call) -> Tensor:
    return call.permuted_tokens.new_empty(_tokens(call), call.permuted_tokens.shape[1])


def _dtype_of_all(*dtypes: torch.dtype) -> str:
    """Return the name of the common dtype, or ``"bfloat16 and float32"`` if there is none."""
    return " and ".join(dict.fromkeys(str(dtype).removeprefix("torch.") for dtype in dtypes))


ONE_DTYPE = tuple(map(_dtype_of_all, NPU_FLOATS))
"""CANN documents any pair of dtypes, but for different dtypes the NPU's gradient kernel returns NaN."""
LIMIT_OF_TOP_K = Limit("the top-k of probs", lambda call: 1 if call.probs is None else call.probs.shape[1], NPU_TOP_K)
UNPERMUTE_LIMITS = (
    Limit("permuted_tokens.dtype", lambda call: call.permuted_tokens.dtype, NPU_FLOATS),
    Limit(
        "the dtype of permuted_tokens and probs",
        lambda call: _dtype_of_all(
            call.permuted_tokens.dtype, call.permuted_tokens.dtype if call.probs is None else call.probs.dtype
        ),
        ONE_DTYPE,
    ),
    LIMIT_OF_TOP_K,
)

declare(
    Op(
        schema="npu::npu_moe_token_unpermute(Tensor permuted_tokens, Tensor sorted_indices, Tensor? probs=None, "
        "bool padded_mode=False, int[]? restore_shape=None) -> Tensor",
        reference=reference.npu_moe_token_unpermute,
        fake=unpermute_fake,
        checks=unpermute_checks,
        sharding=lambda call: [([Shard(1)], {"permuted_tokens": Shard(1)})],
        autograd=Through("_npu_moe_token_unpermute"),
        limits=UNPERMUTE_LIMITS,
    )
)


def unpermute_and_rows_fake(call: Call) -> tuple[Tensor, Tensor]:
    return unpermute_fake(call), torch.empty_like(call.permuted_tokens)


def unpermute_save(ctx: Any, output: tuple[Tensor, Tensor], call: Call) -> None:
    # Only the gradient of probs reads the rows. Saving the argument keeps the copy among the outputs free to go.
    ctx.save_for_backward(call.sorted_indices, call.probs, None if call.probs is None else call.permuted_tokens)
    ctx.rows, ctx.dtype = call.permuted_tokens.shape[0], call.permuted_tokens.dtype


def unpermute_backward(
    npu: Any, ctx: Any, grad: Tensor | None, grad_of_rows: Tensor | None
) -> dict[str, Tensor | None]:
    sorted_indices, probs, permuted_tokens = ctx.saved_tensors
    if grad is None:
        return {"permuted_tokens": grad_of_rows}
    grad_permuted, grad_probs = npu.npu_moe_token_unpermute_grad_v2(
        grad, sorted_indices, ctx.rows, ctx.dtype, probs, False, None, permuted_tokens
    )
    if grad_of_rows is not None:
        grad_permuted = grad_permuted + grad_of_rows
    return {"permuted_tokens": grad_permuted, "probs": grad_probs}


declare(
    Op(
        schema="npu::_npu_moe_token_unpermute(Tensor permuted_tokens, Tensor sorted_indices, Tensor? probs=None, "
        "bool padded_mode=False, int[]? restore_shape=None) -> "
        "(Tensor unpermuted_tokens, Tensor permuted_tokens_for_backward)",
        reference=reference.unpermute_and_rows,
        fake=unpermute_and_rows_fake,
        checks=unpermute_checks,
        sharding=lambda call: [([Shard(1), Shard(1)], {"permuted_tokens": Shard(1)})],
        autograd=Autograd(unpermute_save, unpermute_backward),
        limits=UNPERMUTE_LIMITS,
    )
)


def unpermute_grad_checks(call: Call) -> Iterator[str]:
    yield from _check_unpadded(call.padded_mode, call.restore_shape)
    yield from check_dim("grad_unpermuted_tokens", call.grad_unpermuted_tokens, 2)
    yield from check_dtype("grad_unpermuted_tokens", call.grad_unpermuted_tokens, *FLOATS)
    yield from _check_slots(call, call.permuted_tokens_size_0)
    tokens, hidden = _tokens(call), call.grad_unpermuted_tokens.shape[1]
    yield from check_shape("grad_unpermuted_tokens", call.grad_unpermuted_tokens, tokens, hidden)
    if call.permuted_tokens_dtype not in FLOATS:
        yield f"permuted_tokens_dtype must be float16, bfloat16 or float32, not {call.permuted_tokens_dtype}"
    if call.permuted_tokens is not None:
        yield from check_shape("permuted_tokens", call.permuted_tokens, call.permuted_tokens_size_0, hidden)
    elif call.probs is not None:
        yield "permuted_tokens must be given with probs, whose gradient reads it"


def unpermute_grad_fake(call: Call) -> tuple[Tensor, Tensor | None]:
    shape = call.permuted_tokens_size_0, call.grad_unpermuted_tokens.shape[1]
    grad = call.grad_unpermuted_tokens.new_empty(shape, dtype=call.permuted_tokens_dtype)
    return grad, None if call.probs is None else torch.empty_like(call.probs)


def unpermute_grad_sharding(call: Call) -> Iterator[Strategy]:
    # each rank sums the gradient of probs over its own part of the hidden dimension
    placements: dict[str, Placement] = {"grad_unpermuted_tokens": Shard(1), "sorted_indices": Replicate()}
    if call.permuted_tokens is not None:
        placements["permuted_tokens"] = Shard(1)
    yield [Shard(1), None if call.probs is None else Partial()], placements


declare(
    Op(
        schema="npu::npu_moe_token_unpermute_grad_v2(Tensor grad_unpermuted_tokens, Tensor sorted_indices, "
        "SymInt permuted_tokens_size_0, ScalarType permuted_tokens_dtype, Tensor? probs=None, "
        "bool padded_mode=False, int[]? restore_shape=None, Tensor? permuted_tokens=None) -> (Tensor, Tensor)",
        reference=reference.npu_moe_token_unpermute_grad_v2,
        fake=unpermute_grad_fake,
        checks=unpermute_grad_checks,
        sharding=unpermute_grad_sharding,
        limits=(
            Limit("permuted_tokens_dtype", lambda call: call.permuted_tokens_dtype, NPU_FLOATS),
            Limit(
                "the dtype of grad_unpermuted_tokens, permuted_tokens and probs",
                lambda call: _dtype_of_all(
                    call.grad_unpermuted_tokens.dtype,
                    call.permuted_tokens_dtype,
                    *(tensor.dtype for tensor in (call.permuted_tokens, call.probs) if tensor is not None),
                ),
                ONE_DTYPE,
            ),
            LIMIT_OF_TOP_K,
            # required before CANN 9.1
            Limit("whether permuted_tokens is given", lambda call: call.permuted_tokens is not None, (True, False)),
        ),
    )
)
