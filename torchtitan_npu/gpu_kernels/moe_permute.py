"""MoE permute (dispatch) and unpermute (combine) in Triton: a scatter and a gather, each reading a token's row once.

``sorted_indices`` (slots,) is a permutation. Each row belongs to one slot, so each row is written once and needs no
zero fill. A slot whose position is beyond the rows was dropped. The kernels do not check the values, since that would
synchronise with the device, but they never read or write outside the rows. The sum over the slots of a token runs in
their order, in float32.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from torchtitan_npu.gpu_kernels.launch import blocks_in, in_strides_of, power_of_2

SLOTS = 1024
"""Slots per program of the kernel that inverts the permutation."""


def npu_moe_token_permute(
    tokens: Tensor, indices: Tensor, num_out_tokens: int | None, **_: Any
) -> tuple[Tensor, Tensor]:
    slots = indices.numel()
    # expert numbers fit in 32 bits, which halves the passes of the sort
    order = indices.flatten().int().argsort(stable=True)
    sorted_indices = torch.empty(slots, dtype=torch.int32, device=tokens.device)
    permuted = tokens.new_empty(len(range(slots)[: num_out_tokens or None]), tokens.shape[1])
    if not slots:
        return permuted, sorted_indices
    _invert[(blocks_in(slots, SLOTS),)](order, sorted_indices, slots, BLOCK=SLOTS)
    _scatter_rows(tokens, sorted_indices, permuted, slots // tokens.shape[0])
    return permuted, sorted_indices


def npu_moe_token_permute_grad_v2(
    grad_permuted_tokens: Tensor,
    sorted_indices: Tensor,
    tokens_size_0: int,
    tokens_dtype: torch.dtype,
    num_topK: int,
    **_: Any,
) -> Tensor:
    out = grad_permuted_tokens.new_empty(tokens_size_0, grad_permuted_tokens.shape[1], dtype=tokens_dtype)
    return _gather_rows(grad_permuted_tokens, sorted_indices, None, out, num_topK)


def npu_moe_token_unpermute(permuted_tokens: Tensor, sorted_indices: Tensor, probs: Tensor | None, **_: Any) -> Tensor:
    tokens, top_k = (len(sorted_indices), 1) if probs is None else probs.shape
    out = permuted_tokens.new_empty(tokens, permuted_tokens.shape[1])
    return _gather_rows(permuted_tokens, sorted_indices, probs, out, top_k)


def unpermute_and_rows(permuted_tokens: Tensor, **forward: Any) -> tuple[Tensor, Tensor]:
    """Return the argument itself as the second output, as torch_npu does: a copy would take longer than the kernel."""
    return npu_moe_token_unpermute(permuted_tokens, **forward), permuted_tokens


def npu_moe_token_unpermute_grad_v2(
    grad_unpermuted_tokens: Tensor,
    sorted_indices: Tensor,
    permuted_tokens_size_0: int,
    permuted_tokens_dtype: torch.dtype,
    probs: Tensor | None,
    permuted_tokens: Tensor | None,
    **_: Any,
) -> tuple[Tensor, Tensor | None]:
    grad = grad_unpermuted_tokens
    grad_permuted = grad.new_empty(permuted_tokens_size_0, grad.shape[1], dtype=permuted_tokens_dtype)
    if probs is None or permuted_tokens is None:
        _scatter_rows(grad, sorted_indices, grad_permuted, 1)
        return grad_permuted, None
    grad_probs = torch.empty_like(probs, memory_format=torch.contiguous_format)
    _scatter_rows(grad, sorted_indices, grad_permuted, probs.shape[1], probs, permuted_tokens, grad_probs)
    return grad_permuted, in_strides_of(probs, grad_probs)


def _gather_rows(rows: Tensor, positions: Tensor, probs: Tensor | None, out: Tensor, top_k: int) -> Tensor:
    """Sum the rows of each token's slots to ``out``, weighted with ``probs``."""
    if not out.numel():
        return out
    tokens, width = out.shape
    block = min(1024, power_of_2(width))  # 16 bytes per thread; 1024 divides 7168
    blocks = blocks_in(width, block)
    weights = (positions if probs is None else probs).contiguous()
    _gather[(tokens * blocks,)](
        *(rows.contiguous(), positions.contiguous(), weights, out, rows.shape[0], width, blocks),
        TOP_K=top_k,
        UNROLL=min(8, power_of_2(top_k)),  # rows in flight from memory at once
        WEIGHTED=probs is not None,
        BLOCK=block,
        num_warps=4,
    )
    return out


def _scatter_rows(
    tokens: Tensor,
    positions: Tensor,
    out: Tensor,
    top_k: int,
    probs: Tensor | None = None,
    rows: Tensor | None = None,
    grad_probs: Tensor | None = None,
) -> None:
    """Copy each token to the rows of its slots in ``out``.

    With ``probs``, weight the copies and write the products with ``rows`` to ``grad_probs``.
    """
    if not tokens.numel():
        if grad_probs is not None:
            grad_probs.zero_()  # the sum over zero features
        return
    weighted = [(out if one is None else one).contiguous() for one in (probs, rows, grad_probs)]
    block = min(8192, power_of_2(out.shape[1]))  # the full row, if it fits: the gradient of a weight is a single sum
    _scatter[(tokens.shape[0],)](
        *(tokens.contiguous(), positions.contiguous(), out, *weighted, out.shape[0], out.shape[1]),
        TOP_K=top_k,
        WEIGHTED=probs is not None,
        BLOCK=block,
        num_warps=min(16, max(1, block // 512)),
    )


@triton.jit
def _invert(order, positions, count, BLOCK: tl.constexpr):
    position = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    slot = tl.load(order + position, mask=position < count, other=0)
    tl.store(positions + slot, position, mask=position < count)


@triton.jit
def _gather(
    rows,
    positions,
    probs,
    out,
    count,
    width,
    blocks,
    TOP_K: tl.constexpr,
    UNROLL: tl.constexpr,
    WEIGHTED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """out[token] = sum over its slots of rows[positions[slot]], times probs[slot]."""
    token = (tl.program_id(0) // blocks).to(tl.int64)
    column = (tl.program_id(0) % blocks) * BLOCK + tl.arange(0, BLOCK)
    inside = column < width
    total = tl.full((BLOCK,), 0.0, tl.float32)
    for choice in tl.range(0, TOP_K, loop_unroll_factor=UNROLL):
        slot = token * TOP_K + choice
        position = tl.load(positions + slot).to(tl.int64)
        has_row = inside & (position >= 0) & (position < count)
        row = tl.load(rows + position * width + column, mask=has_row, other=0.0).to(tl.float32)
        if WEIGHTED:
            row *= tl.load(probs + slot).to(tl.float32)
        total += row
    tl.store(out + token * width + column, total.to(out.dtype.element_ty), mask=inside)


@triton.jit
def _scatter(
    tokens,
    positions,
    out,
    probs,
    rows,
    grad_probs,
    count,
    width,
    TOP_K: tl.constexpr,
    WEIGHTED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """out[p] = tokens[token], times probs[slot]; grad_probs[slot] = rows[p] . tokens[token]; p = positions[slot]."""
    token = tl.program_id(0).to(tl.int64)
    for choice in tl.range(0, TOP_K):
        slot = token * TOP_K + choice
        position = tl.load(positions + slot).to(tl.int64)
        has_row = (position >= 0) & (position < count)
        products = tl.full((BLOCK,), 0.0, tl.float32)
        for first in tl.range(0, width, BLOCK):
            column = first + tl.arange(0, BLOCK)
            mask = has_row & (column < width)
            # the first slot reads from memory, later ones from the cache
            value = tl.load(tokens + token * width + column, mask=column < width, other=0.0)
            if WEIGHTED:
                weighted = value.to(tl.float32) * tl.load(probs + slot).to(tl.float32)
                row = tl.load(rows + position * width + column, mask=mask, other=0.0).to(tl.float32)
                products += row * value.to(tl.float32)
                tl.store(out + position * width + column, weighted.to(out.dtype.element_ty), mask=mask)
            else:
                tl.store(out + position * width + column, value.to(out.dtype.element_ty), mask=mask)
        if WEIGHTED:
            tl.store(grad_probs + slot, tl.sum(products, 0).to(grad_probs.dtype.element_ty))
