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

from torchtitan_npu.ops.core.autograd import Autograd, Through
from torchtitan_npu.ops.core.call_description import TensorDescription
from torchtitan_npu.ops.core.checks import FLOATS, NPU_FLOATS, check_dim, check_dtype, check_shape
from torchtitan_npu.ops.core.op import Limit, Op, declare
from torchtitan_npu.ops.core.samples import EXPERTS, HIDDEN, MATRIX, TOKENS, TOP_K, randn, randn_like
from torchtitan_npu.ops.core.sharding import Strategy
from torchtitan_npu.ops.core.triton_kernel import kernel
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


def _rows(indices: Tensor, num_out_tokens: int | None) -> int:
    """Return the number of rows that the slice ``[:num_out_tokens]`` keeps; all of them for ``None`` and 0."""
    end, slots = num_out_tokens or 0, indices.numel()
    return min(end, slots) if end > 0 else slots + end


def permute_checks(
    tokens: Tensor, indices: Tensor, num_out_tokens: int | None, padded_mode: bool, **_: Any
) -> Iterator[str]:
    yield from _check_unpadded(padded_mode)
    yield from check_dim("tokens", tokens, 2)
    yield from check_dtype("tokens", tokens, *FLOATS)
    yield from check_dim("indices", indices, 1, 2)
    yield from check_dtype("indices", indices, torch.int32, torch.int64)
    if indices.shape[0] != tokens.shape[0]:
        yield f"indices must have a row for each of the {tokens.shape[0]} tokens, not {indices.shape[0]} rows"
    if _rows(indices, num_out_tokens) < 0:
        yield f"num_out_tokens must be at least -{indices.numel()}, the number of indices, not {num_out_tokens}"


def permute_fake(tokens: Tensor, indices: Tensor, num_out_tokens: int | None, **_: Any) -> tuple[Tensor, Tensor]:
    permuted = tokens.new_empty(_rows(indices, num_out_tokens), tokens.shape[1])
    return permuted, tokens.new_empty(indices.numel(), dtype=torch.int32)


def permute_sharding(**_: Any) -> Iterator[Strategy]:
    yield [Shard(1), Replicate()], {"tokens": Shard(1)}


def permute_save(ctx: Any, output: tuple[Tensor, Tensor], tokens: Tensor, indices: Tensor, **_: Any) -> None:
    ctx.save_for_backward(output[1])
    ctx.mark_non_differentiable(output[1])
    ctx.tokens, ctx.dtype, ctx.top_k = tokens.shape[0], tokens.dtype, _top_k(indices)


def permute_backward(npu: Any, ctx: Any, grad: Tensor, _: None) -> dict[str, Tensor]:
    (sorted_indices,) = ctx.saved_tensors
    return {"tokens": npu.npu_moe_token_permute_grad_v2(grad, sorted_indices, ctx.tokens, ctx.dtype, ctx.top_k)}


INDICES = TensorDescription(torch.int32, 2)


def permute_sample(
    tokens: TensorDescription = MATRIX, indices: TensorDescription = INDICES, **_: Any
) -> dict[str, Any]:
    experts = torch.stack([torch.randperm(EXPERTS)[:TOP_K] for _ in range(TOKENS)]).to(indices.dtype)
    return {"tokens": randn_like(tokens, HIDDEN), "indices": experts if indices.dims == 2 else experts[:, 0]}


def _sample_sorted_indices() -> Tensor:
    return torch.randperm(TOKENS * TOP_K).int()


declare(
    Op(
        schema="npu::npu_moe_token_permute(Tensor tokens, Tensor indices, int? num_out_tokens=None, "
        "bool padded_mode=False) -> (Tensor, Tensor)",
        reference=reference.npu_moe_token_permute,
        cuda=kernel(reference.npu_moe_token_permute),
        fake=permute_fake,
        checks=permute_checks,
        sharding=permute_sharding,
        autograd=Autograd(permute_save, permute_backward),
        limits=(
            Limit("tokens.dtype", lambda tokens, **_: tokens.dtype, NPU_FLOATS),
            Limit("the number of indices", lambda indices, **_: indices.numel(), EXACT_INTEGERS),
            Limit("the top-k of indices", lambda indices, **_: _top_k(indices), NPU_TOP_K),
        ),
        sample=permute_sample,
    )
)


def permute_grad_checks(
    grad_permuted_tokens: Tensor,
    sorted_indices: Tensor,
    tokens_size_0: int,
    tokens_dtype: torch.dtype,
    num_topK: int,
    padded_mode: bool,
) -> Iterator[str]:
    yield from _check_unpadded(padded_mode)
    yield from check_dim("grad_permuted_tokens", grad_permuted_tokens, 2)
    yield from check_dtype("grad_permuted_tokens", grad_permuted_tokens, *FLOATS)
    yield from check_dim("sorted_indices", sorted_indices, 1)
    yield from check_dtype("sorted_indices", sorted_indices, torch.int32)
    yield from check_shape("sorted_indices", sorted_indices, tokens_size_0 * num_topK)
    if tokens_dtype not in FLOATS:
        yield f"tokens_dtype must be float16, bfloat16 or float32, not {tokens_dtype}"
    if grad_permuted_tokens.shape[0] > sorted_indices.shape[0]:
        yield (
            f"grad_permuted_tokens must have at most a row for each of the {sorted_indices.shape[0]} sorted_indices, "
            f"not {grad_permuted_tokens.shape[0]}"
        )


def permute_grad_fake(grad_permuted_tokens: Tensor, tokens_size_0: int, tokens_dtype: torch.dtype, **_: Any) -> Tensor:
    return grad_permuted_tokens.new_empty(tokens_size_0, grad_permuted_tokens.shape[1], dtype=tokens_dtype)


def permute_grad_sample(tokens_dtype: torch.dtype = torch.bfloat16, **_: Any) -> dict[str, Any]:
    return {
        "grad_permuted_tokens": randn(TOKENS * TOP_K, HIDDEN, dtype=tokens_dtype),
        "sorted_indices": _sample_sorted_indices(),
        "tokens_size_0": TOKENS,
        "tokens_dtype": tokens_dtype,
        "num_topK": TOP_K,
    }


declare(
    Op(
        schema="npu::npu_moe_token_permute_grad_v2(Tensor grad_permuted_tokens, Tensor sorted_indices, "
        "SymInt tokens_size_0, ScalarType tokens_dtype, SymInt num_topK, bool padded_mode=False) -> Tensor",
        reference=reference.npu_moe_token_permute_grad_v2,
        cuda=kernel(reference.npu_moe_token_permute_grad_v2),
        fake=permute_grad_fake,
        checks=permute_grad_checks,
        sharding=lambda **_: [([Shard(1)], {"grad_permuted_tokens": Shard(1)})],
        limits=(
            Limit("tokens_dtype", lambda tokens_dtype, **_: tokens_dtype, NPU_FLOATS),
            Limit("num_topK", lambda num_topK, **_: num_topK, NPU_TOP_K),
        ),
        sample=permute_grad_sample,
    )
)


# npu_moe_token_unpermute


def _tokens(sorted_indices: Tensor, probs: Tensor | None) -> int:
    return sorted_indices.shape[0] if probs is None else probs.shape[0]


def unpermute_checks(
    permuted_tokens: Tensor,
    sorted_indices: Tensor,
    probs: Tensor | None,
    padded_mode: bool,
    restore_shape: list[int] | None,
) -> Iterator[str]:
    yield from _check_unpadded(padded_mode, restore_shape)
    yield from check_dim("permuted_tokens", permuted_tokens, 2)
    yield from check_dtype("permuted_tokens", permuted_tokens, *FLOATS)
    yield from _check_slots(sorted_indices, probs, permuted_tokens.shape[0])


def _check_slots(sorted_indices: Tensor, probs: Tensor | None, rows: int) -> Iterator[str]:
    """Check the positions and weights of the slots, given the number of permuted ``rows``."""
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


def unpermute_fake(permuted_tokens: Tensor, sorted_indices: Tensor, probs: Tensor | None, **_: Any) -> Tensor:
    return permuted_tokens.new_empty(_tokens(sorted_indices, probs), permuted_tokens.shape[1])


def unpermute_sample(
    permuted_tokens: TensorDescription = MATRIX, probs: TensorDescription | None = None, **_: Any
) -> dict[str, Any]:
    return {
        "permuted_tokens": randn(TOKENS * TOP_K, HIDDEN, dtype=permuted_tokens.dtype),
        "sorted_indices": _sample_sorted_indices(),
        "probs": None if probs is None else torch.rand(TOKENS, TOP_K).to(probs.dtype),
    }


def _dtype_of_all(*dtypes: torch.dtype) -> str:
    """Return the name of the common dtype, or ``"bfloat16 and float32"`` if there is none."""
    return " and ".join(dict.fromkeys(str(dtype).removeprefix("torch.") for dtype in dtypes))


ONE_DTYPE = tuple(map(_dtype_of_all, NPU_FLOATS))
"""CANN documents any pair of dtypes, but for different dtypes the NPU's gradient kernel returns NaN."""
LIMIT_OF_TOP_K = Limit("the top-k of probs", lambda probs, **_: 1 if probs is None else probs.shape[1], NPU_TOP_K)
UNPERMUTE_LIMITS = (
    Limit("permuted_tokens.dtype", lambda permuted_tokens, **_: permuted_tokens.dtype, NPU_FLOATS),
    Limit(
        "the dtype of permuted_tokens and probs",
        lambda permuted_tokens, probs, **_: _dtype_of_all(
            permuted_tokens.dtype, permuted_tokens.dtype if probs is None else probs.dtype
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
        cuda=kernel(reference.npu_moe_token_unpermute),
        fake=unpermute_fake,
        checks=unpermute_checks,
        sharding=lambda **_: [([Shard(1)], {"permuted_tokens": Shard(1)})],
        autograd=Through("_npu_moe_token_unpermute"),
        limits=UNPERMUTE_LIMITS,
        sample=unpermute_sample,
    )
)


def unpermute_and_rows_fake(permuted_tokens: Tensor, **forward: Any) -> tuple[Tensor, Tensor]:
    return unpermute_fake(permuted_tokens, **forward), torch.empty_like(permuted_tokens)


def unpermute_save(
    ctx: Any,
    output: tuple[Tensor, Tensor],
    permuted_tokens: Tensor,
    sorted_indices: Tensor,
    probs: Tensor | None,
    **_: Any,
) -> None:
    # Only the gradient of probs reads the rows. Saving the argument keeps the copy among the outputs free to go.
    ctx.save_for_backward(sorted_indices, probs, None if probs is None else permuted_tokens)
    ctx.rows, ctx.dtype = permuted_tokens.shape[0], permuted_tokens.dtype


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
        cuda=kernel(reference.unpermute_and_rows),
        fake=unpermute_and_rows_fake,
        checks=unpermute_checks,
        sharding=lambda **_: [([Shard(1), Shard(1)], {"permuted_tokens": Shard(1)})],
        autograd=Autograd(unpermute_save, unpermute_backward),
        limits=UNPERMUTE_LIMITS,
        sample=unpermute_sample,
        unused_outputs=(1,),  # a copy of the rows; CANN 9.1 has none without probs
    )
)


def unpermute_grad_checks(
    grad_unpermuted_tokens: Tensor,
    sorted_indices: Tensor,
    permuted_tokens_size_0: int,
    permuted_tokens_dtype: torch.dtype,
    probs: Tensor | None,
    padded_mode: bool,
    restore_shape: list[int] | None,
    permuted_tokens: Tensor | None,
) -> Iterator[str]:
    yield from _check_unpadded(padded_mode, restore_shape)
    yield from check_dim("grad_unpermuted_tokens", grad_unpermuted_tokens, 2)
    yield from check_dtype("grad_unpermuted_tokens", grad_unpermuted_tokens, *FLOATS)
    yield from _check_slots(sorted_indices, probs, permuted_tokens_size_0)
    tokens, hidden = _tokens(sorted_indices, probs), grad_unpermuted_tokens.shape[1]
    yield from check_shape("grad_unpermuted_tokens", grad_unpermuted_tokens, tokens, hidden)
    if permuted_tokens_dtype not in FLOATS:
        yield f"permuted_tokens_dtype must be float16, bfloat16 or float32, not {permuted_tokens_dtype}"
    if permuted_tokens is not None:
        yield from check_shape("permuted_tokens", permuted_tokens, permuted_tokens_size_0, hidden)
    elif probs is not None:
        yield "permuted_tokens must be given with probs, whose gradient reads it"


def unpermute_grad_fake(
    grad_unpermuted_tokens: Tensor,
    permuted_tokens_size_0: int,
    permuted_tokens_dtype: torch.dtype,
    probs: Tensor | None,
    **_: Any,
) -> tuple[Tensor, Tensor | None]:
    shape = permuted_tokens_size_0, grad_unpermuted_tokens.shape[1]
    grad = grad_unpermuted_tokens.new_empty(shape, dtype=permuted_tokens_dtype)
    return grad, None if probs is None else torch.empty_like(probs)


def unpermute_grad_sharding(probs: Any, permuted_tokens: Any, **_: Any) -> Iterator[Strategy]:
    # each rank sums the gradient of probs over its own part of the hidden dimension
    placements: dict[str, Placement] = {"grad_unpermuted_tokens": Shard(1), "sorted_indices": Replicate()}
    if permuted_tokens is not None:
        placements["permuted_tokens"] = Shard(1)
    yield [Shard(1), None if probs is None else Partial()], placements


def unpermute_grad_sample(
    permuted_tokens_dtype: torch.dtype = torch.bfloat16, probs: TensorDescription | None = None, **_: Any
) -> dict[str, Any]:
    rows = TOKENS * TOP_K
    return {
        "grad_unpermuted_tokens": randn(rows if probs is None else TOKENS, HIDDEN, dtype=permuted_tokens_dtype),
        "permuted_tokens_size_0": rows,
        "permuted_tokens_dtype": permuted_tokens_dtype,
        **unpermute_sample(TensorDescription(permuted_tokens_dtype, 2), probs),
    }


declare(
    Op(
        schema="npu::npu_moe_token_unpermute_grad_v2(Tensor grad_unpermuted_tokens, Tensor sorted_indices, "
        "SymInt permuted_tokens_size_0, ScalarType permuted_tokens_dtype, Tensor? probs=None, "
        "bool padded_mode=False, int[]? restore_shape=None, Tensor? permuted_tokens=None) -> (Tensor, Tensor)",
        reference=reference.npu_moe_token_unpermute_grad_v2,
        cuda=kernel(reference.npu_moe_token_unpermute_grad_v2),
        fake=unpermute_grad_fake,
        checks=unpermute_grad_checks,
        sharding=unpermute_grad_sharding,
        limits=(
            Limit("permuted_tokens_dtype", lambda permuted_tokens_dtype, **_: permuted_tokens_dtype, NPU_FLOATS),
            Limit(
                "the dtype of grad_unpermuted_tokens, permuted_tokens and probs",
                lambda grad_unpermuted_tokens, permuted_tokens_dtype, permuted_tokens, probs, **_: _dtype_of_all(
                    grad_unpermuted_tokens.dtype,
                    permuted_tokens_dtype,
                    *(tensor.dtype for tensor in (permuted_tokens, probs) if tensor is not None),
                ),
                ONE_DTYPE,
            ),
            LIMIT_OF_TOP_K,
            # required before CANN 9.1
            Limit(
                "whether permuted_tokens is given",
                lambda permuted_tokens, **_: permuted_tokens is not None,
                (True, False),
            ),
        ),
        sample=unpermute_grad_sample,
    )
)
