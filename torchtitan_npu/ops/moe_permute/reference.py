"""MoE permute and unpermute, with their gradients, in plain PyTorch.

A *slot* is one of the ``top_k`` choices of a token: slot ``i`` belongs to token ``i // top_k``. A slot whose position
is beyond the permuted rows was dropped (``num_out_tokens``). It contributes nothing and gets no gradient.
"""

from __future__ import annotations

import torch
from torch import Tensor


def npu_moe_token_permute(
    tokens: Tensor, indices: Tensor, num_out_tokens: int | None, padded_mode: bool
) -> tuple[Tensor, Tensor]:
    r"""Copy each token once for each of its experts, sorted by expert and, within an expert, by slot.

    .. math:: order = argsort(flatten(indices)), \quad sorted\_indices = argsort(order), \quad
              permuted[sorted\_indices_i] = tokens[i // top\_k]

    ``tokens`` (tokens, hidden), ``indices`` (tokens, top_k) or (tokens,): the experts. Returns ``permuted_tokens``
    (slots, hidden) and ``sorted_indices`` (slots,) in int32. With a ``num_out_tokens`` other than 0, only the rows of
    the slice ``[:num_out_tokens]`` are returned; ``sorted_indices`` keeps every slot.
    """
    order = indices.flatten().argsort(stable=True)
    sorted_indices = torch.empty_like(order).scatter_(0, order, torch.arange(len(order), device=order.device))
    top_k = indices.shape[1] if indices.dim() == 2 else 1
    return tokens[order[: num_out_tokens or None] // top_k], sorted_indices.int()


def npu_moe_token_permute_grad_v2(
    grad_permuted_tokens: Tensor,
    sorted_indices: Tensor,
    tokens_size_0: int,
    tokens_dtype: torch.dtype,
    num_topK: int,
    padded_mode: bool,
) -> Tensor:
    r"""Return the gradient of :func:`npu_moe_token_permute`: the sum over the copies of each token.

    .. math:: d\,tokens_t = \sum_{i \in slots(t)} d\,permuted[sorted\_indices_i]

    ``grad_permuted_tokens`` (rows, hidden), ``sorted_indices`` (slots,). Returns (tokens_size_0, hidden).
    """
    grad = _upcast(grad_permuted_tokens)
    rows = _rows_or_zero(grad, sorted_indices)
    return rows.view(tokens_size_0, num_topK, grad.shape[1]).sum(1).to(tokens_dtype)


def npu_moe_token_unpermute(
    permuted_tokens: Tensor,
    sorted_indices: Tensor,
    probs: Tensor | None,
    padded_mode: bool,
    restore_shape: list[int] | None,
) -> Tensor:
    r"""Sum the rows of each token, weighted by ``probs``.

    .. math:: unpermuted_t = \sum_{i \in slots(t)} permuted[sorted\_indices_i] \, probs_i

    ``permuted_tokens`` (rows, hidden), ``sorted_indices`` (slots,), ``probs`` (tokens, top_k). Without ``probs``, each
    token has one slot of weight 1. Returns (tokens, hidden) in the dtype of ``permuted_tokens``.
    """
    rows = _rows_or_zero(_upcast(permuted_tokens, probs), sorted_indices)
    if probs is not None:
        rows = (rows.view(*probs.shape, rows.shape[1]) * probs.unsqueeze(-1)).sum(1)
    return rows.to(permuted_tokens.dtype)


def unpermute_and_rows(
    permuted_tokens: Tensor,
    sorted_indices: Tensor,
    probs: Tensor | None,
    padded_mode: bool,
    restore_shape: list[int] | None,
) -> tuple[Tensor, Tensor]:
    """Return :func:`npu_moe_token_unpermute` and ``permuted_tokens``, which the backward reads: the kernel of
    ``_npu_moe_token_unpermute``.

    torch_npu returns the argument itself. The schema does not declare that alias, so PyTorch requires a copy here.
    """
    unpermuted = npu_moe_token_unpermute(permuted_tokens, sorted_indices, probs, padded_mode, restore_shape)
    return unpermuted, permuted_tokens.clone()


def npu_moe_token_unpermute_grad_v2(
    grad_unpermuted_tokens: Tensor,
    sorted_indices: Tensor,
    permuted_tokens_size_0: int,
    permuted_tokens_dtype: torch.dtype,
    probs: Tensor | None,
    padded_mode: bool,
    restore_shape: list[int] | None,
    permuted_tokens: Tensor | None,
) -> tuple[Tensor, Tensor | None]:
    r"""Return the gradients of :func:`npu_moe_token_unpermute` with respect to ``permuted_tokens`` and ``probs``.

    .. math:: d\,permuted[sorted\_indices_i] = probs_i \, d\,unpermuted[i // top\_k], \qquad
              d\,probs_i = permuted[sorted\_indices_i] \cdot d\,unpermuted[i // top\_k]

    ``grad_unpermuted_tokens`` (tokens, hidden), the rest as in the forward. Returns (permuted_tokens_size_0, hidden) in
    ``permuted_tokens_dtype``, and (tokens, top_k) in the dtype of ``probs``, or ``None`` without ``probs``.
    """
    grad = _upcast(grad_unpermuted_tokens, probs)
    weighted, grad_probs = grad, None
    if probs is not None and permuted_tokens is not None:
        grad = grad.repeat_interleave(probs.shape[1], dim=0)  # (slots, hidden)
        weighted = grad * probs.reshape(-1, 1)
        dots = (_rows_or_zero(_upcast(permuted_tokens, grad), sorted_indices) * grad).sum(-1)
        grad_probs = torch.empty_like(probs).copy_(dots.view(probs.shape))
    kept = sorted_indices < permuted_tokens_size_0
    grad_permuted = grad.new_zeros(permuted_tokens_size_0, grad.shape[1])
    grad_permuted[sorted_indices[kept]] = weighted[kept]
    return grad_permuted.to(permuted_tokens_dtype), grad_probs


def _rows_or_zero(rows: Tensor, positions: Tensor) -> Tensor:
    """Return ``rows[positions]``, with zeros for positions beyond the last row."""
    kept = positions < rows.shape[0]
    gathered = rows.new_zeros(len(positions), rows.shape[1])
    gathered[kept] = rows[positions[kept]]
    return gathered


def _upcast(tensor: Tensor, other: Tensor | None = None) -> Tensor:
    """Return ``tensor`` in the dtype to compute in: float32, or float64 if either argument is float64."""
    double = torch.float64 in (tensor.dtype, None if other is None else other.dtype)
    return tensor.double() if double else tensor.float()
