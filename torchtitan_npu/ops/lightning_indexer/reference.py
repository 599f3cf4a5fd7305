"""The lightning indexer and its gradient in plain PyTorch."""

from __future__ import annotations

import torch
from torch import Tensor

from torchtitan_npu.ops.core.dtypes import compute_dtype
from torchtitan_npu.ops.sparse_flash_attention.selected_keys import (
    SelectedKeys,
    documents,
    heads_of,
    with_zero_row,
    without_zero_row,
)


def npu_lightning_indexer(
    query: Tensor,
    key: Tensor,
    weights: Tensor,
    actual_seq_lengths_query: Tensor | None,
    actual_seq_lengths_key: Tensor | None,
    layout_query: str,
    sparse_count: int,
    sparse_mode: int,
    return_value: bool,
    **_: object,
) -> tuple[Tensor, Tensor]:
    r"""Select the ``sparse_count`` keys s with the highest scores for each query row t.

    .. math:: I_{t,s} = \sum_h w_{t,h} \, \mathrm{ReLU}(q_{t,h} \cdot k_s)

    ``query`` (B, S1, N1, D), ``key`` (B, S2, N2, D), ``weights`` (B, S1, N1); or (T1, N1, D), (T2, N2, D), (T1, N1).
    Returns the indices of the keys, int32 (B, S1, N2, sparse_count) or (T1, N2, sparse_count), and their scores in the
    dtype of ``query``, or an empty tensor without ``return_value``. Indices count from the start of the document. The
    highest score comes first, and the lower index among equal scores. A row with fewer keys ends in indices of -1 and
    scores of -inf.
    """
    key_heads = key.shape[-2]
    shape = (*query.shape[:-2], key_heads, sparse_count)
    indices = torch.full(shape, -1, dtype=torch.int32, device=query.device)
    values = torch.full(shape if return_value else (0,), -torch.inf, dtype=query.dtype, device=query.device)
    for document in documents(layout_query, sparse_mode, query, key, actual_seq_lengths_query, actual_seq_lengths_key):
        keys = key[document.key_index].to(compute_dtype(key))
        count = min(sparse_count, len(keys))
        places = torch.arange(len(keys), device=query.device)
        for rows in document.rows(query.shape[-2] * len(keys), query.device):
            q, w = heads_of(query[rows.index], key_heads), heads_of(weights[rows.index], key_heads)
            logits = torch.einsum("rngd,snd->rngs", q, keys).relu_()
            scores = torch.einsum("rng,rngs->rns", w.to(logits.dtype), logits)
            scores.masked_fill_(places >= rows.visible, -torch.inf)
            best, order = (t[..., :count] for t in scores.sort(dim=-1, descending=True, stable=True))
            indices[rows.index][..., :count] = order.to(torch.int32).masked_fill_(places[:count] >= rows.visible, -1)
            if return_value:
                values[rows.index][..., :count] = best
    return indices, values


def npu_lightning_indexer_grad(
    query: Tensor,
    key: Tensor,
    dy: Tensor,
    sparse_indices: Tensor,
    weights: Tensor,
    actual_seq_lengths_query: Tensor | None,
    actual_seq_lengths_key: Tensor | None,
    layout: str,
    sparse_mode: int,
    **_: object,
) -> tuple[Tensor, Tensor, Tensor]:
    r"""Return the gradients of the selected scores with respect to ``query``, ``key`` and ``weights``.

    With :math:`S_h = q_h \cdot k_{selected}` and ``dy`` the gradient of the scores, in the shape of ``sparse_indices``:

    .. math::
        dw_h = \sum_s dy_s \, \mathrm{ReLU}(S_{h,s}), \qquad dS_{h,s} = dy_s \, w_h \, [S_{h,s} > 0], \qquad
        dq_h = \sum_s dS_{h,s} \, k_s, \qquad dk_s = \sum_{t,h} dS_{h,s} \, q_h

    The gradients have the shapes and dtypes of their arguments.
    """
    key_heads = key.shape[-2]
    d_query, d_key, d_weights = (torch.zeros(t.shape, dtype=t.dtype, device=t.device) for t in (query, key, weights))
    for document in documents(layout, sparse_mode, query, key, actual_seq_lengths_query, actual_seq_lengths_key):
        keys = with_zero_row(key[document.key_index])
        d_keys = torch.zeros_like(keys)
        elements = sparse_indices.shape[-2] * sparse_indices.shape[-1] * indexer_elements(query)
        for rows in document.rows(elements, query.device):
            selected = SelectedKeys(sparse_indices[rows.index], rows.visible, len(document.keys))
            d_scores = dy[rows.index][..., : selected.indices.shape[-1]]
            gradient = d_scores.to(keys.dtype).masked_fill(~selected.valid, 0)
            dq, dw = indexer_gradients(
                gradient,
                heads_of(query[rows.index], key_heads),
                heads_of(weights[rows.index], key_heads),
                selected.gather(keys),
                selected,
                d_keys,
            )
            d_query[rows.index], d_weights[rows.index] = dq.flatten(1, 2), dw.flatten(1, 2)
        d_key[document.key_index] = without_zero_row(d_keys).to(d_key.dtype)
    return d_query, d_key, d_weights


def indexer_elements(query_index: Tensor) -> int:
    """Return the elements that one selected key of one row needs: features, scores, and the gradients of both."""
    heads, size = query_index.shape[-2:]
    return 2 * (heads + size)


def indexer_gradients(
    gradient: Tensor, q: Tensor, w: Tensor, k: Tensor, selected: SelectedKeys, d_keys: Tensor
) -> tuple[Tensor, Tensor]:
    """Return the gradients of ``q`` (r, n, g, d) and ``w`` (r, n, g), given that of the scores, (r, n, places).

    Adds the gradients of the selected keys ``k`` (r, n, places, d) to ``d_keys``.
    """
    # zero at places without a key, also in a padding row, which may hold any value
    logits = torch.einsum("rngd,rnsd->rngs", q, k).masked_fill_(~selected.valid[:, :, None], 0)
    dw = torch.einsum("rns,rngs->rng", gradient, logits.relu())
    d_logits = torch.where(logits > 0, gradient[:, :, None] * w.to(q.dtype)[..., None], 0)
    selected.scatter_add_(d_keys, torch.einsum("rngs,rngd->rnsd", d_logits, q))
    return torch.einsum("rngs,rnsd->rngd", d_logits, k), dw
