"""The indexer's loss over all keys, for its warm-up: two operators without autograd.

``npu_dense_lightning_indexer_softmax_lse`` computes the statistics of the indexer's softmax, with which
``npu_dense_lightning_indexer_grad_kl_loss`` computes the loss and its gradients. Neither keeps the scores of all keys.
To train with them, call :func:`torchtitan_npu.ops.indexer_kl_loss.function.with_indexer_loss`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import Partial, Shard

from torchtitan_npu.ops.core.arguments import Call
from torchtitan_npu.ops.core.dtypes import compute_dtype
from torchtitan_npu.ops.core.op import Limit, Op, declare
from torchtitan_npu.ops.core.sharding import Strategy
from torchtitan_npu.ops.dense_indexer_kl_loss import reference
from torchtitan_npu.ops.dense_indexer_kl_loss.reference import statistics_shape
from torchtitan_npu.ops.indexer_kl_loss.op import check_same_tokens, flops_for_keys
from torchtitan_npu.ops.sparse_flash_attention.checks import (
    BATCH_SIZES,
    HALVES,
    SEQUENCE_LENGTHS,
    batch_size,
    check_layouts,
    check_length_lists,
    check_ropes,
    check_sparse_mode,
    check_statistics,
    check_tokens,
    check_weights,
    longest,
    memory_format,
    rope_size,
)

Lengths = Sequence[int] | None


def statistics_checks(call: Call) -> Iterator[str]:
    yield from check_layouts(layout=call.layout)
    yield from check_tokens(call.layout, "query_index", call.query_index, "key_index", call.key_index)
    yield from _check_index(call.query_index, call.key_index, call.weights)
    lengths = call.pick("actual_seq_qlen", "actual_seq_klen")
    yield from check_length_lists(call.layout, call.query_index, call.key_index, **lengths)
    yield from check_sparse_mode(call.sparse_mode, (3,))


def _check_index(query_index: Tensor, key_index: Tensor, weights: Tensor) -> Iterator[str]:
    if key_index.shape[-2] != 1:
        yield f"key_index must have one head, not {key_index.shape[-2]}"
    yield from check_weights(weights, "query_index", query_index)


def statistics_fake(call: Call) -> tuple[Tensor, Tensor]:
    shape, dtype = statistics_shape(call.query_index), compute_dtype(call.query_index)
    return call.query_index.new_empty(shape, dtype=dtype), call.query_index.new_empty(shape, dtype=dtype)


def statistics_sharding(call: Call) -> Iterator[Strategy]:
    """Shard the batch. A score sums over all heads, and the rows' keys depend on their position."""
    if call.layout == "BSND":
        yield [Shard(0), Shard(0)], {name: Shard(0) for name in ("query_index", "key_index", "weights")}


def statistics_flops(query_index: Tensor, key_index: Tensor, layout: str, **_: Any) -> int:
    """Return the FLOPs of the scores of all keys."""
    return 2 * query_index.numel() * _tokens(key_index, layout)


def _tokens(tensor: Tensor, layout: str) -> int:
    return tensor.shape[layout.index("T" if layout == "TND" else "S")]


INDEX_LIMITS = (
    Limit("weights.dtype", lambda call: call.weights.dtype, (*HALVES, torch.float32)),
    Limit("the number of heads of query_index", lambda call: call.query_index.shape[-2], (8, 16, 32, 64)),
    Limit("the head size of query_index", lambda call: call.query_index.shape[-1], (128,)),
    Limit("the batch size", lambda call: batch_size(call.query_index, call.actual_seq_qlen), BATCH_SIZES),
    Limit("the number of queries", lambda call: longest(call.query_index, call.actual_seq_qlen), SEQUENCE_LENGTHS),
    Limit("the number of keys", lambda call: longest(call.key_index, call.actual_seq_klen), SEQUENCE_LENGTHS),
    Limit("sparse_mode", lambda call: 3 if call.sparse_mode is None else call.sparse_mode, (3,)),
)

STATISTICS = declare(
    Op(
        schema="npu::npu_dense_lightning_indexer_softmax_lse(Tensor query_index, Tensor key_index, Tensor weights, *, "
        'SymInt[]? actual_seq_qlen=None, SymInt[]? actual_seq_klen=None, str? layout="BSND", int? sparse_mode=3, '
        "int? pre_tokens=9223372036854775807, int? next_tokens=9223372036854775807) -> (Tensor, Tensor)",
        reference=reference.npu_dense_lightning_indexer_softmax_lse,
        fake=statistics_fake,
        checks=statistics_checks,
        sharding=statistics_sharding,
        limits=(Limit("query_index.dtype", lambda call: call.query_index.dtype, HALVES), *INDEX_LIMITS),
        flops=statistics_flops,
    )
)


# npu_dense_lightning_indexer_grad_kl_loss


def checks(x: Call) -> Iterator[str]:
    yield from check_layouts(layout=x.layout)
    yield from check_tokens(x.layout, "query", x.query, "key", x.key)
    yield from check_tokens(x.layout, "query_index", x.query_index, "key_index", x.key_index)
    yield from check_same_tokens(x.query_index, x.query, x.key_index, x.key)
    if x.key.shape[-2] != x.query.shape[-2]:
        yield f"key must have the {x.query.shape[-2]} heads of query, not {x.key.shape[-2]}"
    yield from _check_index(x.query_index, x.key_index, x.weights)
    yield from check_statistics(x.query, x.key, **x.pick("softmax_max", "softmax_sum"))
    shape, dtype = statistics_shape(x.query_index), compute_dtype(x.query_index)
    for name, value in x.pick("softmax_max_index", "softmax_sum_index").items():
        if (list(value.shape), value.dtype) != (shape, dtype):
            yield (
                f"{name} must be {dtype} of shape {tuple(shape)}, as npu_dense_lightning_indexer_softmax_lse returns "
                f"it, not {value.dtype} of shape {tuple(value.shape)}"
            )
    yield from check_ropes(x.query, x.key, x.query_rope, x.key_rope)
    yield from check_length_lists(x.layout, x.query, x.key, **x.pick("actual_seq_qlen", "actual_seq_klen"))
    yield from check_sparse_mode(x.sparse_mode, (3,))


def fake(call: Call) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    d_query, d_key, d_weights = (
        tensor.new_empty(tensor.shape) for tensor in (call.query_index, call.key_index, call.weights)
    )
    return d_query, d_key, d_weights, call.query.new_empty([1], dtype=compute_dtype(call.query))


def sharding(call: Call) -> Iterator[Strategy]:
    """Shard the batch. Both distributions of the loss are sums over all heads."""
    if call.layout == "BSND":
        yield [Shard(0), Shard(0), Shard(0), Partial()], {name: Shard(0) for name in vars(call)}


def flops(query: Tensor, key: Tensor, query_rope: Tensor | None, query_index: Tensor, layout: str, **_: Any) -> int:
    """Return the FLOPs of both scores of all keys, and of the gradients of the indexer's queries and keys."""
    return flops_for_keys(_tokens(key, layout), query, query_rope, query_index)


declare(
    Op(
        schema="npu::npu_dense_lightning_indexer_grad_kl_loss(Tensor query, Tensor key, Tensor query_index, "
        "Tensor key_index, Tensor weights, Tensor softmax_max, Tensor softmax_sum, Tensor softmax_max_index, "
        "Tensor softmax_sum_index, float scale_value, *, Tensor? query_rope=None, Tensor? key_rope=None, "
        'SymInt[]? actual_seq_qlen=None, SymInt[]? actual_seq_klen=None, str? layout="BSND", int? sparse_mode=3, '
        "int? pre_tokens=9223372036854775807, int? next_tokens=9223372036854775807) "
        "-> (Tensor, Tensor, Tensor, Tensor)",
        reference=reference.npu_dense_lightning_indexer_grad_kl_loss,
        fake=fake,
        checks=checks,
        sharding=sharding,
        limits=(
            Limit("query.dtype", lambda call: call.query.dtype, HALVES),
            Limit("the number of heads of query", lambda call: call.query.shape[-2], (32, 64, 128)),
            Limit("the head size of query", lambda call: call.query.shape[-1], (128,)),
            Limit("the head size of query_rope", lambda call: rope_size(call.query_rope), (64,)),
            *INDEX_LIMITS,
            Limit("query's memory", lambda call: memory_format(call.query), ("contiguous",)),
            Limit("key's memory", lambda call: memory_format(call.key), ("contiguous",)),
            Limit("query_index's memory", lambda call: memory_format(call.query_index), ("contiguous",)),
            Limit("key_index's memory", lambda call: memory_format(call.key_index), ("contiguous",)),
            Limit("weights' memory", lambda call: memory_format(call.weights), ("contiguous",)),
        ),
        flops=flops,
    )
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
