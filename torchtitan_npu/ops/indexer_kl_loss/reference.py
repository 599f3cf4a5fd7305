"""The loss that trains the lightning indexer, and its gradients, in plain PyTorch."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from torchtitan_npu.errors import UsageError
from torchtitan_npu.ops.lightning_indexer.reference import indexer_elements, indexer_gradients
from torchtitan_npu.ops.sparse_flash_attention.reference import attention_weights, padded_keys, selections, with_rope
from torchtitan_npu.ops.sparse_flash_attention.selected_keys import (
    compute_dtype,
    documents,
    heads_of,
    with_zero_row,
    without_zero_row,
)


def npu_sparse_lightning_indexer_grad_kl_loss(
    query: Tensor,
    key: Tensor,
    query_index: Tensor,
    key_index: Tensor,
    weights: Tensor,
    sparse_indices: Tensor,
    softmax_max: Tensor,
    softmax_sum: Tensor,
    scale_value: float,
    query_rope: Tensor | None,
    key_rope: Tensor | None,
    actual_seq_qlen: Sequence[int] | None,
    actual_seq_klen: Sequence[int] | None,
    layout: str,
    sparse_mode: int,
    **_: object,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    r"""How far the indexer's scores of the selected keys are from what attention makes of them, and the gradients.

    .. math::
        I_{t,s} = \sum_h w_{t,h} \, \mathrm{ReLU}(\tilde{q}_{t,h} \cdot \tilde{k}_s), \qquad
        p_{t,:} = \frac{\sum_h P_{t,h,:}}{\lVert \sum_h P_{t,h,:} \rVert_1}, \qquad
        L = \sum_t D_{KL}(p_{t,:} \,\Vert\, \mathrm{softmax}(I_{t,:})), \qquad
        dI_{t,:} = \mathrm{softmax}(I_{t,:}) - p_{t,:}

    over the selected keys s; P is sparse attention's softmax, from its statistics, and a constant. ``query``
    (B, S1, N1, D), ``key`` (B, S2, 1, D), ``query_index`` (B, S1, N, E), ``key_index`` (B, S2, 1, E), ``weights``
    (B, S1, N), ``sparse_indices`` (B, S1, 1, K), the statistics (B, 1, S1, N1); or packed (T, ...), the statistics
    (1, T1, N1). Returns the gradients of ``query_index``, ``key_index`` and ``weights`` in their shapes and dtypes, and
    the loss (1,) in float32. A row without keys adds nothing.
    """
    d_query, d_key, d_weights = (
        torch.zeros(t.shape, dtype=t.dtype, device=t.device) for t in (query_index, key_index, weights)
    )
    losses = [torch.zeros((), dtype=compute_dtype(query), device=query.device)]
    maximum, total = softmax_max.transpose(-2, -3), softmax_sum.transpose(-2, -3)
    for document in documents(layout, sparse_mode, query, key, actual_seq_qlen, actual_seq_klen):
        keys, index_keys = padded_keys(document, key, key_rope), with_zero_row(key_index[document.key_index])
        d_keys = torch.zeros_like(index_keys)
        elements = keys.shape[-1] + indexer_elements(query_index)
        for rows, selected in selections(document, query, sparse_indices, elements):
            if not torch.equal(selected.valid, sparse_indices[rows.index] >= 0):
                raise UsageError("sparse_indices must name no key past those its row may see, and it does")
            valid = selected.valid
            q = heads_of(with_rope(query, query_rope, rows), 1)
            p = attention_weights(
                q, selected.gather(keys), selected, scale_value, maximum[rows.index], total[rows.index]
            )
            p = p.sum(2)
            p = torch.where(valid, p / p.sum(-1, keepdim=True), 0)

            k = selected.gather(index_keys)
            q, w = heads_of(query_index[rows.index], 1), heads_of(weights[rows.index], 1)
            scores = torch.einsum("rng,rngs->rns", w.to(q.dtype), torch.einsum("rngd,rnsd->rngs", q, k).relu_())
            # where a row has no key at all, its softmax over -inf is not a number
            log_softmax = scores.masked_fill(~valid, -torch.inf).log_softmax(-1)
            losses.append(torch.where(p > 0, p * (p.log() - log_softmax), 0).sum())
            d_scores = torch.where(valid, log_softmax.exp() - p, 0)
            dq, dw = indexer_gradients(d_scores, q, w, k, selected, d_keys)
            d_query[rows.index], d_weights[rows.index] = dq.flatten(1, 2), dw.flatten(1, 2)
        d_key[document.key_index] = without_zero_row(d_keys).to(d_key.dtype)
    return d_query, d_key, d_weights, torch.stack(losses).sum(0, keepdim=True)
