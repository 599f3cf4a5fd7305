"""Sorting tokens by expert from a map of who goes where, and adding them up again, with the gradients.

``routing_map`` (tokens, experts) says which experts a token goes to; the permuted rows follow its columns, expert after
expert. Without ``drop_and_pad`` each token has ``top_k`` slots, slot ``i`` belongs to token ``i // top_k``, and
``sorted_indices`` (slots,) gives the row of each slot, -1 for none. With it each expert takes ``capacity`` rows, the
tokens routed to it first and others behind them, and ``sorted_indices`` (rows,) gives the token of each row.
"""

from __future__ import annotations

import torch
from torch import Tensor

from torchtitan_npu.errors import UsageError


def npu_moe_token_permute_with_routing_map(
    tokens: Tensor, routing_map: Tensor, probs: Tensor | None, num_out_tokens: int | None, drop_and_pad: bool
) -> tuple[Tensor, Tensor | None, Tensor]:
    r"""Copy each token to the rows of its experts, and its weights ``probs`` (tokens, experts) with it.

    Without ``drop_and_pad``, ``top_k = num_out_tokens // tokens``, which every row of the map must have:

    .. math:: permuted[sorted\_indices_i] = tokens[i // top\_k]

    With it, ``capacity = num_out_tokens // experts``:

    .. math:: permuted_r = tokens[sorted\_indices_r], \quad r = expert \cdot capacity + place

    Returns ``permuted_tokens`` (rows, hidden), ``permuted_probs`` (rows,) or ``None``, ``sorted_indices`` in int32.
    """
    tokens_num, experts_num = routing_map.shape
    wanted = tokens_num if num_out_tokens is None else num_out_tokens
    by_expert = routing_map.T.bool()  # (experts, tokens)
    if drop_and_pad:
        token_of_row = by_expert.int().argsort(dim=-1, descending=True, stable=True)[:, : wanted // experts_num]
        permuted_probs = None if probs is None else probs.T.gather(1, token_of_row).flatten()
        token_of_row = token_of_row.flatten()
        sorted_indices = token_of_row
    else:
        top_k = wanted // max(tokens_num, 1)
        if (by_expert.sum(0) != top_k).any():
            raise UsageError(
                f"npu_moe_token_permute_with_routing_map: every row of routing_map must name {top_k} experts, "
                f"num_out_tokens // tokens = {wanted} // {tokens_num}"
            )
        token_of_row = by_expert.nonzero()[:, 1]
        permuted_probs = None if probs is None else probs.T[by_expert]
        sorted_indices = token_of_row.argsort(stable=True)
    return tokens[token_of_row], permuted_probs, sorted_indices.int()


def npu_moe_token_permute_with_routing_map_grad(
    permuted_token_out_grad: Tensor,
    probs_grad: Tensor | None,
    sorted_indices: Tensor,
    routing_map: Tensor,
    experts_num: int,
    tokens_num: int,
    drop_and_pad: bool,
) -> tuple[Tensor, Tensor | None]:
    """Gradients of :func:`npu_moe_token_permute_with_routing_map`: each token's sum over its rows; each weight's row.

    ``permuted_token_out_grad`` (rows, hidden), ``probs_grad`` (rows,). Returns (tokens, hidden), and (tokens, experts)
    or ``None`` without ``probs_grad``.
    """
    rows, token_of_row = _rows_and_tokens(sorted_indices, tokens_num, drop_and_pad)
    grad = _upcast(permuted_token_out_grad)
    grad_tokens = grad.new_zeros(tokens_num, grad.shape[1]).index_add_(0, token_of_row, grad[rows])
    grad_probs = None
    if probs_grad is not None:
        grad_probs = _to_map(probs_grad, rows, token_of_row, routing_map, drop_and_pad)
    return grad_tokens.to(permuted_token_out_grad.dtype), grad_probs


def _npu_moe_token_unpermute_with_routing_map(
    permuted_tokens: Tensor,
    sorted_indices: Tensor,
    restore_shape: list[int],
    probs: Tensor | None,
    routing_map: Tensor | None,
    drop_and_pad: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    r"""Add up the rows of each token, weighted by ``probs`` (tokens, experts).

    .. math:: unpermuted[permuted\_token\_id_j] \mathrel{+}=
              permuted[out\_index_j] \, permuted\_probs[out\_index_j]

    Returns ``unpermuted_tokens`` of ``restore_shape`` (tokens, hidden), ``out_index`` and ``permuted_token_id`` (the
    rows and their tokens, in the tokens' order, -1 for a slot without a row), ``permuted_probs`` (rows,) or ``None``.
    """
    tokens_num, hidden = restore_shape
    if drop_and_pad:
        permuted_token_id, out_index = sorted_indices.sort(stable=True)
    else:
        top_k = len(sorted_indices) // max(tokens_num, 1)
        out_index = sorted_indices.clone()
        permuted_token_id = torch.arange(len(sorted_indices), device=sorted_indices.device) // max(top_k, 1)
    used = out_index >= 0
    rows, tokens = out_index[used], permuted_token_id[used]

    contributions, permuted_probs = _upcast(permuted_tokens, probs)[rows], None
    if probs is not None and routing_map is not None:
        permuted_probs = _from_map(probs, rows, tokens, routing_map, drop_and_pad, len(sorted_indices))
        contributions = contributions * permuted_probs[rows].unsqueeze(-1)
    unpermuted = contributions.new_zeros(tokens_num, hidden).index_add_(0, tokens, contributions)
    return unpermuted.to(permuted_tokens.dtype), out_index.int(), permuted_token_id.int(), permuted_probs


def npu_moe_token_unpermute_with_routing_map(
    permuted_tokens: Tensor,
    sorted_indices: Tensor,
    restore_shape: list[int],
    probs: Tensor | None,
    routing_map: Tensor | None,
    drop_and_pad: bool,
) -> Tensor:
    """The first output of :func:`_npu_moe_token_unpermute_with_routing_map`."""
    return _npu_moe_token_unpermute_with_routing_map(
        permuted_tokens, sorted_indices, restore_shape, probs, routing_map, drop_and_pad
    )[0]


def npu_moe_token_unpermute_with_routing_map_grad(
    unpermuted_tokens_grad: Tensor,
    out_index: Tensor,
    permuted_token_id: Tensor,
    routing_map: Tensor | None,
    permuted_tokens: Tensor | None,
    probs: Tensor | None,
    drop_and_pad: bool,
    restore_shape: list[int],
) -> tuple[Tensor, Tensor | None]:
    r"""Gradients of :func:`_npu_moe_token_unpermute_with_routing_map`.

    .. math:: d\,permuted_r = permuted\_probs_r \, d\,unpermuted[token_r], \qquad
              d\,permuted\_probs_r = permuted_r \cdot d\,unpermuted[token_r]

    for row :math:`r = out\_index_j` and its token :math:`permuted\_token\_id_j`. Returns (rows, hidden), and
    (tokens, experts) or ``None`` without ``probs``, both in the dtype of ``unpermuted_tokens_grad``.
    """
    used = out_index >= 0
    rows, tokens = out_index[used], permuted_token_id[used]
    dtype = unpermuted_tokens_grad.dtype
    grad = _upcast(unpermuted_tokens_grad, probs)[tokens]  # (used rows, hidden)
    weighted, grad_probs = grad, None
    if probs is not None and routing_map is not None and permuted_tokens is not None:
        permuted_probs = _from_map(probs, rows, tokens, routing_map, drop_and_pad, len(out_index))
        weighted = grad * permuted_probs[rows].unsqueeze(-1)
        dots = grad.new_zeros(len(out_index))
        dots[rows] = (_upcast(permuted_tokens, grad)[rows] * grad).sum(-1)
        grad_probs = _to_map(dots, rows, tokens, routing_map, drop_and_pad).to(dtype)
    grad_permuted = grad.new_zeros(len(out_index), grad.shape[1])
    grad_permuted[rows] = weighted
    return grad_permuted.to(dtype), grad_probs


def _rows_and_tokens(sorted_indices: Tensor, tokens_num: int, drop_and_pad: bool) -> tuple[Tensor, Tensor]:
    """The rows in use, and the token of each."""
    places = torch.arange(len(sorted_indices), device=sorted_indices.device)
    if drop_and_pad:
        return places, sorted_indices
    used = sorted_indices >= 0
    return sorted_indices[used], (places // max(len(sorted_indices) // max(tokens_num, 1), 1))[used]


def _from_map(
    values: Tensor, rows: Tensor, tokens: Tensor, routing_map: Tensor, drop_and_pad: bool, size: int
) -> Tensor:
    """The value of each permuted row, ``(size,)``, from ``values`` (tokens, experts); 0 for rows not in use."""
    per_row = values.new_zeros(size)
    if drop_and_pad:
        per_row[rows] = values[tokens, rows // _capacity(size, routing_map)]
    else:
        chosen = values.T[routing_map.T.bool()]
        per_row[: len(chosen)] = chosen
    return per_row


def _to_map(per_row: Tensor, rows: Tensor, tokens: Tensor, routing_map: Tensor, drop_and_pad: bool) -> Tensor:
    """The inverse of :func:`_from_map`: (tokens, experts), 0 where no row came from."""
    if drop_and_pad:
        values = per_row.new_zeros(routing_map.shape)
        values[tokens, rows // _capacity(len(per_row), routing_map)] = per_row[rows]
        return values
    by_expert = routing_map.T.bool()
    return per_row.new_zeros(by_expert.shape).masked_scatter_(by_expert, per_row).T.contiguous()


def _capacity(rows: int, routing_map: Tensor) -> int:
    return max(rows // routing_map.shape[1], 1)


def _upcast(tensor: Tensor, other: Tensor | None = None) -> Tensor:
    """``tensor`` in the dtype to compute in: float32, or float64 where either is."""
    double = torch.float64 in (tensor.dtype, None if other is None else other.dtype)
    return tensor.double() if double else tensor.float()
