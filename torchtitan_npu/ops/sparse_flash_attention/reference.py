"""Attention over selected keys, and its gradient, in plain PyTorch."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from torchtitan_npu.ops.core.dtypes import compute_dtype
from torchtitan_npu.ops.sparse_flash_attention.checks import statistics_shape
from torchtitan_npu.ops.sparse_flash_attention.selected_keys import (
    QueryRows,
    SelectedKeys,
    SequenceRanges,
    documents,
    heads_of,
    with_zero_row,
    without_zero_row,
)


def npu_sparse_flash_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor | None,
    sparse_indices: Tensor,
    scale_value: float,
    actual_seq_lengths_query: Tensor | None,
    actual_seq_lengths_kv: Tensor | None,
    query_rope: Tensor | None,
    key_rope: Tensor | None,
    layout_query: str,
    sparse_mode: int,
    return_softmax_lse: bool,
    **_: object,
) -> tuple[Tensor, Tensor, Tensor]:
    r"""Compute attention of each query row over the keys that its indices select.

    .. math:: O = \mathrm{softmax}(c \, [Q, Q_{rope}] [\tilde{K}, \tilde{K}_{rope}]^\top) \, \tilde{V}

    ``query`` (B, S1, N1, D), ``key`` and ``value`` (B, S2, N2, D), ``sparse_indices`` (B, S1, N2, K), ``query_rope``
    (B, S1, N1, R), ``key_rope`` (B, S2, N2, R); in TND, (T, ...) replaces (B, S, ...). Without ``value``, the keys are
    also the values. An index of -1, or of a key that the row may not attend to, is ignored. Returns ``O`` in the shape
    and dtype of ``query`` and, with ``return_softmax_lse``, the maximum of the softmax's argument and the sum of its
    exponentials, float32 (B, N2, S1, N1/N2) or (N2, T1, N1/N2). A row without keys has output 0, maximum -inf, sum 0.
    """
    key_heads = key.shape[-2]
    out = torch.zeros(query.shape, dtype=query.dtype, device=query.device)
    softmax_max, softmax_sum = (
        torch.full(statistics_shape(query, key), empty, dtype=compute_dtype(query), device=query.device)
        for empty in (-torch.inf, 0.0)
    )
    # in the order of the rows: (B, S1, N2, N1/N2) or (T1, N2, N1/N2)
    maximum, total = softmax_max.transpose(-2, -3), softmax_sum.transpose(-2, -3)
    queries, all_keys, all_values = (
        with_rope(query, query_rope),
        with_rope(key, key_rope),
        key if value is None else value,
    )
    for document in documents(layout_query, sparse_mode, query, key, actual_seq_lengths_query, actual_seq_lengths_kv):
        keys, values = (with_zero_row(tensor[document.key_index]) for tensor in (all_keys, all_values))
        for rows, selected in selections(document, query, sparse_indices, keys.shape[-1] + values.shape[-1]):
            q = heads_of(queries[rows.index], key_heads)
            logits = attention_logits(q, selected.gather(keys), selected, scale_value)
            highest = logits.amax(-1)
            # -inf - -inf is NaN, so a row without keys subtracts 0
            weights = (logits - highest.masked_fill(highest == -torch.inf, 0)[..., None]).exp_()
            sums = weights.sum(-1)
            average = torch.einsum("rngs,rnsd->rngd", weights, selected.gather(values))
            out[rows.index] = (average / sums.masked_fill(sums == 0, 1)[..., None]).flatten(1, 2).to(out.dtype)
            maximum[rows.index], total[rows.index] = highest, sums
    if not return_softmax_lse:
        return out, softmax_max.new_empty(0), softmax_sum.new_empty(0)
    return out, softmax_max, softmax_sum


def npu_sparse_flash_attention_grad(
    query: Tensor,
    key: Tensor,
    value: Tensor | None,
    sparse_indices: Tensor,
    d_out: Tensor,
    out: Tensor,
    softmax_max: Tensor,
    softmax_sum: Tensor,
    scale_value: float,
    query_rope: Tensor | None,
    key_rope: Tensor | None,
    actual_seq_qlen: Tensor | None,
    actual_seq_kvlen: Tensor | None,
    layout: str,
    sparse_mode: int,
    **_: object,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    r"""Return the gradients of :func:`npu_sparse_flash_attention` for query, key, value and the two ropes.

    With :math:`P = \exp(c \, Q \tilde{K}^\top - max) / sum`, the softmax from the statistics that the forward returned:

    .. math::
        dP = dO \, \tilde{V}^\top, \qquad dS = P \, (dP - \textstyle\sum_d dO \, O), \qquad
        dQ = c \, dS \, \tilde{K}, \qquad d\tilde{K} = c \, dS^\top Q, \qquad d\tilde{V} = P^\top dO

    The gradient of a key is the sum over the rows that selected it. The gradients have the shapes and dtypes of their
    arguments; that of a missing argument is an empty tensor. Without ``value``, the key's gradient contains both.
    """
    key_heads, size = key.shape[-2:]
    queries, all_keys, all_values = (
        with_rope(query, query_rope),
        with_rope(key, key_rope),
        key if value is None else value,
    )
    d_query, d_key, d_value = (t.new_zeros(t.shape) for t in (queries, all_keys, all_values))
    maximum, total = softmax_max.transpose(-2, -3), softmax_sum.transpose(-2, -3)
    for document in documents(layout, sparse_mode, query, key, actual_seq_qlen, actual_seq_kvlen):
        keys, values = (with_zero_row(tensor[document.key_index]) for tensor in (all_keys, all_values))
        d_keys, d_values = torch.zeros_like(keys), torch.zeros_like(values)
        for rows, selected in selections(document, query, sparse_indices, 2 * (keys.shape[-1] + values.shape[-1])):
            q, k = heads_of(queries[rows.index], key_heads), selected.gather(keys)
            do, o = heads_of(d_out[rows.index], key_heads), heads_of(out[rows.index], key_heads)
            p = attention_weights(q, k, selected, scale_value, maximum[rows.index], total[rows.index])
            ds = torch.einsum("rngd,rnsd->rngs", do, selected.gather(values))
            ds.sub_((do * o).sum(-1, keepdim=True)).mul_(p).mul_(scale_value)
            d_query[rows.index] = torch.einsum("rngs,rnsd->rngd", ds, k).flatten(1, 2).to(d_query.dtype)
            selected.scatter_add_(d_keys, torch.einsum("rngs,rngd->rnsd", ds, q))
            selected.scatter_add_(d_values, torch.einsum("rngs,rngd->rnsd", p, do))
        if value is None:
            d_keys[..., :size] += d_values
        d_key[document.key_index] = without_zero_row(d_keys).to(d_key.dtype)
        d_value[document.key_index] = without_zero_row(d_values).to(d_value.dtype)
    parts = [part.contiguous() for joined in (d_query, d_key) for part in joined.tensor_split([size], dim=-1)]
    empty = query.new_empty(0)
    d_ropes = (empty, empty) if query_rope is None else (parts[1], parts[3])
    return parts[0], parts[2], empty if value is None else d_value, *d_ropes


def with_rope(tensor: Tensor, rope: Tensor | None) -> Tensor:
    """Return ``tensor`` (..., D) with the features of the rope appended, (..., D + R)."""
    return tensor if rope is None else torch.cat([tensor, rope], dim=-1)


def selections(
    document: SequenceRanges, query: Tensor, sparse_indices: Tensor, gathered: int
) -> Iterator[tuple[QueryRows, SelectedKeys]]:
    """Yield the document's rows with their keys. ``gathered`` is the number of elements gathered per selected key."""
    *_, key_heads, count = sparse_indices.shape
    elements = min(count, len(document.keys)) * (key_heads * gathered + 3 * query.shape[-2])
    for rows in document.rows(elements, query.device):
        yield rows, SelectedKeys(sparse_indices[rows.index], rows.visible, len(document.keys))


def attention_logits(q: Tensor, k: Tensor, selected: SelectedKeys, scale: float) -> Tensor:
    """Return the softmax's argument, (rows, N2, N1/N2, entries), -inf at entries without a key."""
    logits = torch.einsum("rngd,rnsd->rngs", q, k).mul_(scale)
    return logits.masked_fill_(~selected.valid[:, :, None], -torch.inf)


def attention_weights(
    q: Tensor, k: Tensor, selected: SelectedKeys, scale: float, maximum: Tensor, total: Tensor
) -> Tensor:
    """Return the softmax (rows, N2, N1/N2, entries) from its statistics (rows, N2, N1/N2); 0 without a key."""
    logits = attention_logits(q, k, selected, scale)
    weights = logits.sub_(maximum[..., None]).exp_().div_(total[..., None])
    return weights.masked_fill_(~selected.valid[:, :, None], 0)
