"""The lightning indexer's loss with gradients: torch_npu's op computes them but has no autograd."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor


def indexer_loss(
    query: Tensor,
    key: Tensor,
    query_index: Tensor,
    key_index: Tensor,
    weights: Tensor,
    sparse_indices: Tensor,
    softmax_max: Tensor,
    softmax_sum: Tensor,
    scale_value: float,
    *,
    query_rope: Tensor | None = None,
    key_rope: Tensor | None = None,
    actual_seq_qlen: Sequence[int] | None = None,
    actual_seq_klen: Sequence[int] | None = None,
    layout: str = "BSND",
) -> Tensor:
    """The sum over tokens of the KL divergence of the indexer's distribution over the selected keys from attention's.

    ``query`` (B, S1, N1, D), ``key`` (B, S2, 1, D) and their ropes are what sparse attention got, ``softmax_max`` and
    ``softmax_sum`` (B, 1, S1, N1) what it returned; ``query_index`` (B, S1, N, E), ``key_index`` (B, S2, 1, E) and
    ``weights`` (B, S1, N) are what the indexer got, ``sparse_indices`` (B, S1, 1, K) what it returned. With the layout
    TND, (T, ...) for (B, S, ...), and the ends of the documents as lists of integers. Returns a scalar in float32, with
    gradients for ``query_index``, ``key_index`` and ``weights`` only: attention learns nothing from it.
    """
    tensors = (query_index, key_index, weights, query, key, sparse_indices, softmax_max, softmax_sum)
    return _IndexerLoss.apply(*tensors, scale_value, query_rope, key_rope, actual_seq_qlen, actual_seq_klen, layout)


class _IndexerLoss(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        query_index: Tensor,
        key_index: Tensor,
        weights: Tensor,
        query: Tensor,
        key: Tensor,
        sparse_indices: Tensor,
        softmax_max: Tensor,
        softmax_sum: Tensor,
        scale_value: float,
        query_rope: Tensor | None,
        key_rope: Tensor | None,
        actual_seq_qlen: Sequence[int] | None,
        actual_seq_klen: Sequence[int] | None,
        layout: str,
    ) -> Tensor:
        *gradients, loss = torch.ops.npu.npu_sparse_lightning_indexer_grad_kl_loss(
            query,
            key,
            query_index,
            key_index,
            weights,
            sparse_indices,
            softmax_max,
            softmax_sum,
            scale_value,
            query_rope=query_rope,
            key_rope=key_rope,
            actual_seq_qlen=actual_seq_qlen,
            actual_seq_klen=actual_seq_klen,
            layout=layout,
        )
        ctx.save_for_backward(*gradients)
        return loss.squeeze(0)

    @staticmethod
    def backward(ctx: Any, loss_grad: Tensor) -> tuple[Tensor | None, ...]:
        # in the loss's dtype: to round its gradient to bfloat16 first would bias all of them alike
        gradients = [(gradient.to(loss_grad.dtype) * loss_grad).to(gradient.dtype) for gradient in ctx.saved_tensors]
        return *gradients, *(None for _ in range(11))
