"""Workspaces of fused operators on Ascend910B and Ascend910_93, from the public tiling of CANN's operators.

A workspace is device memory that a kernel uses during a call. The emulator allocates it, and the planner counts it.
Each function takes torch_npu's arguments by name and returns bytes. Buffers of a few MiB per core whose size depends on
the choice of a tile are left out.

Source: op_host/ of the operators in the repositories ops-transformer and ops-nn, August 2026. The dense indexer loss:
op_host/dense_lightning_indexer_softmax_lse_tiling.cpp and op_host/dense_lightning_indexer_grad_kl_loss_tiling.cpp at
v9.1.0.pre. At v9.0.1 the latter has 132 MiB more.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

SYSTEM = 16 << 20
"""Reserved by every fused operator."""
CORES = 24
"""Cube cores, as ``runtime/device.c`` reports them."""
ALIGNMENT = 512


def _aligned(size: int) -> int:
    return -(-size // ALIGNMENT) * ALIGNMENT


def attention_grad(query: Tensor, key: Tensor, value: Tensor, **_: Any) -> int:
    """Return the bytes of the gradients in float32."""
    return SYSTEM + sum(_aligned(4 * tensor.numel()) for tensor in (query, key, value))


def sparse_attention_grad(
    query: Tensor, key: Tensor, sparse_indices: Tensor, query_rope: Tensor | None, sparse_block_size: int, **_: Any
) -> int:
    """Return the bytes of the gradients in float32, of those of the selected keys, and of tiles of keys and scores."""
    rows, heads, size = query[..., 0, 0].numel(), query.shape[-2] // key.shape[-2], query.shape[-1]
    with_rope = size + (0 if query_rope is None else query_rope.shape[-1])
    cores, tile = min(rows, CORES), 128
    keys = _aligned(tile * with_rope * query.element_size()) * 4
    values = _aligned(tile * size * query.element_size()) * 2
    scores = _aligned(heads * tile * 4) * 2 * 4
    d_query = _aligned(4 * rows * query.shape[-2] * with_rope)
    tokens = key[..., 0].numel()
    d_key, d_value = _aligned(4 * tokens * with_rope), _aligned(4 * tokens * size)
    selected = CORES * 2 * sparse_indices.shape[-1] * sparse_block_size * (with_rope + size) * 4
    return 2 * SYSTEM + cores * (keys + values + scores) + d_query + d_key + d_value + selected


def indexer(**_: Any) -> int:
    """Return the bytes of two tiles of scores per core, and of the best keys of eight rows."""
    tiles = 2 * 512 * 512 * 4
    best = 2 * 8 * (2 * 2048 * 4 + 16 * 8)
    return SYSTEM + CORES * (tiles + best)


def indexer_grad(key: Tensor, **_: Any) -> int:
    """Return the bytes of the key's gradient in float32, of one more per core, and of tiles of keys and scores."""
    sequence = key.shape[-3] * key.shape[-1]
    heads, size, top_k = 64, 128, 2048  # the tiling reserves the maximum
    keys, scores = 2 * top_k * size * (2 + 4), 2 * top_k * heads * (4 + 2)
    return 2 * SYSTEM + _aligned(4 * key.numel()) + CORES * (4 * sequence + keys + scores)


def indexer_loss(
    query: Tensor, query_rope: Tensor | None, query_index: Tensor, key_index: Tensor, sparse_indices: Tensor, **_: Any
) -> int:
    """Return the bytes of two buffers of keys, scores and gradients per core, and of two gradients of the keys."""
    size, top_k = query_index.shape[-1], sparse_indices.shape[-1]
    with_rope = query.shape[-1] + (0 if query_rope is None else query_rope.shape[-1])
    keys = top_k * 2 * (with_rope + size)
    scores = 4 * top_k * (query.shape[-2] + 2 * query_index.shape[-2] + 2)
    gradients = 4 * top_k * size
    return SYSTEM + CORES * 2 * (keys + scores + gradients) + 2 * 4 * key_index.numel() + ALIGNMENT


def dense_indexer_statistics(
    key_index: Tensor, layout: str, actual_seq_klen: Sequence[int] | None = None, **_: Any
) -> int:
    """Return the bytes of two tiles of scores per core, and of the summed scores of eight rows."""
    tiles, rows, step = 2 * 512 * 512 * 4, 8, 512
    keys = key_index.shape[layout.index("T" if layout == "TND" else "S")]
    if layout == "TND" and actual_seq_klen:
        keys = max(end - start for start, end in pairwise([0, *actual_seq_klen]))
    return SYSTEM + CORES * (tiles + 4 * rows * -(-keys // step) * step)


def dense_indexer_loss(
    query: Tensor, key: Tensor, query_index: Tensor, key_index: Tensor, weights: Tensor, **_: Any
) -> int:
    """Return the bytes of tiles of all heads' scores per core, and of the gradients in float32.

    A tile has the scores of attention and of the indexer, and the gradients of the latter, for 128 queries and 1024
    keys. Each core has two of them: 6 GiB with 128 heads and 64 of the indexer.
    """
    rows, columns = 128, 1024
    heads, size = query_index.shape[-2:]
    tile = rows * columns * (key.shape[-2] + 2 * heads) + 2 * 8 * columns * 2
    d_weights = 0 if weights.dtype == torch.float32 else rows * heads
    cores = min(query[..., 0, 0].numel(), CORES)
    return SYSTEM + 4 * (cores * (2 * tile + d_weights + rows * heads * size) + key_index.numel())


FORMULAS: dict[str, Callable[..., int]] = {
    "npu_dense_lightning_indexer_grad_kl_loss": dense_indexer_loss,
    "npu_dense_lightning_indexer_softmax_lse": dense_indexer_statistics,
    "npu_fusion_attention_grad": attention_grad,
    "npu_lightning_indexer": indexer,
    "npu_lightning_indexer_grad": indexer_grad,
    "npu_sparse_flash_attention_grad": sparse_attention_grad,
    "npu_sparse_lightning_indexer_grad_kl_loss": indexer_loss,
}
"""The formulas by the name of torch_npu's operator. The other fused operators take :data:`SYSTEM`."""


def workspace(op: str, **arguments: Any) -> int:
    """Return the bytes of workspace of a call of the fused operator ``op``."""
    formula = FORMULAS.get(op)
    return SYSTEM if formula is None else formula(**arguments)
