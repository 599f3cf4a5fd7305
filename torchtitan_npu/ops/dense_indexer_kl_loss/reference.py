"""The indexer's loss over all keys, and its gradients, in plain PyTorch: a few rows and one head at a time."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from torchtitan_npu.ops.core.dtypes import compute_dtype
from torchtitan_npu.ops.sparse_flash_attention.selected_keys import Document, Rows, documents


@dataclass(frozen=True)
class DenseLossInputs:
    """The operator's arguments in the order of its schema.

    Shapes are those of the layout BSND. In TND, (T1, ...) replaces (B, S1, ...), (T2, ...) replaces (B, S2, ...), and
    the statistics are (N1, T1, 1) and (1, T1).
    """

    query: Tensor
    """Queries of attention, (B, S1, N1, D)."""
    key: Tensor
    """Keys of attention, (B, S2, N1, D): unlike in sparse attention, every head has its own."""
    query_index: Tensor
    """Queries of the indexer, (B, S1, N, E)."""
    key_index: Tensor
    """Keys of the indexer, (B, S2, 1, E)."""
    weights: Tensor
    """Head weights of the indexer, (B, S1, N)."""
    softmax_max: Tensor
    """Maximum of the argument of attention's softmax, (B, N1, S1, 1)."""
    softmax_sum: Tensor
    """Sum of the exponentials of attention's softmax, (B, N1, S1, 1)."""
    softmax_max_index: Tensor
    """Maximum of the indexer's scores, from ``npu_dense_lightning_indexer_softmax_lse``, (B, 1, S1)."""
    softmax_sum_index: Tensor
    """Sum of the exponentials of the indexer's scores less their maximum, (B, 1, S1)."""
    scale_value: float
    """Factor of the attention scores."""
    query_rope: Tensor | None
    """Rotary part of the queries, (B, S1, N1, R)."""
    key_rope: Tensor | None
    """Rotary part of the keys, (B, S2, N1, R)."""
    actual_seq_qlen: Sequence[int] | None
    """Ends of the documents among the queries, for TND."""
    actual_seq_klen: Sequence[int] | None
    """Ends of the documents among the keys, for TND."""
    layout: str
    """BSND or TND."""
    sparse_mode: int
    """3: causal, with the last query aligned to the last key."""
    pre_tokens: int
    next_tokens: int


BUFFERS = 6
"""The number of (rows, keys) tensors that are in memory at once, at most."""


def npu_dense_lightning_indexer_softmax_lse(
    query_index: Tensor,
    key_index: Tensor,
    weights: Tensor,
    actual_seq_qlen: Sequence[int] | None,
    actual_seq_klen: Sequence[int] | None,
    layout: str,
    sparse_mode: int,
    **_: Any,
) -> tuple[Tensor, Tensor]:
    r"""Return the statistics of the softmax over the indexer's scores of all keys that a query may attend to.

    .. math::
        I_{t,s} = \sum_h w_{t,h} \, \mathrm{ReLU}(\tilde{q}_{t,h} \cdot \tilde{k}_s), \qquad
        m_t = \max_s I_{t,s}, \qquad l_t = \sum_s e^{I_{t,s} - m_t}

    ``query_index`` (B, S1, N, E), ``key_index`` (B, S2, 1, E), ``weights`` (B, S1, N); in TND, (T, ...) replaces
    (B, S, ...). Returns m and l in float32, (B, 1, S1) or (1, T1). A row without keys has maximum -inf and sum 0.
    """
    shape = statistics_shape(query_index)
    m, l = (  # noqa: E741
        torch.full(shape, empty, dtype=compute_dtype(query_index), device=query_index.device)
        for empty in (-torch.inf, 0.0)
    )
    m_rows, l_rows = m.transpose(-1, -2).squeeze(-1), l.transpose(-1, -2).squeeze(-1)  # (B, S1) or (T1)
    for document in documents(layout, sparse_mode, query_index, key_index, actual_seq_qlen, actual_seq_klen):
        for rows, hidden in _chunks(document, query_index.device):
            k = _index_keys(key_index, document, hidden.shape[1])
            scores = _scores(query_index[rows.index], k, weights[rows.index]).masked_fill_(hidden, -torch.inf)
            highest = scores.amax(-1)
            m_rows[rows.index] = highest
            # -inf - -inf is NaN, so a row without keys subtracts 0
            l_rows[rows.index] = (scores - highest.masked_fill(highest == -torch.inf, 0)[:, None]).exp_().sum(-1)
    return m, l


def npu_dense_lightning_indexer_grad_kl_loss(**arguments: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    r"""Return the gradients and the value of the loss that trains the indexer on attention's distribution.

    With the scores I and their statistics m and l of :func:`npu_dense_lightning_indexer_softmax_lse`:

    .. math::
        p_{t,:} = \frac{\sum_h P_{t,h,:}}{\lVert \sum_h P_{t,h,:} \rVert_1}, \qquad
        q_{t,s} = e^{I_{t,s} - m_t} / l_t, \qquad L = \sum_t D_{KL}(p_{t,:} \,\Vert\, q_{t,:}), \qquad
        dI_{t,:} = q_{t,:} - p_{t,:}

    over the keys s up to t. P is attention's softmax, computed from its statistics, and is a constant. The arguments
    are those of :class:`~DenseLossInputs`. Returns the gradients of
    ``query_index``, ``key_index`` and ``weights`` in their shapes and dtypes, and the loss (1,) in float32. A row
    without keys contributes nothing.
    """
    x = DenseLossInputs(**arguments)
    compute = compute_dtype(x.query)
    d_query, d_key, d_weights = (
        torch.zeros(t.shape, dtype=t.dtype, device=t.device) for t in (x.query_index, x.key_index, x.weights)
    )
    losses = [torch.zeros((), dtype=compute, device=x.query.device)]
    m, l = (t.transpose(-1, -2).squeeze(-1) for t in (x.softmax_max_index, x.softmax_sum_index))  # noqa: E741
    for document in documents(x.layout, x.sparse_mode, x.query, x.key, x.actual_seq_qlen, x.actual_seq_klen):
        d_keys = torch.zeros(len(document.keys), x.key_index.shape[-1], dtype=compute, device=x.query.device)
        for rows, hidden in _chunks(document, x.query.device):
            p = _attention_mass(x, document, rows, hidden)
            p = (p / p.sum(-1, keepdim=True)).masked_fill_(hidden, 0)
            q, w = x.query_index[rows.index], x.weights[rows.index]
            k = _index_keys(x.key_index, document, hidden.shape[1])
            log_softmax = _scores(q, k, w).sub_((m[rows.index] + l[rows.index].log())[:, None])
            losses.append(torch.where(p > 0, p * (p.log() - log_softmax), 0).sum())
            d_scores = log_softmax.exp_().sub_(p).masked_fill_(hidden, 0)
            for head in range(q.shape[1]):
                q_head, w_head = q[:, head].to(compute), w[:, head].to(compute)
                logits = q_head @ k.mT
                d_weights[(*rows.index, head)] = (d_scores * logits.relu()).sum(-1).to(d_weights.dtype)
                d_logits = torch.where(logits > 0, d_scores * w_head[:, None], 0)
                d_query[(*rows.index, head)] = (d_logits @ k).to(d_query.dtype)
                d_keys[: hidden.shape[1]] += d_logits.mT @ q_head
        d_key[document.key_index] = d_keys[:, None].to(d_key.dtype)
    return d_query, d_key, d_weights, torch.stack(losses).sum(0, keepdim=True)


def statistics_shape(query_index: Tensor) -> list[int]:
    """Return the shape of the maximum and sum of the indexer's scores: (B, 1, S1) or (1, T1)."""
    *batch, rows, _, _ = query_index.shape
    return [*batch, 1, rows]


def _chunks(document: Document, device: torch.device) -> Iterator[tuple[Rows, Tensor]]:
    """Yield some rows of a document, and where their keys are hidden: (rows, keys up to the last row's last)."""
    for rows in document.rows(BUFFERS * len(document.keys), device):
        keys = len(document.keys)
        if document.causal:  # known without reading rows.visible, which is on the device
            stop = rows.index[-1].stop  # type: ignore[union-attr]
            keys = max(0, keys - (document.queries.stop - stop))
        if keys:
            yield rows, torch.arange(keys, device=device) >= rows.visible[:, :, 0]


def _index_keys(key_index: Tensor, document: Document, keys: int) -> Tensor:
    """Return the first ``keys`` of the document's indexer keys, (keys, E)."""
    return key_index[document.key_index][:keys, 0].to(compute_dtype(key_index))


def _scores(q: Tensor, k: Tensor, w: Tensor) -> Tensor:
    """Return the indexer's scores (rows, keys) of queries (rows, N, E) with weights (rows, N)."""
    scores = torch.zeros(len(q), len(k), dtype=k.dtype, device=k.device)
    for head in range(q.shape[1]):
        scores.addcmul_((q[:, head].to(k.dtype) @ k.mT).relu_(), w[:, head, None].to(k.dtype))
    return scores


def _attention_mass(x: DenseLossInputs, document: Document, rows: Rows, hidden: Tensor) -> Tensor:
    """Return attention's softmax summed over the heads, (rows, keys), 0 at hidden keys."""
    keys = hidden.shape[1]
    m, l = (t.squeeze(-1).transpose(-1, -2)[rows.index] for t in (x.softmax_max, x.softmax_sum))  # noqa: E741
    mass = torch.zeros(hidden.shape, dtype=m.dtype, device=m.device)
    for head in range(x.query.shape[-2]):
        q = _head(x.query, x.query_rope, rows.index, head)
        k = _head(x.key, x.key_rope, document.key_index, head)[:keys]
        weights = (q @ k.mT).mul_(x.scale_value).sub_(m[:, head, None]).exp_().div_(l[:, head, None])
        mass += weights.masked_fill_(hidden, 0)
    return mass


def _head(tensor: Tensor, rope: Tensor | None, index: tuple[Any, ...], head: int) -> Tensor:
    """Return one head of some tokens with the features of the rope appended: (tokens, D + R)."""
    part = tensor[index][:, head]
    return (part if rope is None else torch.cat([part, rope[index][:, head]], dim=-1)).to(compute_dtype(tensor))
