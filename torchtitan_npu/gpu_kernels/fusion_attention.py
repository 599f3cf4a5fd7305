"""Attention on PyTorch's kernels, for GPUs.

Sequences of equal length run on cuDNN's kernels where PyTorch has them, documents on its flash attention. Both keep the
logarithm of the sum of exponentials; it is returned as the statistic m, with l = 1.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from torchtitan_npu.ops.core.checks import longest_document


def npu_fusion_attention(
    query: Tensor, key: Tensor, value: Tensor, input_layout: str, scale: float, **options: Any
) -> Any:
    is_causal = options["atten_mask"] is not None
    q, k, v = (_rows(tensor, input_layout) for tensor in (query, key, value))
    if _runs_on_cudnn(q, k, v, is_causal):
        heads_first = (tensor.transpose(1, 2) for tensor in (q, k, v))
        output, lse, *_ = torch.ops.aten._scaled_dot_product_cudnn_attention(
            *heads_first, None, True, 0.0, is_causal, False, scale=scale
        )
        output, lse = output.transpose(1, 2), lse.squeeze(-1)
    else:
        padded = F.pad(v, (0, q.shape[-1] - v.shape[-1]))
        output, lse, *_ = torch.ops.aten._flash_attention_forward(
            q, k, padded, *_sequences(q, k, **options), 0.0, is_causal, False, scale=scale
        )
    output = _rows(output[..., : v.shape[-1]], input_layout).contiguous()
    statistic = _stored(lse, input_layout, **options)
    return output, statistic, torch.ones_like(statistic), query.new_empty(0), 0, 0, 0


def npu_fusion_attention_grad(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    dy: Tensor,
    input_layout: str,
    scale_value: float,
    softmax_max: Tensor,
    softmax_sum: Tensor,
    attention_in: Tensor,
    **options: Any,
) -> Any:
    is_causal = options["atten_mask"] is not None
    q, k, v, d_out, out = (_rows(tensor, input_layout) for tensor in (query, key, value, dy, attention_in))
    lse = _loaded(softmax_max + softmax_sum.log(), input_layout, **options)
    if _runs_on_cudnn(q, k, v, is_causal):
        heads_first = (tensor.transpose(1, 2) for tensor in (d_out, q, k, v, out))
        no_dropout = (torch.zeros((), dtype=torch.int64, device=q.device),) * 2
        lengths = None, None, q.shape[1], k.shape[1]
        dq, dk, dv = torch.ops.aten._scaled_dot_product_cudnn_attention_backward(
            *heads_first, lse.unsqueeze(-1), *no_dropout, None, *lengths, 0.0, is_causal, scale=scale_value
        )
        dq, dk, dv = (grad.transpose(1, 2) for grad in (dq, dk, dv))
    else:
        v, d_out, out = (F.pad(tensor, (0, q.shape[-1] - tensor.shape[-1])) for tensor in (v, d_out, out))
        no_dropout = torch.zeros(2, dtype=torch.uint64, device=q.device), torch.empty(0, device=q.device)
        dq, dk, dv = torch.ops.aten._flash_attention_backward(
            d_out, q, k, v, out, lse, *_sequences(q, k, **options), 0.0, is_causal, *no_dropout, scale=scale_value
        )
    grads = (_rows(grad, input_layout).contiguous() for grad in (dq, dk, dv[..., : value.shape[-1]]))
    return *grads, None, query.new_empty(0, dtype=torch.float32)


def _runs_on_cudnn(q: Tensor, k: Tensor, v: Tensor, is_causal: bool) -> bool:
    """Return whether cuDNN's kernels take these sequences (B, S, N, D). Its causal mask aligns the starts."""
    if q.dim() == 3 or q.shape[1] != k.shape[1]:
        return False
    is_grouped = q.shape[2] != k.shape[2]
    q, k, v = (tensor.transpose(1, 2) for tensor in (q, k, v))
    return torch.backends.cuda.can_use_cudnn_attention(
        torch.backends.cuda.SDPAParams(q, k, v, None, 0.0, is_causal, is_grouped)
    )


def _rows(tensor: Tensor, layout: str) -> Tensor:
    """Return the view (..., rows, heads, head size), or the layout's view of that."""
    return tensor.transpose(1, 2) if layout == "BNSD" else tensor


def _sequences(
    q: Tensor, k: Tensor, actual_seq_qlen: list[int] | None, actual_seq_kvlen: list[int] | None, **_: Any
) -> tuple[Any, Any, int, int]:
    """Return the starts of the documents of queries and keys, or None, and the lengths of the longest ones."""
    if actual_seq_qlen is None or actual_seq_kvlen is None:
        return None, None, q.shape[1], k.shape[1]
    queries, keys = (_starts(tuple(ends), q.device) for ends in (actual_seq_qlen, actual_seq_kvlen))
    return queries.tensor, keys.tensor, queries.longest, keys.longest


class _Starts(NamedTuple):
    tensor: Tensor
    """The starts of the documents and the end of the last one, int32."""
    longest: int
    """The length of the longest document."""


@functools.lru_cache(maxsize=8)  # all layers of a model have the same documents
def _starts(ends: tuple[int, ...], device: torch.device) -> _Starts:
    return _Starts(torch.tensor((0, *ends), dtype=torch.int32, device=device), longest_document(ends))


def _stored(lse: Tensor, layout: str, **options: Any) -> Tensor:
    """Return flash attention's statistic, (B, N, S) or (N, T), as the operator stores it."""
    if layout != "TND":
        return lse.unsqueeze(-1).expand(*lse.shape, 8).contiguous()
    by_row = lse.T.contiguous()  # (T, N)
    if options["softmax_layout"] != "TND":
        by_row = torch.empty_like(by_row).view(-1).scatter_(0, _order(by_row, **options).view(-1), by_row.view(-1))
        by_row = by_row.view(lse.shape[1], lse.shape[0])
    return by_row.unsqueeze(-1).expand(*by_row.shape, 8).contiguous()


def _loaded(statistic: Tensor, layout: str, **options: Any) -> Tensor:
    """Undo :func:`_stored`."""
    statistic = statistic[..., 0]
    if layout != "TND":
        return statistic.contiguous()
    if options["softmax_layout"] != "TND":
        statistic = statistic.flatten()[_order(statistic, **options)]
    return statistic.T.contiguous()


def _order(by_row: Tensor, actual_seq_qlen: list[int], **_: Any) -> Tensor:
    """Return where the statistic of each row and head (T, N) is stored: (N, rows) of one document after another."""
    tokens, heads = by_row.shape
    row, head = (torch.arange(size, device=by_row.device) for size in (tokens, heads))
    starts = _starts(tuple(actual_seq_qlen), by_row.device).tensor
    document = torch.searchsorted(starts, row, right=True)
    start = starts[document - 1]
    length = starts[document] - start
    return (heads * start + row - start)[:, None] + head * length[:, None]
