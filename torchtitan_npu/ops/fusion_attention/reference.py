"""Softmax attention and its gradient in plain PyTorch, for a few rows of scores at a time."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from torchtitan_npu.errors import UsageError
from torchtitan_npu.ops.core.dtypes import compute_dtype

SCORES_AT_A_TIME = 1 << 24
"""The number of scores (heads × queries × keys) in memory at once."""


class SequenceSlices(NamedTuple):
    """One sequence of the call: its batch row (0 in TND), and the rows of its queries and of its keys."""

    batch: int
    queries: slice
    keys: slice


def npu_fusion_attention(
    query: Tensor, key: Tensor, value: Tensor, head_num: int, input_layout: str, scale: float, **options: Any
) -> tuple[Tensor, Tensor, Tensor, Tensor, int, int, int]:
    r"""Compute attention of N query heads over M key heads. N/M neighbouring query heads share a key head.

    .. math:: s_{ij} = scale \; q_i \cdot k_j, \quad m_i = \max_j s_{ij}, \quad l_i = \sum_j e^{s_{ij} - m_i}, \quad
        o_i = \sum_j \frac{e^{s_{ij} - m_i}}{l_i} v_j

    over the keys j that query i attends to. ``input_layout`` is BSND (B, S, N, D), BNSD, BSH or SBH (H = N·D), or TND
    (T, N, D): packed documents, whose ends are ``actual_seq_qlen`` and ``actual_seq_kvlen``. A query without keys
    returns zeros. ``sparse_mode`` selects the keys of query i:

    - 0 and 1: those where ``atten_mask`` is not set;
    - 2: causal, the keys up to i;
    - 3: causal with aligned ends, the keys up to i + keys - queries.

    Returns the output o in ``input_layout`` with the D of ``value``; the statistics m and l in float32, eight copies of
    each; an empty tensor; and three zeros, the seed, offset and length of a dropout mask. The statistics are
    (B, N, S, 8). In TND they are (T, N, 8) if ``softmax_layout`` is "TND"; else the same memory holds (N, S, 8) of one
    document after another. Computes in float32, or in float64 for float64 input.
    """
    _check_compressed_mask(**options)
    shapes = output_shapes(query, key, value, head_num, input_layout)
    output = query.new_empty(shapes[0])
    m_all, l_all = (query.new_empty(shapes[1], dtype=compute_dtype(query)) for _ in range(2))
    for document in _documents(query, key, input_layout, **options):
        q, k, v = _queries_keys_values(query, key, value, head_num, input_layout, document)
        o = _heads(output, input_layout, head_num, document.batch, document.queries)
        m, l = (_statistics(one, document, input_layout, **options) for one in (m_all, l_all))  # noqa: E741
        for rows in _chunks(q, k):
            scores = _scores(q, k, scale, rows, document, **options)
            lowest = torch.full_like(q[:, rows, :1], torch.finfo(q.dtype).min)  # finite, for queries without keys
            m_rows = lowest.maximum(scores.amax(-1, keepdim=True)) if scores.numel() else lowest
            weights = (scores - m_rows).exp()
            l_rows = weights.sum(-1, keepdim=True)
            m[:, rows], l[:, rows] = m_rows, l_rows
            o[:, rows] = (weights @ v / l_rows.masked_fill(l_rows == 0, 1)).to(o.dtype)
    return output, m_all, l_all, query.new_empty(0), 0, 0, 0


def npu_fusion_attention_grad(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    dy: Tensor,
    head_num: int,
    input_layout: str,
    softmax_max: Tensor,
    softmax_sum: Tensor,
    attention_in: Tensor,
    scale_value: float,
    **options: Any,
) -> tuple[Tensor, Tensor, Tensor, None, Tensor]:
    r"""Return the gradients of :func:`npu_fusion_attention`'s output o, given o and its statistics m and l.

    .. math:: p_{ij} = e^{s_{ij} - m_i} / l_i, \quad dv_j = \sum_i p_{ij} \, dy_i, \quad
        ds_{ij} = p_{ij} (dy_i \cdot v_j - dy_i \cdot o_i), \quad
        dq_i = scale \sum_j ds_{ij} \, k_j, \quad dk_j = scale \sum_i ds_{ij} \, q_i

    Returns dq, dk and dv in the shapes of ``query``, ``key`` and ``value``, ``None`` for ``pse``, and an empty tensor
    for ``sink``.
    """
    grads = [tensor.new_empty(tensor.shape) for tensor in (query, key, value)]
    for document in _documents(query, key, input_layout, **options):
        q, k, v = _queries_keys_values(query, key, value, head_num, input_layout, document)
        d_out, o = (_heads(one, input_layout, head_num, *document[:2]).to(q.dtype) for one in (dy, attention_in))
        m, l = (  # noqa: E741
            _statistics(one, document, input_layout, **options)[..., :1] for one in (softmax_max, softmax_sum)
        )
        dq, dk, dv = (torch.zeros_like(one) for one in (q, k, v))
        for rows in _chunks(q, k):
            scores = _scores(q, k, scale_value, rows, document, **options)
            p = (scores - m[:, rows]).exp() / l[:, rows].masked_fill(l[:, rows] == 0, 1)
            d_rows = d_out[:, rows]
            ds = p * (d_rows @ v.mT - (d_rows * o[:, rows]).sum(-1, keepdim=True)) * scale_value
            dq[:, rows] = ds @ k
            dk += ds.mT @ q[:, rows]
            dv += p.mT @ d_rows
        key_heads = _key_heads(query, key, head_num, input_layout)
        heads_and_rows = (head_num, document.queries), (key_heads, document.keys), (key_heads, document.keys)
        for all_rows, (heads, rows), grad in zip(grads, heads_and_rows, (dq, dk, dv), strict=True):
            # the gradient of a key head is the sum over its query heads
            grad = grad.unflatten(0, (heads, head_num // heads)).sum(1)
            _heads(all_rows, input_layout, heads, document.batch, rows).copy_(grad)
    return grads[0], grads[1], grads[2], None, query.new_empty(0, dtype=torch.float32)


def output_shapes(query: Tensor, key: Tensor, value: Tensor, head_num: int, layout: str) -> tuple[list[int], list[int]]:
    """Return the shapes of the output and of a statistic."""
    if layout == "TND":
        return [*query.shape[:2], value.shape[2]], [*query.shape[:2], 8]
    batch, rows = query.shape[layout.index("B")], query.shape[layout.index("S")]
    size = value.shape[-1] // (1 if "N" in layout else _key_heads(query, key, head_num, layout))
    last = [size] if "N" in layout else [head_num * size]
    return [*query.shape[:-1], *last], [batch, head_num, rows, 8]


def _key_heads(query: Tensor, key: Tensor, head_num: int, layout: str) -> int:
    return key.shape[layout.index("N")] if "N" in layout else head_num * key.shape[2] // query.shape[2]


def _check_compressed_mask(atten_mask: Tensor | None, sparse_mode: int, **_: Any) -> None:
    """Check the values of the mask, which an NPU reads and this kernel does not."""
    if sparse_mode in (2, 3) and atten_mask is not None and atten_mask.device.type == "cpu":
        expected = _above_diagonal(len(atten_mask))
        if not (_equal_bytes(atten_mask, expected) or torch.equal(atten_mask.bool(), expected)):
            raise UsageError(
                "npu_fusion_attention: atten_mask must be set above the diagonal and nowhere else "
                f"if sparse_mode is {sparse_mode}"
            )


@functools.cache
def _above_diagonal(size: int) -> Tensor:
    return torch.ones(size, size, dtype=torch.bool).triu(1)


def _equal_bytes(left: Tensor, right: Tensor) -> bool:
    """Compare eight bytes at a time, a small fraction of the time of attention over a few keys."""
    if left.shape != right.shape or left.element_size() != 1 or not left.is_contiguous():
        return False
    aligned = left.shape[-1] % 8 == left.storage_offset() % 8 == 0
    return aligned and torch.equal(left.view(torch.int64), right.view(torch.int64))


def _documents(
    query: Tensor,
    key: Tensor,
    layout: str,
    actual_seq_qlen: list[int] | None,
    actual_seq_kvlen: list[int] | None,
    **_: Any,
) -> Iterator[SequenceSlices]:
    if actual_seq_qlen is None or actual_seq_kvlen is None:
        batch, rows = layout.index("B"), layout.index("S")
        for row in range(query.shape[batch]):
            yield SequenceSlices(row, slice(0, query.shape[rows]), slice(0, key.shape[rows]))
    else:
        ends = list(zip(actual_seq_qlen, actual_seq_kvlen, strict=True))
        for (q_start, k_start), (q_end, k_end) in zip([(0, 0), *ends], ends, strict=False):
            yield SequenceSlices(0, slice(q_start, q_end), slice(k_start, k_end))


def _heads(tensor: Tensor, layout: str, heads: int, batch: int, rows: slice) -> Tensor:
    """Return a view of some rows of one batch row as (heads, rows, D)."""
    index: dict[str, int | slice] = {"B": batch, "S": rows, "T": rows}
    part = tensor[tuple(index.get(name, slice(None)) for name in layout)]
    if "N" not in layout:
        part = part.unflatten(-1, (heads, -1))
    return part if layout == "BNSD" else part.transpose(0, 1)


def _queries_keys_values(
    query: Tensor, key: Tensor, value: Tensor, head_num: int, layout: str, document: SequenceSlices
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the queries, keys and values of a document as (N, rows, D), in the dtype to compute in."""
    key_heads, compute = _key_heads(query, key, head_num, layout), compute_dtype(query)
    q = _heads(query, layout, head_num, document.batch, document.queries)
    k, v = (_heads(one, layout, key_heads, document.batch, document.keys) for one in (key, value))
    repeats = head_num // key_heads
    return q.to(compute), k.to(compute).repeat_interleave(repeats, 0), v.to(compute).repeat_interleave(repeats, 0)


def _statistics(packed: Tensor, document: SequenceSlices, layout: str, softmax_layout: str, **_: Any) -> Tensor:
    """Return a document's part of a statistic as (N, queries, 8)."""
    if layout != "TND":
        return packed[document.batch]
    if softmax_layout == "TND":
        return packed[document.queries].transpose(0, 1)
    # documents are stored one after another, so the offset of a document is the number of its first row
    heads, rows = packed.shape[1], document.queries
    return packed.flatten(0, 1)[heads * rows.start : heads * rows.stop].unflatten(0, (heads, rows.stop - rows.start))


def _chunks(q: Tensor, k: Tensor) -> Iterator[slice]:
    """Yield slices of the queries whose scores against all keys fit ``SCORES_AT_A_TIME``."""
    rows = max(1, SCORES_AT_A_TIME // max(1, k.shape[0] * k.shape[1]))
    for start in range(0, q.shape[1], rows):
        yield slice(start, min(start + rows, q.shape[1]))


def _scores(
    q: Tensor,
    k: Tensor,
    scale: float,
    rows: slice,
    document: SequenceSlices,
    atten_mask: Tensor | None,
    sparse_mode: int,
    pre_tockens: int,
    next_tockens: int,
    **_: Any,
) -> Tensor:
    """Return the scores (N, rows, keys), minus infinity where a query does not attend to a key."""
    scores = q[:, rows] @ k.mT * scale
    if atten_mask is None:
        return scores
    i, j = torch.arange(rows.start, rows.stop, device=q.device)[:, None], torch.arange(k.shape[1], device=q.device)
    if sparse_mode in (2, 3):
        return scores.masked_fill_(j > (i if sparse_mode == 2 else i + k.shape[1] - q.shape[1]), -torch.inf)
    hidden = atten_mask[..., rows, : k.shape[1]].bool()
    if hidden.dim() == 4:
        hidden = hidden[document.batch if len(hidden) > 1 else 0]
    if sparse_mode == 0 and hidden.device.type == "cpu":
        # an NPU skips the keys outside; its result is undefined if the mask does not hide them
        outside = (i - j > pre_tockens) | (j - i > next_tockens)
        if (outside & ~hidden).any():
            raise UsageError(
                f"npu_fusion_attention: atten_mask must hide the keys outside pre_tockens {pre_tockens} and "
                f"next_tockens {next_tockens}"
            )
    return scores.masked_fill_(hidden, -torch.inf)
