"""``npu_moe_token_permute``, ``npu_moe_token_unpermute`` and their gradients: MoE dispatch and combine.

Permute copies each token once for each of its experts and sorts the copies by expert. Unpermute sums the rows of each
token, weighted, in the order of the tokens. torch_npu implements unpermute as a call of ``_npu_moe_token_unpermute``:
on every backend, that is the operator that autograd, DTensor and activation checkpointing see.

A *slot* is one of the ``top_k`` experts of a token: slot ``i`` belongs to token ``i // top_k``. A slot whose position
is beyond the permuted rows was dropped (``num_out_tokens``). It contributes nothing and gets no gradient.

:func:`unpermute` and :func:`weighted_unpermute` are for training: arguments of one dtype, and gradients without two
faults of the operator's autograd on an NPU.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.distributed.tensor import Partial, Placement, Replicate, Shard

from torchtitan_npu.ops.core.arguments import Call
from torchtitan_npu.ops.core.autograd import Autograd, Through
from torchtitan_npu.ops.core.checks import FLOATS, NPU_FLOATS, check_dim, check_dtype, check_shape
from torchtitan_npu.ops.core.op import Limit, declare
from torchtitan_npu.ops.core.sharding import Strategy, shard_alike

EXACT_INTEGERS = range(16777215)
"""An NPU sorts integers as float32, which is exact for these."""
NPU_TOP_K = range(513)


def _upcast(tensor: Tensor, other: Tensor | None = None) -> Tensor:
    """Return ``tensor`` in the dtype to compute in: float32, or float64 if either argument is float64."""
    double = torch.float64 in (tensor.dtype, None if other is None else other.dtype)
    return tensor.double() if double else tensor.float()


def _rows_or_zero(rows: Tensor, positions: Tensor) -> Tensor:
    """Return ``rows[positions]``, with zeros for positions beyond the last row."""
    inside = positions < rows.shape[0]
    gathered = rows.new_zeros(len(positions), rows.shape[1])
    gathered[inside] = rows[positions[inside]]
    return gathered


def _check_unpadded(call: Call) -> Iterator[str]:
    if call.padded_mode:
        yield "padded_mode must be False, the only mode the NPU has"
    if (shape := getattr(call, "restore_shape", None)) is not None:
        yield f"restore_shape belongs to padded_mode, which the NPU does not have: it must be None, not {shape}"


# npu_moe_token_permute


def npu_moe_token_permute(
    tokens: Tensor, indices: Tensor, num_out_tokens: int | None, **_: Any
) -> tuple[Tensor, Tensor]:
    r"""Copy each token once for each of its experts, sorted by expert and, within an expert, by slot.

    .. math:: order = argsort(flatten(indices)), \quad sorted\_indices = argsort(order), \quad
              permuted[sorted\_indices_i] = tokens[i // top\_k]

    ``tokens`` (tokens, hidden), ``indices`` (tokens, top_k) or (tokens,): the experts. Returns ``permuted_tokens``
    (slots, hidden) and ``sorted_indices`` (slots,) in int32. With a ``num_out_tokens`` other than 0, only the rows of
    the slice ``[:num_out_tokens]`` are returned; ``sorted_indices`` keeps every slot.
    """
    order = indices.flatten().argsort(stable=True)
    sorted_indices = torch.empty_like(order).scatter_(0, order, torch.arange(len(order), device=order.device))
    return tokens[order[: num_out_tokens or None] // _top_k(indices)], sorted_indices.int()


def _top_k(indices: Tensor) -> int:
    return indices.shape[1] if indices.dim() == 2 else 1


def _rows(call: Call) -> int:
    """Return the number of rows in the slice ``[:num_out_tokens]``; all of them for ``None`` and 0."""
    end, slots = call.num_out_tokens or 0, call.indices.numel()
    return min(end, slots) if end > 0 else slots + end


def permute_checks(call: Call) -> Iterator[str]:
    yield from _check_unpadded(call)
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


def permute_save(ctx: Any, output: tuple[Tensor, Tensor], call: Call) -> None:
    ctx.save_for_backward(output[1])
    ctx.mark_non_differentiable(output[1])
    ctx.tokens, ctx.dtype, ctx.top_k = call.tokens.shape[0], call.tokens.dtype, _top_k(call.indices)


def permute_backward(npu: Any, ctx: Any, grad: Tensor, _: None) -> dict[str, Tensor]:
    (sorted_indices,) = ctx.saved_tensors
    return {"tokens": npu.npu_moe_token_permute_grad_v2(grad, sorted_indices, ctx.tokens, ctx.dtype, ctx.top_k)}


declare(
    schema="npu::npu_moe_token_permute(Tensor tokens, Tensor indices, int? num_out_tokens=None, "
    "bool padded_mode=False) -> (Tensor, Tensor)",
    reference=npu_moe_token_permute,
    fake=permute_fake,
    checks=permute_checks,
    sharding=lambda call: [([Shard(1), Replicate()], {"tokens": Shard(1)})],
    autograd=Autograd(permute_save, permute_backward),
    limits=(
        Limit("tokens.dtype", lambda call: call.tokens.dtype, NPU_FLOATS),
        Limit("the number of indices", lambda call: call.indices.numel(), EXACT_INTEGERS),
        Limit("the top-k of indices", lambda call: _top_k(call.indices), NPU_TOP_K),
    ),
)


def npu_moe_token_permute_grad_v2(
    grad_permuted_tokens: Tensor,
    sorted_indices: Tensor,
    tokens_size_0: int,
    tokens_dtype: torch.dtype,
    num_topK: int,
    **_: Any,
) -> Tensor:
    r"""Return the gradient of :func:`npu_moe_token_permute`: the sum over the copies of each token.

    .. math:: d\,tokens_t = \sum_{i \in slots(t)} d\,permuted[sorted\_indices_i]

    ``grad_permuted_tokens`` (rows, hidden), ``sorted_indices`` (slots,). Returns (tokens_size_0, hidden).
    """
    grad = _upcast(grad_permuted_tokens)
    rows = _rows_or_zero(grad, sorted_indices)
    return rows.view(tokens_size_0, num_topK, grad.shape[1]).sum(1).to(tokens_dtype)


def permute_grad_checks(call: Call) -> Iterator[str]:
    yield from _check_unpadded(call)
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


declare(
    schema="npu::npu_moe_token_permute_grad_v2(Tensor grad_permuted_tokens, Tensor sorted_indices, "
    "SymInt tokens_size_0, ScalarType tokens_dtype, SymInt num_topK, bool padded_mode=False) -> Tensor",
    reference=npu_moe_token_permute_grad_v2,
    fake=lambda call: call.grad_permuted_tokens.new_empty(
        call.tokens_size_0, call.grad_permuted_tokens.shape[1], dtype=call.tokens_dtype
    ),
    checks=permute_grad_checks,
    sharding=lambda call: shard_alike([1], 1, "grad_permuted_tokens"),
    limits=(
        Limit("tokens_dtype", lambda call: call.tokens_dtype, NPU_FLOATS),
        Limit("num_topK", lambda call: call.num_topK, NPU_TOP_K),
    ),
)


# npu_moe_token_unpermute


def npu_moe_token_unpermute(permuted_tokens: Tensor, sorted_indices: Tensor, probs: Tensor | None, **_: Any) -> Tensor:
    r"""Sum the rows of each token, weighted by ``probs``.

    .. math:: unpermuted_t = \sum_{i \in slots(t)} permuted[sorted\_indices_i] \, probs_i

    ``permuted_tokens`` (rows, hidden), ``sorted_indices`` (slots,), ``probs`` (tokens, top_k). Without ``probs``, each
    token has one slot of weight 1. Returns (tokens, hidden) in the dtype of ``permuted_tokens``.
    """
    rows = _rows_or_zero(_upcast(permuted_tokens, probs), sorted_indices)
    if probs is not None:
        rows = (rows.view(*probs.shape, rows.shape[1]) * probs.unsqueeze(-1)).sum(1)
    return rows.to(permuted_tokens.dtype)


def _tokens(call: Call) -> int:
    return call.sorted_indices.shape[0] if call.probs is None else call.probs.shape[0]


def unpermute_checks(call: Call) -> Iterator[str]:
    yield from _check_unpadded(call)
    yield from check_dim("permuted_tokens", call.permuted_tokens, 2)
    yield from check_dtype("permuted_tokens", call.permuted_tokens, *FLOATS)
    yield from _check_slots(call, call.permuted_tokens.shape[0])


def _check_slots(call: Call, rows: int) -> Iterator[str]:
    """Check the positions and weights of the slots, for this number of permuted ``rows``."""
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
        lambda call: _dtype_of_all(*(x.dtype for x in (call.permuted_tokens, call.probs) if x is not None)),
        ONE_DTYPE,
    ),
    LIMIT_OF_TOP_K,
)

declare(
    schema="npu::npu_moe_token_unpermute(Tensor permuted_tokens, Tensor sorted_indices, Tensor? probs=None, "
    "bool padded_mode=False, int[]? restore_shape=None) -> Tensor",
    reference=npu_moe_token_unpermute,
    fake=unpermute_fake,
    checks=unpermute_checks,
    sharding=lambda call: shard_alike([1], 1, "permuted_tokens"),
    autograd=Through("_npu_moe_token_unpermute"),
    limits=UNPERMUTE_LIMITS,
)


def _npu_moe_token_unpermute(permuted_tokens: Tensor, **arguments: Any) -> tuple[Tensor, Tensor]:
    """Return :func:`npu_moe_token_unpermute` and ``permuted_tokens``, which the backward reads.

    torch_npu returns the argument itself. The schema does not declare that alias, so PyTorch requires a copy here.
    """
    return npu_moe_token_unpermute(permuted_tokens, **arguments), permuted_tokens.clone()


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
    schema="npu::_npu_moe_token_unpermute(Tensor permuted_tokens, Tensor sorted_indices, Tensor? probs=None, "
    "bool padded_mode=False, int[]? restore_shape=None) -> "
    "(Tensor unpermuted_tokens, Tensor permuted_tokens_for_backward)",
    reference=_npu_moe_token_unpermute,
    fake=lambda call: (unpermute_fake(call), torch.empty_like(call.permuted_tokens)),
    checks=unpermute_checks,
    sharding=lambda call: shard_alike([1], 2, "permuted_tokens"),
    autograd=Autograd(unpermute_save, unpermute_backward),
    limits=UNPERMUTE_LIMITS,
)


def npu_moe_token_unpermute_grad_v2(
    grad_unpermuted_tokens: Tensor,
    sorted_indices: Tensor,
    permuted_tokens_size_0: int,
    permuted_tokens_dtype: torch.dtype,
    probs: Tensor | None,
    permuted_tokens: Tensor | None,
    **_: Any,
) -> tuple[Tensor, Tensor | None]:
    r"""Return the gradients of :func:`npu_moe_token_unpermute` with respect to ``permuted_tokens`` and ``probs``.

    .. math:: d\,permuted[sorted\_indices_i] = probs_i \, d\,unpermuted[i // top\_k], \qquad
              d\,probs_i = permuted[sorted\_indices_i] \cdot d\,unpermuted[i // top\_k]

    ``grad_unpermuted_tokens`` (tokens, hidden), the others as in the forward. Returns (permuted_tokens_size_0, hidden)
    in ``permuted_tokens_dtype``, and (tokens, top_k) in the dtype of ``probs``, or ``None`` without ``probs``.
    """
    grad = _upcast(grad_unpermuted_tokens, probs)
    weighted, grad_probs = grad, None
    if probs is not None and permuted_tokens is not None:
        grad = grad.repeat_interleave(probs.shape[1], dim=0)  # (slots, hidden)
        weighted = grad * probs.reshape(-1, 1)
        dots = (_rows_or_zero(_upcast(permuted_tokens, grad), sorted_indices) * grad).sum(-1)
        grad_probs = torch.empty_like(probs).copy_(dots.view(probs.shape))
    inside = sorted_indices < permuted_tokens_size_0
    grad_permuted = grad.new_zeros(permuted_tokens_size_0, grad.shape[1])
    grad_permuted[sorted_indices[inside]] = weighted[inside]
    return grad_permuted.to(permuted_tokens_dtype), grad_probs


def unpermute_grad_checks(call: Call) -> Iterator[str]:
    yield from _check_unpadded(call)
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
    # each rank sums the gradient of probs over its part of the hidden dimension
    placements: dict[str, Placement] = {"grad_unpermuted_tokens": Shard(1), "sorted_indices": Replicate()}
    if call.permuted_tokens is not None:
        placements["permuted_tokens"] = Shard(1)
    yield [Shard(1), None if call.probs is None else Partial()], placements


declare(
    schema="npu::npu_moe_token_unpermute_grad_v2(Tensor grad_unpermuted_tokens, Tensor sorted_indices, "
    "SymInt permuted_tokens_size_0, ScalarType permuted_tokens_dtype, Tensor? probs=None, "
    "bool padded_mode=False, int[]? restore_shape=None, Tensor? permuted_tokens=None) -> (Tensor, Tensor)",
    reference=npu_moe_token_unpermute_grad_v2,
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


# training


def unpermute(rows: Tensor, row_of_slot: Tensor) -> Tensor:
    """Return ``rows`` (slots, dim) in the order of the slots; ``row_of_slot`` (slots) int32 is the row of each."""
    return _Unpermute.apply(rows, row_of_slot, None, rows.dtype)


def weighted_unpermute(rows: Tensor, row_of_slot: Tensor, scores: Tensor, dtype: torch.dtype) -> Tensor:
    """Sum the rows of each token, weighted by ``scores``; differentiable in ``rows`` and ``scores``.

    ``rows`` (slots, dim) are sorted by expert, ``row_of_slot`` (slots) int32 is the row of each slot, ``scores`` has
    the shape (tokens, top_k). Both are cast to ``dtype``. Returns (tokens, dim) in ``dtype``.
    """
    return _Unpermute.apply(rows, row_of_slot, scores, dtype)


class _Unpermute(torch.autograd.Function):
    """``npu_moe_token_unpermute`` without two faults that its autograd has on an NPU.

    - Its gradient kernel returns NaN if rows and scores have different dtypes. Both are cast here, in the forward and
      again in the backward pass, so that a float32 copy of bfloat16 rows is not held in between.
    - From CANN 9.1, without scores, the forward returns an undefined tensor in place of the rows. A compiled graph is
      traced with a defined one and cannot pass it to its backward graph. Here the rows are not an output.
    """

    @staticmethod
    def forward(ctx: Any, rows: Tensor, row_of_slot: Tensor, scores: Tensor | None, dtype: torch.dtype) -> Tensor:
        # only the gradient of the scores reads the rows
        ctx.save_for_backward(row_of_slot, scores, None if scores is None else rows)
        ctx.rows, ctx.rows_dtype, ctx.dtype = rows.shape[0], rows.dtype, dtype
        probs = None if scores is None else scores.to(dtype)
        return torch.ops.npu.npu_moe_token_unpermute(rows.to(dtype), row_of_slot, probs)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, Tensor | None, None]:
        row_of_slot, scores, rows = ctx.saved_tensors
        probs = None if scores is None else scores.to(ctx.dtype)
        # CANN before 9.1 requires the argument permuted_tokens. Without scores the kernel does not read it, and the
        # gradient has its shape and dtype.
        permuted_tokens = grad if rows is None else rows.to(ctx.dtype)
        grad_rows, grad_scores = torch.ops.npu.npu_moe_token_unpermute_grad_v2(
            grad, row_of_slot, ctx.rows, ctx.dtype, probs, permuted_tokens=permuted_tokens
        )
        return grad_rows.to(ctx.rows_dtype), None, None if scores is None else grad_scores.to(scores.dtype), None
