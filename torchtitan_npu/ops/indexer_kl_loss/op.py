"""``npu_sparse_lightning_indexer_grad_kl_loss``: the indexer's loss and gradients in one operator, without autograd.

To train with it, call :func:`torchtitan_npu.ops.indexer_kl_loss.function.with_indexer_loss`.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import Partial, Shard

from torchtitan_npu.ops.core.arguments import Call
from torchtitan_npu.ops.core.dtypes import compute_dtype
from torchtitan_npu.ops.core.op import Limit, Op, declare
from torchtitan_npu.ops.core.sharding import Strategy
from torchtitan_npu.ops.indexer_kl_loss import reference
from torchtitan_npu.ops.sparse_flash_attention.checks import (
    BATCH_SIZES,
    HALVES,
    ROPE_SIZES,
    SEQUENCE_LENGTHS,
    TOP_K_OF_GRADIENTS,
    batch_size,
    check_absent,
    check_indices,
    check_layouts,
    check_length_lists,
    check_ropes,
    check_sparse_mode,
    check_statistics,
    check_tokens,
    check_weights,
    longest,
    rope_size,
)


def checks(x: Call) -> Iterator[str]:
    yield from check_layouts(layout=x.layout)
    yield from check_absent("torch_npu does not document it", sinks=x.sinks)
    yield from check_tokens(x.layout, "query", x.query, "key", x.key)
    yield from check_tokens(x.layout, "query_index", x.query_index, "key_index", x.key_index)
    yield from check_same_tokens(x.query_index, x.query, x.key_index, x.key)
    for name, tensor in (("key", x.key), ("key_index", x.key_index)):
        if tensor.shape[-2] != 1:
            yield f"{name} must have one head, not {tensor.shape[-2]}"
    yield from check_weights(x.weights, "query_index", x.query_index)
    yield from check_indices(x.sparse_indices, x.query, x.key)
    yield from check_statistics(x.query, x.key, **x.pick("softmax_max", "softmax_sum"))
    yield from check_ropes(x.query, x.key, x.query_rope, x.key_rope)
    yield from check_length_lists(x.layout, x.query, x.key, **x.pick("actual_seq_qlen", "actual_seq_klen"))
    yield from check_sparse_mode(x.sparse_mode, (3,))


def check_same_tokens(query_index: Tensor, query: Tensor, key_index: Tensor, key: Tensor) -> Iterator[str]:
    """Check the indexer's queries and keys against those of attention."""
    for name, tensor, other_name, other in (
        ("query_index", query_index, "query", query),
        ("key_index", key_index, "key", key),
    ):
        if tensor.shape[:-2] != other.shape[:-2] or tensor.dtype != other.dtype:
            yield (
                f"{name} must have the tokens and dtype of {other_name}, {tuple(other.shape[:-2])} and {other.dtype}, "
                f"not {tuple(tensor.shape[:-2])} and {tensor.dtype}"
            )


def fake(call: Call) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    d_query, d_key, d_weights = (
        tensor.new_empty(tensor.shape) for tensor in (call.query_index, call.key_index, call.weights)
    )
    return d_query, d_key, d_weights, call.query.new_empty([1], dtype=compute_dtype(call.query))


def sharding(call: Call) -> Iterator[Strategy]:
    """Shard the batch.

    The heads cannot be sharded: both distributions of the loss are sums over all heads. Neither can the rows of a
    sequence: the causal boundary of sparse_mode 3, the only mode, starts at the last row of a rank.
    """
    if call.layout == "BSND":
        yield [Shard(0), Shard(0), Shard(0), Partial()], {name: Shard(0) for name in vars(call)}


def flops(query: Tensor, query_rope: Tensor | None, query_index: Tensor, sparse_indices: Tensor, **_: Any) -> int:
    """Return the FLOPs over the selected keys of each row."""
    return flops_for_keys(sparse_indices.shape[-1], query, query_rope, query_index)


def flops_for_keys(keys: int, query: Tensor, query_rope: Tensor | None, query_index: Tensor) -> int:
    """Return the FLOPs of both scores of ``keys`` keys per row, and of the gradients of the indexer's query and key."""
    attention = query.numel() + (0 if query_rope is None else query_rope.numel())
    return 2 * keys * (attention + 3 * query_index.numel())


MAX_QUERIES = 8192
"""The most queries of a document in one call: documented for CANN 9.0 and 9.1, and not checked by CANN.

Documents: ops-transformer, attention/sparse_lightning_indexer_grad_kl_loss/docs, at v9.0.0 and 9.1.0. For more queries,
call :func:`torchtitan_npu.ops.indexer_kl_loss.function.loss_in_chunks`.
"""


declare(
    Op(
        schema="npu::npu_sparse_lightning_indexer_grad_kl_loss(Tensor query, Tensor key, Tensor query_index, "
        "Tensor key_index, Tensor weights, Tensor sparse_indices, Tensor softmax_max, Tensor softmax_sum, "
        "float scale_value, *, Tensor? query_rope=None, Tensor? key_rope=None, SymInt[]? actual_seq_qlen=None, "
        'SymInt[]? actual_seq_klen=None, str? layout="BSND", int? sparse_mode=3, '
        "int? pre_tokens=9223372036854775807, int? next_tokens=9223372036854775807, Tensor? sinks=None) "
        "-> (Tensor, Tensor, Tensor, Tensor)",
        reference=reference.npu_sparse_lightning_indexer_grad_kl_loss,
        fake=fake,
        checks=checks,
        sharding=sharding,
        limits=(
            Limit("query.dtype", lambda call: call.query.dtype, HALVES),
            Limit("weights.dtype", lambda call: call.weights.dtype, (*HALVES, torch.float32)),
            Limit("the number of heads of query", lambda call: call.query.shape[-2], (32, 64, 128)),
            Limit("the head size of query", lambda call: call.query.shape[-1], (512,)),
            Limit("the head size of query_rope", lambda call: rope_size(call.query_rope), ROPE_SIZES),
            Limit("the number of heads of query_index", lambda call: call.query_index.shape[-2], (8, 16, 32, 64)),
            Limit("the head size of query_index", lambda call: call.query_index.shape[-1], (128,)),
            Limit("top-k", lambda call: call.sparse_indices.shape[-1], TOP_K_OF_GRADIENTS),
            Limit("the batch size", lambda call: batch_size(call.query, call.actual_seq_qlen), BATCH_SIZES),
            Limit(
                "the number of queries",
                lambda call: longest(call.query, call.actual_seq_qlen),
                range(1, MAX_QUERIES + 1),
            ),
            Limit("the number of keys", lambda call: longest(call.key, call.actual_seq_klen), SEQUENCE_LENGTHS),
            Limit("sparse_mode", lambda call: 3 if call.sparse_mode is None else call.sparse_mode, (3,)),
        ),
        flops=flops,
    )
)
