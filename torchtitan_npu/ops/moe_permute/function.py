"""``npu_moe_token_unpermute`` on arguments of one dtype, with gradients.

Two faults of the operator's own autograd on an NPU are avoided:

- Its gradient kernel returns NaN if rows and scores have different dtypes. Both are cast here, in the forward and again
  in the backward pass, so that a float32 copy of bfloat16 rows is not kept in between.
- From CANN 9.1, without scores, the forward returns an undefined tensor in place of the rows. A compiled graph is
  traced with a defined one and cannot pass it to its backward graph. Here the rows are not an output.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable


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
