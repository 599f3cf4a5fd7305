"""``npu_sparse_lightning_indexer_grad_kl_loss`` for more queries than the NPU kernel takes in one call."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from torchtitan_npu.ops.indexer_kl_loss.op import MAX_QUERIES

OF_QUERIES = ("query", "query_index", "weights", "sparse_indices", "query_rope")
OF_KEYS = ("key", "key_index", "key_rope")
STATISTICS = ("softmax_max", "softmax_sum")


class Span(NamedTuple):
    """Neighbouring queries, and the keys that they may attend to."""

    queries: slice
    keys: slice
    ends: dict[str, list[int]]
    """The ends of the packed documents in the span, as the operator takes them. Empty for the layout BSND."""


def loss_in_spans(**arguments: Any) -> list[Tensor]:
    """Return the gradients of ``query_index``, ``key_index`` and ``weights``, and the loss (1,).

    The arguments are those of the operator. A key gets gradients from several spans, which are summed in float32, in
    the order of the spans; with more than one span, its gradient stays in float32. There must not be more queries than
    keys in a document, which CANN requires too.
    """
    loss = torch.ops.npu.npu_sparse_lightning_indexer_grad_kl_loss
    spans = list(spans_of(**arguments))
    if len(spans) == 1:
        return list(loss(**arguments))
    token_dim = 1 if arguments["layout"] == "BSND" else 0
    key_index = arguments["key_index"]
    d_key = torch.zeros_like(key_index, dtype=torch.promote_types(key_index.dtype, torch.float32))
    by_query: list[tuple[Tensor, Tensor]] = []
    losses = []
    for span in spans:
        d_query, d_span, d_weights, value = loss(**part_of(arguments, span))
        by_query.append((d_query, d_weights))
        losses.append(value)
        d_key.narrow(token_dim, span.keys.start, d_span.shape[token_dim]).add_(d_span)
    d_query, d_weights = (torch.cat(parts, token_dim) for parts in zip(*by_query, strict=True))
    return [d_query, d_key, d_weights, torch.stack(losses).sum(0)]


def spans_of(
    query: Tensor,
    key: Tensor,
    layout: str,
    actual_seq_qlen: Sequence[int] | None = None,
    actual_seq_klen: Sequence[int] | None = None,
    **_: Any,
) -> Iterator[Span]:
    """Yield spans of at most :data:`MAX_QUERIES` queries: of every batch row, or of all packed documents together."""
    if layout == "BSND":
        queries, keys = query.shape[1], key.shape[1]
        for first in range(0, queries, MAX_QUERIES):
            last = min(first + MAX_QUERIES, queries)
            yield Span(slice(first, last), slice(0, max(0, keys - queries + last)), {})
        return
    assert actual_seq_qlen is not None and actual_seq_klen is not None
    ends = list(zip(actual_seq_qlen, actual_seq_klen, strict=True))
    documents = list(zip([(0, 0), *ends], ends, strict=False))
    for first in range(0, query.shape[0], MAX_QUERIES):
        last = min(first + MAX_QUERIES, query.shape[0])
        query_ends, key_ends, start = [], [], None
        for (query_start, key_start), (query_end, key_end) in documents:
            if first <= query_start < last or query_start < first < query_end:
                start = key_start if start is None else start
                stop = min(query_end, last)
                query_ends.append(stop - first)
                key_ends.append(key_end - (query_end - stop) - start)
        assert start is not None
        lengths = {"actual_seq_qlen": query_ends, "actual_seq_klen": key_ends}
        yield Span(slice(first, last), slice(start, start + key_ends[-1]), lengths)


def part_of(arguments: dict[str, Any], span: Span) -> dict[str, Any]:
    """Return the arguments for one span. An NPU needs contiguous tensors."""
    token_dim = 1 if arguments["layout"] == "BSND" else 0
    places = {
        **dict.fromkeys(OF_QUERIES, (token_dim, span.queries)),
        **dict.fromkeys(OF_KEYS, (token_dim, span.keys)),
        **dict.fromkeys(STATISTICS, (-2, span.queries)),
    }
    part = {**arguments, **span.ends}
    for name, (dim, tokens) in places.items():
        if part.get(name) is not None:
            part[name] = part[name].narrow(dim, tokens.start, tokens.stop - tokens.start).contiguous()
    return part
