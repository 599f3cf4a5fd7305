"""The gradients of the lightning indexer's selected scores, in Triton."""

from collections.abc import Callable
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from torchtitan_npu.gpu_kernels.launch import part_of, power_of_2, tile_of, uninitialized
from torchtitan_npu.gpu_kernels.sparse_flash_attention.triton_rows import Rows, count_of, keys_at, rows_of
from torchtitan_npu.gpu_kernels.sparse_flash_attention.triton_segments import add_segments, segments_of

WORKSPACE = 2**26
"""The number of contributions to keys in memory at once in deterministic mode: 256 MiB in float32."""


Gradients = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor, Rows], tuple[Tensor, Tensor, Tensor]]
"""The type of :func:`gradients`."""


def npu_lightning_indexer_grad(**arguments: Any) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients as the reference does.

    An index that is not a key of its row is ignored, in any slot. The reference raises for -1 before a key; a check
    here would synchronise with the device.
    """
    return of_operator(gradients, **arguments)


def of_operator(
    gradients: Gradients,
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
    """Return the operator's results for its arguments, from a function like :func:`gradients`."""
    rows = rows_of(layout, sparse_mode, query, key, actual_seq_lengths_query, actual_seq_lengths_key)
    return gradients(query, key, weights, sparse_indices, dy, rows)


def gradients(
    query: Tensor, key: Tensor, weights: Tensor, sparse_indices: Tensor, d_scores: Tensor, rows: Rows
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of ``query`` (..., N1, D), ``key`` (..., N2, D) and ``weights`` (..., N1), in their dtypes.

    ``d_scores`` is the gradient of the scores, in the shape of ``sparse_indices`` (..., N2, K). The gradient of a logit
    is rounded to the dtype of ``query`` before it is multiplied with queries and keys, as in any attention backward.
    All sums are in float32. Atomic additions sum the gradients of the keys in any order; with torch's deterministic
    algorithms the order is fixed.
    """
    heads, size = query.shape[-2:]
    key_heads, top_k = sparse_indices.shape[-2:]
    tokens = rows.first.numel()
    q, k, w, indices, dy = (t.contiguous() for t in (query, key, weights, sparse_indices, d_scores))
    d_query, d_weights = torch.empty_like(q), torch.empty_like(w)
    d_key = torch.zeros_like(k, dtype=torch.float32)
    in_order = torch.are_deterministic_algorithms_enabled()
    per_row = key_heads * top_k * size
    step = max(1, WORKSPACE // per_row) if in_order else tokens
    entries = (min(step, tokens), key_heads, top_k, size)
    contributions = uninitialized(entries, d_key.dtype, d_key.device) if in_order else d_key
    for start in range(0, tokens, step):
        part = (tokens, start, min(step, tokens - start))
        _gradients[(part[2], key_heads)](
            *(part_of(q, *part), k, part_of(w, *part), part_of(indices, *part), part_of(dy, *part)),
            *(part_of(rows.first, *part), part_of(rows.visible, *part)),
            *(part_of(d_query, *part), contributions, part_of(d_weights, *part)),
            **{"TOP_K": top_k, "HEADS": heads // key_heads, "KEY_HEADS": key_heads, "SIZE": size},
            **{"SLOTS": power_of_2(top_k), "HEAD_BLOCK": tile_of(heads // key_heads), "SIZE_BLOCK": tile_of(size)},
            IN_ORDER=in_order,
            **tile_sizes(query.dtype),
        )
        if in_order:
            add_segments(contributions, segments_of(indices, rows, *part[1:], d_key.numel() // size), d_key)
    return d_query, d_key.to(key.dtype), d_weights


def tile_sizes(dtype: torch.dtype) -> dict[str, int]:
    """Return the keys of a tile, and the launch options."""
    if dtype == torch.float32:  # for tests: exact products are slow with any tile
        return {"KEYS": 16, "num_warps": 4, "num_stages": 1}
    return {"KEYS": 64, "num_warps": 4, "num_stages": 3}


@triton.jit
def _gradients(
    query,
    key,
    weights,
    indices,
    d_scores,
    first,
    visible,
    d_query,
    d_key,
    d_weights,
    TOP_K: tl.constexpr,
    HEADS: tl.constexpr,
    KEY_HEADS: tl.constexpr,
    SIZE: tl.constexpr,
    SLOTS: tl.constexpr,
    HEAD_BLOCK: tl.constexpr,
    SIZE_BLOCK: tl.constexpr,
    IN_ORDER: tl.constexpr,
    KEYS: tl.constexpr,
):
    """Process all selected keys of one row and key head.

    ``d_key`` is the gradient to add to; with IN_ORDER, it takes the contribution of each entry instead.
    """
    key_head = tl.program_id(1)
    row = tl.program_id(0).to(tl.int64)
    begin = tl.load(first + row)
    seen = tl.load(visible + row)
    base = row * KEY_HEADS + key_head
    indices += base * TOP_K
    d_scores += base * TOP_K
    end = count_of(indices, seen, TOP_K, SLOTS)

    head = tl.arange(0, HEAD_BLOCK)
    d = tl.arange(0, SIZE_BLOCK)
    at_query = (base * HEADS + head)[:, None] * SIZE + d[None, :]
    real = (head < HEADS)[:, None] & (d < SIZE)[None, :]
    q = tl.load(query + at_query, mask=real, other=0.0)
    w = tl.load(weights + base * HEADS + head, mask=head < HEADS, other=0.0).to(tl.float32)
    dq = tl.zeros((HEAD_BLOCK, SIZE_BLOCK), tl.float32)
    dw = tl.zeros((KEYS, HEAD_BLOCK), tl.float32)
    for start in range(0, end, KEYS):
        entry = start + tl.arange(0, KEYS)
        keys, there = keys_at(indices, entry, TOP_K, begin, seen, key_head, KEY_HEADS)
        dy = tl.load(d_scores + entry, mask=there, other=0.0).to(tl.float32)
        at_key = keys.to(tl.int64)[:, None] * SIZE + d[None, :]
        held = there[:, None] & (d < SIZE)[None, :]
        k = tl.load(key + at_key, mask=held, other=0.0)
        logits = tl.dot(k, tl.trans(q), input_precision="ieee")
        active = there[:, None] & (logits > 0)
        dw += tl.where(active, logits, 0.0) * dy[:, None]
        d_logits = tl.where(active, dy[:, None] * w[None, :], 0.0).to(k.dtype)
        dq = tl.dot(tl.trans(d_logits), k, dq, input_precision="ieee")
        dk = tl.dot(d_logits, q, input_precision="ieee")
        if IN_ORDER:
            tl.store(d_key + (base * TOP_K + entry)[:, None] * SIZE + d[None, :], dk, mask=held)
        else:
            tl.atomic_add(d_key + at_key, dk, mask=held, sem="relaxed")
    tl.store(d_query + at_query, dq.to(d_query.dtype.element_ty), mask=real)
    d_weights += base * HEADS
    tl.store(d_weights + head, tl.sum(dw, 0).to(d_weights.dtype.element_ty), mask=head < HEADS)
