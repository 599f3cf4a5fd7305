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

from torchtitan_npu.ops.core.call_description import TensorDescription
from torchtitan_npu.ops.core.op import Limit, Op, declare
from torchtitan_npu.ops.core.sharding import Strategy
from torchtitan_npu.ops.dense_indexer_kl_loss import reference
from torchtitan_npu.ops.dense_indexer_kl_loss.inputs import DenseLossInputs
from torchtitan_npu.ops.dense_indexer_kl_loss.reference import statistics_shape
from torchtitan_npu.ops.indexer_kl_loss.op import check_same_tokens, flops_for_keys
from torchtitan_npu.ops.lightning_indexer.op import WEIGHTS
from torchtitan_npu.ops.lightning_indexer.op import sample_inputs as indexer_sample
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
    statistics_dtype,
)
from torchtitan_npu.ops.sparse_flash_attention.op import (
    SAMPLE_DOCUMENTS,
    SAMPLE_KEYS,
    SAMPLE_QUERIES,
    sample_ends,
    sample_randn,
)

Lengths = Sequence[int] | None


def statistics_checks(
    query_index: Tensor,
    key_index: Tensor,
    weights: Tensor,
    actual_seq_qlen: Lengths,
    actual_seq_klen: Lengths,
    layout: str,
    sparse_mode: int,
    **_: Any,
) -> Iterator[str]:
    yield from check_layouts(layout=layout)
    yield from check_tokens(layout, "query_index", query_index, "key_index", key_index)
    yield from _check_index(query_index, key_index, weights)
    lengths = {"actual_seq_qlen": actual_seq_qlen, "actual_seq_klen": actual_seq_klen}
    yield from check_length_lists(layout, query_index, key_index, **lengths)
    yield from check_sparse_mode(sparse_mode, (3,))


def _check_index(query_index: Tensor, key_index: Tensor, weights: Tensor) -> Iterator[str]:
    if key_index.shape[-2] != 1:
        yield f"key_index must have one head, not {key_index.shape[-2]}"
    yield from check_weights(weights, "query_index", query_index)


def statistics_fake(query_index: Tensor, **_: Any) -> tuple[Tensor, Tensor]:
    shape, dtype = statistics_shape(query_index), statistics_dtype(query_index)
    return query_index.new_empty(shape, dtype=dtype), query_index.new_empty(shape, dtype=dtype)


def statistics_sharding(layout: str, **_: Any) -> Iterator[Strategy]:
    """Shard the batch. A score sums over all heads, and the rows' keys depend on their place."""
    if layout == "BSND":
        yield [Shard(0), Shard(0)], {name: Shard(0) for name in ("query_index", "key_index", "weights")}


def statistics_sample(weights: TensorDescription = WEIGHTS, layout: str = "BSND", **_: Any) -> dict[str, Any]:
    inputs = indexer_sample(weights, layout)
    index = {"query_index": inputs["query"], "key_index": inputs["key"], "weights": inputs["weights"]}
    ends = sample_ends(layout, "actual_seq_qlen", "actual_seq_klen")
    return {**index, **{name: tensor.tolist() for name, tensor in ends.items()}, "layout": layout}


def statistics_flops(query_index: Tensor, key_index: Tensor, layout: str, **_: Any) -> int:
    """Return the FLOPs of the scores of all keys."""
    return 2 * query_index.numel() * _tokens(key_index, layout)


def _tokens(tensor: Tensor, layout: str) -> int:
    return tensor.shape[layout.index("T" if layout == "TND" else "S")]


INDEX_LIMITS = (
    Limit("weights.dtype", lambda weights, **_: weights.dtype, (*HALVES, torch.float32)),
    Limit("the number of heads of query_index", lambda query_index, **_: query_index.shape[-2], (8, 16, 32, 64)),
    Limit("the head size of query_index", lambda query_index, **_: query_index.shape[-1], (128,)),
    Limit(
        "the batch size",
        lambda query_index, actual_seq_qlen=None, **_: batch_size(query_index, actual_seq_qlen),
        BATCH_SIZES,
    ),
    Limit(
        "the number of queries",
        lambda query_index, actual_seq_qlen=None, **_: longest(query_index, actual_seq_qlen),
        SEQUENCE_LENGTHS,
    ),
    Limit(
        "the number of keys",
        lambda key_index, actual_seq_klen=None, **_: longest(key_index, actual_seq_klen),
        SEQUENCE_LENGTHS,
    ),
    Limit("sparse_mode", lambda sparse_mode=3, **_: sparse_mode, (3,)),
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
        limits=(Limit("query_index.dtype", lambda query_index, **_: query_index.dtype, HALVES), *INDEX_LIMITS),
        sample=statistics_sample,
        flops=statistics_flops,
    )
)


# npu_dense_lightning_indexer_grad_kl_loss


def checks(**arguments: Any) -> Iterator[str]:
    x = DenseLossInputs(**arguments)
    yield from check_layouts(layout=x.layout)
    yield from check_tokens(x.layout, "query", x.query, "key", x.key)
    yield from check_tokens(x.layout, "query_index", x.query_index, "key_index", x.key_index)
    yield from check_same_tokens(x.query_index, x.query, x.key_index, x.key)
    if x.key.shape[-2] != x.query.shape[-2]:
        yield f"key must have the {x.query.shape[-2]} heads of query, not {x.key.shape[-2]}"
    yield from _check_index(x.query_index, x.key_index, x.weights)
    yield from check_statistics(x.query, x.key, softmax_max=x.softmax_max, softmax_sum=x.softmax_sum)
    shape, dtype = statistics_shape(x.query_index), statistics_dtype(x.query_index)
    for name in ("softmax_max_index", "softmax_sum_index"):
        value = getattr(x, name)
        if (list(value.shape), value.dtype) != (shape, dtype):
            yield (
                f"{name} must be {dtype} of shape {tuple(shape)}, as npu_dense_lightning_indexer_softmax_lse returns "
                f"it, not {value.dtype} of shape {tuple(value.shape)}"
            )
    yield from check_ropes(x.query, x.key, x.query_rope, x.key_rope)
    lengths = {"actual_seq_qlen": x.actual_seq_qlen, "actual_seq_klen": x.actual_seq_klen}
    yield from check_length_lists(x.layout, x.query, x.key, **lengths)
    yield from check_sparse_mode(x.sparse_mode, (3,))


def fake(
    query: Tensor, query_index: Tensor, key_index: Tensor, weights: Tensor, **_: Any
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    d_query, d_key, d_weights = (tensor.new_empty(tensor.shape) for tensor in (query_index, key_index, weights))
    return d_query, d_key, d_weights, query.new_empty([1], dtype=statistics_dtype(query))


def sharding(layout: str, **arguments: Any) -> Iterator[Strategy]:
    """Shard the batch. Both distributions of the loss are sums over all heads."""
    if layout == "BSND":
        yield [Shard(0), Shard(0), Shard(0), Partial()], {name: Shard(0) for name in arguments}


def sample(weights: TensorDescription = WEIGHTS, layout: str = "BSND", **_: Any) -> dict[str, Any]:
    """Return the loss of the last queries of each document."""
    heads, size, rope = 32, 128, 64
    index = statistics_sample(weights, layout)
    query, query_rope = (sample_randn(layout, SAMPLE_QUERIES, heads, last) for last in (size, rope))
    key, key_rope = (sample_randn(layout, SAMPLE_KEYS, heads, last) for last in (size, rope))
    scale, documents = (size + rope) ** -0.5, SAMPLE_DOCUMENTS[layout]
    queries, keys = SAMPLE_QUERIES // documents, SAMPLE_KEYS // documents
    visible = torch.block_diag(*[torch.ones(queries, keys).tril(keys - queries)] * documents).bool()
    q, k = (torch.cat(pair, -1).float() for pair in ((query, query_rope), (key, key_rope)))
    scores = torch.einsum("...qhd,...khd->...hqk", q, k).mul(scale).masked_fill(~visible, -torch.inf)
    softmax_max = scores.amax(-1, keepdim=True)
    softmax_max_index, softmax_sum_index = STATISTICS.reference(**STATISTICS.complete(**index))
    return {
        **{"query": query, "key": key, **index, "query_rope": query_rope, "key_rope": key_rope},
        **{"softmax_max": softmax_max, "softmax_sum": (scores - softmax_max).exp().sum(-1, keepdim=True)},
        **{"softmax_max_index": softmax_max_index, "softmax_sum_index": softmax_sum_index, "scale_value": scale},
    }


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
            Limit("query.dtype", lambda query, **_: query.dtype, HALVES),
            Limit("the number of heads of query", lambda query, **_: query.shape[-2], (32, 64, 128)),
            Limit("the head size of query", lambda query, **_: query.shape[-1], (128,)),
            Limit("the head size of query_rope", lambda query_rope, **_: rope_size(query_rope), (64,)),
            *INDEX_LIMITS,
            Limit("query's memory", lambda query, **_: memory_format(query), ("contiguous",)),
            Limit("key's memory", lambda key, **_: memory_format(key), ("contiguous",)),
            Limit("query_index's memory", lambda query_index, **_: memory_format(query_index), ("contiguous",)),
            Limit("key_index's memory", lambda key_index, **_: memory_format(key_index), ("contiguous",)),
            Limit("weights' memory", lambda weights, **_: memory_format(weights), ("contiguous",)),
        ),
        sample=sample,
        flops=flops,
    )
)
