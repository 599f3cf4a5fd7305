"""The loss that trains the lightning indexer, and its gradients, in Triton."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from torchtitan_npu.gpu_kernels.launch import blocks_in, power_of_2, tile_of, uninitialized
from torchtitan_npu.gpu_kernels.lightning_indexer.triton_grad import Gradients, gradients
from torchtitan_npu.gpu_kernels.sparse_flash_attention.triton_rows import Rows, keys_at, rows_of
from torchtitan_npu.gpu_kernels.sparse_flash_attention.triton_tiles import by_token, tile
from torchtitan_npu.ops.indexer_kl_loss.reference import IndexerLossInputs

Distributions = Callable[[IndexerLossInputs, Rows, Tensor, Tensor, Tensor], None]


def npu_sparse_lightning_indexer_grad_kl_loss(**arguments: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return the gradients and the loss as the reference does, with two numbers of memory per selected key.

    An index that is not a key of its row is ignored, in any slot: a check would synchronise with the device.
    """
    return loss(IndexerLossInputs(**arguments), distributions, gradients)


def loss(
    x: IndexerLossInputs, distributions: Distributions, gradients: Gradients
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return the gradients and the loss.

    Takes a function for the two distributions over the selected keys, and one for the gradients of the scores.
    """
    rows = rows_of(x.layout, x.sparse_mode, x.query, x.key, x.actual_seq_qlen, x.actual_seq_klen)
    tokens, top_k = rows.first.numel(), x.sparse_indices.shape[-1]
    indices = x.sparse_indices.contiguous()
    target, scores = (uninitialized(indices.shape, torch.float32, indices.device) for _ in range(2))
    distributions(x, rows, indices, target, scores)
    losses = uninitialized((tokens,), torch.float32, x.query.device)
    slots = power_of_2(top_k)
    # overwrites the scores with their gradients
    _divergence[(tokens,)](
        target, scores, indices, rows.visible, losses, TOP_K=top_k, SLOTS=slots, num_warps=8 if slots > 2048 else 4
    )
    grads = gradients(x.query_index, x.key_index, x.weights, indices, scores, rows)
    return *grads, losses.sum(0, keepdim=True)


def distributions(x: IndexerLossInputs, rows: Rows, indices: Tensor, target: Tensor, scores: Tensor) -> None:
    """Write attention's softmax, summed over the heads, to ``target``, and the indexer's scores to ``scores``.

    ``indices``, ``target`` and ``scores`` are (..., 1, K) and contiguous. Entries without a key are not written.
    """
    tokens, top_k = rows.first.numel(), indices.shape[-1]
    queries = by_token(x.query)
    heads, size = x.query.shape[-2:]
    index_heads, index_size = x.query_index.shape[-2:]
    ropes = [None if rope is None else rope.contiguous() for rope in (x.query_rope, x.key_rope)]
    rope_size = 0 if x.query_rope is None else x.query_rope.shape[-1]
    tiles = tile_sizes(x.query.dtype)
    blocks = blocks_in(top_k, tiles["KEYS"])
    _distributions[(tokens * blocks,)](
        *(queries, x.key.contiguous(), *ropes, x.softmax_max.contiguous(), x.softmax_sum.contiguous()),
        *(x.query_index.contiguous(), x.key_index.contiguous(), x.weights.contiguous(), indices, *rows),
        *(target, scores, x.scale_value, blocks, *queries.stride()[:2]),
        **{"TOP_K": top_k, "HEADS": heads, "SIZE": size, "ROPE_SIZE": rope_size},
        **{"INDEX_HEADS": index_heads, "INDEX_SIZE": index_size},
        **{"HEAD_BLOCK": min(128, tile_of(heads)), "SIZE_BLOCK": min(64, tile_of(size))},
        **{"ROPE_BLOCK": tile_of(rope_size), "INDEX_HEAD_BLOCK": tile_of(index_heads)},
        INDEX_SIZE_BLOCK=tile_of(index_size),
        **tiles,
    )


def tile_sizes(dtype: torch.dtype) -> dict[str, int]:
    """Return the selected keys of a tile, and the launch options."""
    if dtype == torch.float32:  # for tests: exact products are slow with any tile
        return {"KEYS": 16, "num_warps": 4, "num_stages": 1}
    return {"KEYS": 128, "num_warps": 8, "num_stages": 3}


@triton.jit
def _distributions(
    query,
    key,
    query_rope,
    key_rope,
    softmax_max,
    softmax_sum,
    query_index,
    key_index,
    weights,
    indices,
    first,
    visible,
    target,
    scores,
    scale,
    blocks,
    query_row,
    query_head,
    TOP_K: tl.constexpr,
    HEADS: tl.constexpr,
    SIZE: tl.constexpr,
    ROPE_SIZE: tl.constexpr,
    INDEX_HEADS: tl.constexpr,
    INDEX_SIZE: tl.constexpr,
    HEAD_BLOCK: tl.constexpr,
    SIZE_BLOCK: tl.constexpr,
    ROPE_BLOCK: tl.constexpr,
    INDEX_HEAD_BLOCK: tl.constexpr,
    INDEX_SIZE_BLOCK: tl.constexpr,
    KEYS: tl.constexpr,
):
    """Compute attention's softmax, summed over the heads, and the indexer's score for KEYS selected keys of one row.

    Keys are the rows of every product and heads its columns, so that most of the sum over heads stays in a thread.
    """
    row = (tl.program_id(0) // blocks).to(tl.int64)
    entry = tl.program_id(0) % blocks * KEYS + tl.arange(0, KEYS)
    keys, there = keys_at(indices + row * TOP_K, entry, TOP_K, tl.load(first + row), tl.load(visible + row), 0, 1)
    if tl.max(there.to(tl.int32), 0) > 0:
        token = keys.to(tl.int64)
        mass = tl.zeros((KEYS,), tl.float32)
        for first_head in range(0, HEADS, HEAD_BLOCK):
            head = first_head + tl.arange(0, HEAD_BLOCK)
            at = row * HEADS + head
            logits = tl.zeros((KEYS, HEAD_BLOCK), tl.float32)
            for start in range(0, SIZE, SIZE_BLOCK):
                k = tile(key, token * SIZE, there, start, SIZE, SIZE_BLOCK)
                q = tile(query, row * query_row + head.to(tl.int64) * query_head, head < HEADS, start, SIZE, SIZE_BLOCK)
                logits = tl.dot(k, tl.trans(q), logits, input_precision="ieee")
            if ROPE_SIZE > 0:
                k = tile(key_rope, token * ROPE_SIZE, there, 0, ROPE_SIZE, ROPE_BLOCK)
                q = tile(query_rope, at * ROPE_SIZE, head < HEADS, 0, ROPE_SIZE, ROPE_BLOCK)
                logits = tl.dot(k, tl.trans(q), logits, input_precision="ieee")
            maximum = tl.load(softmax_max + at, mask=head < HEADS, other=0.0)
            total = tl.load(softmax_sum + at, mask=head < HEADS, other=1.0)
            p = tl.exp(logits * scale - maximum[None, :]) / total[None, :]
            mass += tl.sum(tl.where((head < HEADS)[None, :], p, 0.0), 1)
        tl.store(target + row * TOP_K + entry, mass, mask=there)

        head = tl.arange(0, INDEX_HEAD_BLOCK)
        at = row * INDEX_HEADS + head
        k = tile(key_index, token * INDEX_SIZE, there, 0, INDEX_SIZE, INDEX_SIZE_BLOCK)
        q = tile(query_index, at * INDEX_SIZE, head < INDEX_HEADS, 0, INDEX_SIZE, INDEX_SIZE_BLOCK)
        w = tl.load(weights + at, mask=head < INDEX_HEADS, other=0.0).to(tl.float32)
        relu = tl.maximum(tl.dot(k, tl.trans(q), input_precision="ieee"), 0.0, propagate_nan=tl.PropagateNan.ALL)
        tl.store(scores + row * TOP_K + entry, tl.sum(relu * w[None, :], 1), mask=there)


@triton.jit
def _divergence(target, scores, indices, visible, losses, TOP_K: tl.constexpr, SLOTS: tl.constexpr):
    """Compute the loss of one row, and overwrite its scores with their gradients."""
    row = tl.program_id(0).to(tl.int64)
    slot = tl.arange(0, SLOTS)
    _, there = keys_at(indices + row * TOP_K, slot, TOP_K, 0, tl.load(visible + row), 0, 1)
    p = tl.load(target + row * TOP_K + slot, mask=there, other=0.0)
    p = tl.where(there, p / tl.sum(p, 0), 0.0)
    score = tl.load(scores + row * TOP_K + slot, mask=there, other=float("-inf"))
    score -= tl.max(score, 0)
    log_softmax = score - tl.log(tl.sum(tl.where(there, tl.exp(score), 0.0), 0))
    some = p > 0
    loss = tl.where(some, p * (tl.log(tl.where(some, p, 1.0)) - log_softmax), 0.0)
    tl.store(losses + row, tl.sum(loss, 0))
    tl.store(scores + row * TOP_K + slot, tl.where(there, tl.exp(log_softmax) - p, 0.0), mask=slot < TOP_K)
