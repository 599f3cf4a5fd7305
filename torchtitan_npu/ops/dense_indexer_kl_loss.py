"""The indexer's loss over all keys, for its warm-up: two operators without autograd.

``npu_dense_lightning_indexer_softmax_lse`` computes the statistics of the indexer's softmax, with which
``npu_dense_lightning_indexer_grad_kl_loss`` computes the loss and its gradients. Neither keeps the scores of all keys.
To train with them, call :func:`torchtitan_npu.ops.indexer_kl_loss.op.with_indexer_loss`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from torchtitan_npu.ops.core.arguments import Call
from torchtitan_npu.ops.core.checks import check_is
from torchtitan_npu.ops.core.dtypes import compute_dtype
from torchtitan_npu.ops.core.op import Limit, declare
from torchtitan_npu.ops.core.sharding import shard_alike
from torchtitan_npu.ops.indexer_kl_loss import op as sparse_loss
from torchtitan_npu.ops.indexer_kl_loss.reference import LossInputs
from torchtitan_npu.ops.sparse_flash_attention import checks as shared
from torchtitan_npu.ops.sparse_flash_attention.reference import with_rope
from torchtitan_npu.ops.sparse_flash_attention.selected_keys import QueryRows, SequenceRanges, documents

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


def statistics_shape(query_index: Tensor) -> list[int]:
    """Return the shape of the maximum and sum of the indexer's scores: (B, 1, S1) or (1, T1)."""
    *batch, rows, _, _ = query_index.shape
    return [*batch, 1, rows]


def _chunks(document: SequenceRanges, device: torch.device) -> Iterator[tuple[QueryRows, Tensor]]:
    """Yield some rows of a document, and where their keys are hidden: (rows, keys up to the last row's last)."""
    for rows in document.rows(BUFFERS * len(document.keys), device):
        keys = len(document.keys)
        if document.causal:  # known without reading rows.visible, which is on the device
            stop = rows.index[-1].stop  # type: ignore[union-attr]
            keys = max(0, keys - (document.queries.stop - stop))
        if keys:
            yield rows, torch.arange(keys, device=device) >= rows.visible[:, :, 0]


def _index_keys(key_index: Tensor, document: SequenceRanges, keys: int) -> Tensor:
    """Return the first ``keys`` of the document's indexer keys, (keys, E)."""
    return key_index[document.key_index][:keys, 0].to(compute_dtype(key_index))


def _scores(q: Tensor, k: Tensor, w: Tensor) -> Tensor:
    """Return the indexer's scores (rows, keys) of queries (rows, N, E) with weights (rows, N)."""
    scores = torch.zeros(len(q), len(k), dtype=k.dtype, device=k.device)
    for head in range(q.shape[1]):
        scores.addcmul_((q[:, head].to(k.dtype) @ k.mT).relu_(), w[:, head, None].to(k.dtype))
    return scores


def statistics_checks(call: Call) -> Iterator[str]:
    yield from shared.check_layouts(layout=call.layout)
    yield from shared.check_tokens(call.layout, "query_index", call.query_index, "key_index", call.key_index)
    yield from sparse_loss.check_indexer(call)
    lengths = call.pick("actual_seq_qlen", "actual_seq_klen")
    yield from shared.check_length_lists(call.layout, call.query_index, call.key_index, **lengths)
    yield from shared.check_sparse_mode(call.sparse_mode, (3,))


def statistics_fake(call: Call) -> tuple[Tensor, ...]:
    shape, dtype = statistics_shape(call.query_index), compute_dtype(call.query_index)
    return tuple(call.query_index.new_empty(shape, dtype=dtype) for _ in range(2))


def _tokens(tensor: Tensor, layout: str) -> int:
    return tensor.shape[layout.index("T" if layout == "TND" else "S")]


INDEX_LIMITS = (
    *sparse_loss.INDEX_LIMITS,
    Limit(
        "the number of queries",
        lambda call: shared.longest(call.query_index, call.actual_seq_qlen),
        shared.SEQUENCE_LENGTHS,
    ),
)

declare(
    schema="npu::npu_dense_lightning_indexer_softmax_lse(Tensor query_index, Tensor key_index, Tensor weights, *, "
    'SymInt[]? actual_seq_qlen=None, SymInt[]? actual_seq_klen=None, str? layout="BSND", int? sparse_mode=3, '
    "int? pre_tokens=9223372036854775807, int? next_tokens=9223372036854775807) -> (Tensor, Tensor)",
    reference=npu_dense_lightning_indexer_softmax_lse,
    fake=statistics_fake,
    checks=statistics_checks,
    # a score sums over all heads, and the keys of a row depend on its position
    sharding=lambda call: shard_alike([0] if call.layout == "BSND" else [], 2, "query_index", "key_index", "weights"),
    limits=(Limit("query_index.dtype", lambda call: call.query_index.dtype, shared.HALVES), *INDEX_LIMITS),
    flops=lambda query_index, key_index, layout, **_: 2 * query_index.numel() * _tokens(key_index, layout),
)


# npu_dense_lightning_indexer_grad_kl_loss


@dataclass(frozen=True)
class DenseLossInputs(LossInputs):
    """The arguments of ``npu_dense_lightning_indexer_grad_kl_loss``."""

    softmax_max_index: Tensor
    """Maximum of the indexer's scores, from ``npu_dense_lightning_indexer_softmax_lse``, (B, 1, S1)."""
    softmax_sum_index: Tensor
    """Sum of the exponentials of the indexer's scores less their maximum, (B, 1, S1)."""


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
    queries, keys = with_rope(x.query, x.query_rope), with_rope(x.key, x.key_rope)
    m, l = (t.transpose(-1, -2).squeeze(-1) for t in (x.softmax_max_index, x.softmax_sum_index))  # noqa: E741
    for document in documents(x.layout, x.sparse_mode, x.query, x.key, x.actual_seq_qlen, x.actual_seq_klen):
        d_keys = torch.zeros(len(document.keys), x.key_index.shape[-1], dtype=compute, device=x.query.device)
        for rows, hidden in _chunks(document, x.query.device):
            p = _attention_mass(x, queries[rows.index], keys[document.key_index], rows, hidden)
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


def _attention_mass(x: DenseLossInputs, q: Tensor, k: Tensor, rows: QueryRows, hidden: Tensor) -> Tensor:
    """Return attention's softmax summed over the heads, (rows, keys), 0 at hidden keys."""
    m, l = (t.squeeze(-1).transpose(-1, -2)[rows.index] for t in (x.softmax_max, x.softmax_sum))  # noqa: E741
    mass = torch.zeros(hidden.shape, dtype=m.dtype, device=m.device)
    for head in range(q.shape[1]):
        q_head, k_head = q[:, head].to(m.dtype), k[: hidden.shape[1], head].to(m.dtype)
        weights = (q_head @ k_head.mT).mul_(x.scale_value).sub_(m[:, head, None]).exp_().div_(l[:, head, None])
        mass += weights.masked_fill_(hidden, 0)
    return mass


def checks(x: Call) -> Iterator[str]:
    yield from sparse_loss.check_inputs(x)
    if x.key.shape[-2] != x.query.shape[-2]:
        yield f"key must have the {x.query.shape[-2]} heads of query, not {x.key.shape[-2]}"
    shape, dtype = statistics_shape(x.query_index), compute_dtype(x.query_index)
    for name, value in x.pick("softmax_max_index", "softmax_sum_index").items():
        yield from check_is(name, value, dtype, shape, "as npu_dense_lightning_indexer_softmax_lse returns it")


declare(
    schema="npu::npu_dense_lightning_indexer_grad_kl_loss(Tensor query, Tensor key, Tensor query_index, "
    "Tensor key_index, Tensor weights, Tensor softmax_max, Tensor softmax_sum, Tensor softmax_max_index, "
    "Tensor softmax_sum_index, float scale_value, *, Tensor? query_rope=None, Tensor? key_rope=None, "
    'SymInt[]? actual_seq_qlen=None, SymInt[]? actual_seq_klen=None, str? layout="BSND", int? sparse_mode=3, '
    "int? pre_tokens=9223372036854775807, int? next_tokens=9223372036854775807) "
    "-> (Tensor, Tensor, Tensor, Tensor)",
    reference=npu_dense_lightning_indexer_grad_kl_loss,
    fake=sparse_loss.fake,
    checks=checks,
    sharding=sparse_loss.sharding,
    limits=(
        Limit("query.dtype", lambda call: call.query.dtype, shared.HALVES),
        Limit("the number of heads of query", lambda call: call.query.shape[-2], (32, 64, 128)),
        Limit("the head size of query", lambda call: call.query.shape[-1], (128,)),
        Limit("the head size of query_rope", lambda call: shared.rope_size(call.query_rope), (64,)),
        *INDEX_LIMITS,
        *shared.contiguous("query", "key", "query_index", "key_index", "weights"),
    ),
    flops=lambda key, layout, **arguments: sparse_loss.flops(_tokens(key, layout), **arguments),
)


# training


def dense_loss(key: Tensor, key_rope: Tensor, **arguments: Any) -> Sequence[Tensor]:
    """Return the gradients of ``query_index``, ``key_index`` and ``weights``, and the loss (1,).

    The arguments are those of ``npu_dense_lightning_indexer_grad_kl_loss`` but the indexer's statistics, which this
    function computes, and ``key_rope`` (B, S2, 1, R), which all heads share.
    """
    names = ("query_index", "key_index", "weights", "actual_seq_qlen", "actual_seq_klen", "layout")
    highest, total = torch.ops.npu.npu_dense_lightning_indexer_softmax_lse(**{name: arguments[name] for name in names})
    return torch.ops.npu.npu_dense_lightning_indexer_grad_kl_loss(
        key=key,
        key_rope=key_rope.expand(*key.shape[:-1], -1).contiguous(),
        softmax_max_index=highest,
        softmax_sum_index=total,
        **arguments,
    )
