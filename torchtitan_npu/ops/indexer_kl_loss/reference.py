"""The loss that trains the lightning indexer, and its gradients, in plain PyTorch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from torchtitan_npu.errors import UsageError
from torchtitan_npu.ops.core.dtypes import compute_dtype
from torchtitan_npu.ops.lightning_indexer import indexer_elements, indexer_gradients
from torchtitan_npu.ops.sparse_flash_attention.reference import attention_weights, selections, with_rope
from torchtitan_npu.ops.sparse_flash_attention.selected_keys import documents, heads_of, with_zero_row, without_zero_row


@dataclass(frozen=True)
class LossInputs:
    """The arguments that the sparse and the dense loss have in common.

    Shapes are those of the layout BSND. In TND, (T1, ...) replaces (B, S1, ...) and (T2, ...) replaces (B, S2, ...).
    """

    query: Tensor
    """Queries of attention, (B, S1, N1, D)."""
    key: Tensor
    """Keys of attention, (B, S2, 1, D); in the dense loss every head has its keys, (B, S2, N1, D)."""
    query_index: Tensor
    """Queries of the indexer, (B, S1, N, E)."""
    key_index: Tensor
    """Keys of the indexer, (B, S2, 1, E)."""
    weights: Tensor
    """Head weights of the indexer, (B, S1, N)."""
    softmax_max: Tensor
    """Maximum of the argument of attention's softmax, (B, 1, S1, N1); in the dense loss (B, N1, S1, 1)."""
    softmax_sum: Tensor
    """Sum of the exponentials of attention's softmax, shaped as ``softmax_max``."""
    scale_value: float
    """Factor of the attention scores."""
    query_rope: Tensor | None
    """Rotary part of the queries, (B, S1, N1, R)."""
    key_rope: Tensor | None
    """Rotary part of the keys, with the heads of ``key``."""
    actual_seq_qlen: Sequence[int] | None
    """``cu_seqlens`` of the queries, for TND."""
    actual_seq_klen: Sequence[int] | None
    """``cu_seqlens`` of the keys, for TND."""
    layout: str
    """BSND or TND."""
    sparse_mode: int
    """3: causal, with the last query aligned to the last key."""
    pre_tokens: int
    next_tokens: int


@dataclass(frozen=True)
class IndexerLossInputs(LossInputs):
    """The arguments of ``npu_sparse_lightning_indexer_grad_kl_loss``."""

    sparse_indices: Tensor
    """Keys that the indexer selected, then -1: (B, S1, 1, K) int32."""
    sinks: Tensor | None


def npu_sparse_lightning_indexer_grad_kl_loss(**arguments: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    r"""Return the gradients and the value of the loss that trains the indexer on attention's distribution.

    .. math::
        I_{t,s} = \sum_h w_{t,h} \, \mathrm{ReLU}(\tilde{q}_{t,h} \cdot \tilde{k}_s), \qquad
        p_{t,:} = \frac{\sum_h P_{t,h,:}}{\lVert \sum_h P_{t,h,:} \rVert_1}, \qquad
        L = \sum_t D_{KL}(p_{t,:} \,\Vert\, \mathrm{softmax}(I_{t,:})), \qquad
        dI_{t,:} = \mathrm{softmax}(I_{t,:}) - p_{t,:}

    over the selected keys s. P is the softmax of sparse attention, computed from its statistics, and is a constant. The
    arguments are those of :class:`~IndexerLossInputs`. Returns the gradients
    of ``query_index``, ``key_index`` and ``weights`` in their shapes and dtypes, and the loss (1,) in float32. A row
    without keys contributes nothing.
    """
    x = IndexerLossInputs(**arguments)
    d_query, d_key, d_weights = (
        torch.zeros(t.shape, dtype=t.dtype, device=t.device) for t in (x.query_index, x.key_index, x.weights)
    )
    losses = [torch.zeros((), dtype=compute_dtype(x.query), device=x.query.device)]
    maximum, total = x.softmax_max.transpose(-2, -3), x.softmax_sum.transpose(-2, -3)
    queries, all_keys = with_rope(x.query, x.query_rope), with_rope(x.key, x.key_rope)
    for document in documents(x.layout, x.sparse_mode, x.query, x.key, x.actual_seq_qlen, x.actual_seq_klen):
        keys, index_keys = (with_zero_row(tensor[document.key_index]) for tensor in (all_keys, x.key_index))
        d_keys = torch.zeros_like(index_keys)
        elements = keys.shape[-1] + indexer_elements(x.query_index)
        for rows, selected in selections(document, x.query, x.sparse_indices, elements):
            if not torch.equal(selected.valid, selected.indices >= 0):
                raise UsageError("sparse_indices must not contain keys beyond those that its row may attend to")
            valid = selected.valid
            q, k = heads_of(queries[rows.index], 1), selected.gather(keys)
            p = attention_weights(q, k, selected, x.scale_value, maximum[rows.index], total[rows.index]).sum(2)
            p = torch.where(valid, p / p.sum(-1, keepdim=True), 0)

            k = selected.gather(index_keys)
            q, w = heads_of(x.query_index[rows.index], 1), heads_of(x.weights[rows.index], 1)
            scores = torch.einsum("rng,rngs->rns", w.to(q.dtype), torch.einsum("rngd,rnsd->rngs", q, k).relu_())
            # a row without keys has a softmax of NaN
            log_softmax = scores.masked_fill(~valid, -torch.inf).log_softmax(-1)
            losses.append(torch.where(p > 0, p * (p.log() - log_softmax), 0).sum())
            d_scores = torch.where(valid, log_softmax.exp() - p, 0)
            dq, dw = indexer_gradients(d_scores, q, w, k, selected, d_keys)
            d_query[rows.index], d_weights[rows.index] = dq.flatten(1, 2), dw.flatten(1, 2)
        d_key[document.key_index] = without_zero_row(d_keys).to(d_key.dtype)
    return d_query, d_key, d_weights, torch.stack(losses).sum(0, keepdim=True)
