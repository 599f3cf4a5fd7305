"""The lightning indexer's loss: torch_npu's op computes its gradients with it, but has no autograd."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from torchtitan_npu.ops.core.run_backward_once import computed_once


class Account(Protocol):
    """What a loss is to the whole: how much it weighs, and who wants to know it."""

    def scale(self) -> Tensor:
        """What its gradients are multiplied by."""

    def count(self, loss: Tensor) -> None:
        """Is told its value."""


def with_indexer_loss(
    output: Tensor,
    query: Tensor,
    key: Tensor,
    query_index: Tensor,
    key_index: Tensor,
    weights: Tensor,
    sparse_indices: Tensor,
    softmax_max: Tensor,
    softmax_sum: Tensor,
    scale_value: float,
    account: Account,
    *,
    query_rope: Tensor | None = None,
    key_rope: Tensor | None = None,
    actual_seq_qlen: Sequence[int] | None = None,
    actual_seq_klen: Sequence[int] | None = None,
    layout: str = "BSND",
) -> Tensor:
    """``output`` itself, whose backward pass computes the loss and its gradients: not before, and only once.

    The loss is the sum over tokens of the KL divergence of the indexer's distribution over the selected keys from
    attention's. ``query`` (B, S1, N1, D), ``key`` (B, S2, 1, D) and their ropes are what sparse attention got,
    ``output`` (B, S1, N1, D), ``softmax_max`` and ``softmax_sum`` (B, 1, S1, N1) what it returned; ``query_index``
    (B, S1, N, E), ``key_index`` (B, S2, 1, E) and ``weights`` (B, S1, N) are what the indexer got, ``sparse_indices``
    (B, S1, 1, K) what it returned. With the layout TND, (T, ...) for (B, S, ...), and the ends of the documents as
    integers. ``query_index``, ``key_index`` and ``weights`` get gradients, attention gets none: it learns nothing here.
    """
    tensors = (query, key, sparse_indices, softmax_max, softmax_sum, query_rope, key_rope)
    lengths = {"actual_seq_qlen": actual_seq_qlen, "actual_seq_klen": actual_seq_klen, "layout": layout}
    return _IndexerLoss.apply(output, query_index, key_index, weights, *tensors, scale_value, account, lengths)


class _IndexerLoss(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, output: Tensor, *arguments: Any) -> Tensor:
        *tensors, ctx.scale_value, ctx.account, ctx.lengths = arguments
        ctx.save_for_backward(*tensors)
        return output.view_as(output)

    @staticmethod
    def backward(ctx: Any, output_grad: Tensor) -> tuple[Tensor | None, ...]:
        def compute(
            query_index: Tensor,
            key_index: Tensor,
            weights: Tensor,
            query: Tensor,
            key: Tensor,
            indices: Tensor,
            softmax_max: Tensor,
            softmax_sum: Tensor,
            query_rope: Tensor | None,
            key_rope: Tensor | None,
        ) -> list[Tensor]:
            scale = ctx.account.scale().expand(1)
            *gradients, loss = torch.ops.npu.npu_sparse_lightning_indexer_grad_kl_loss(
                *(query, key, query_index, key_index, weights, indices, softmax_max, softmax_sum, ctx.scale_value),
                query_rope=query_rope,
                key_rope=key_rope,
                **ctx.lengths,
            )
            ctx.account.count(loss.squeeze(0))
            # in the wider dtype: to round the scale to bfloat16 first would bias all gradients alike
            return [(gradient * scale).to(gradient.dtype) for gradient in gradients]

        return output_grad, *computed_once(ctx, [1, 2, 3], compute), *(None for _ in range(10))
