"""``npu_sparse_lightning_indexer_grad_kl_loss``: the indexer's loss and gradients in one operator, without autograd.

To train with it, call :func:`torchtitan_npu.ops.indexer_kl_loss.function.with_indexer_loss`.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import Partial, Shard

from torchtitan_npu.ops.core.call_description import TensorDescription
from torchtitan_npu.ops.core.op import Limit, Op, declare
from torchtitan_npu.ops.core.sharding import Strategy
from torchtitan_npu.ops.core.triton_kernel import is_hopper, kernel
from torchtitan_npu.ops.indexer_kl_loss import reference
from torchtitan_npu.ops.indexer_kl_loss.inputs import IndexerLossInputs
from torchtitan_npu.ops.lightning_indexer.op import WEIGHTS
from torchtitan_npu.ops.lightning_indexer.op import sample_inputs as indexer_sample
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
    statistics_dtype,
)
from torchtitan_npu.ops.sparse_flash_attention.op import grad_sample as attention_sample
from torchtitan_npu.ops.sparse_flash_attention.op import sample_ends


def checks(**arguments: Any) -> Iterator[str]:
    x = IndexerLossInputs(**arguments)
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
    yield from check_statistics(x.query, x.key, softmax_max=x.softmax_max, softmax_sum=x.softmax_sum)
    yield from check_ropes(x.query, x.key, x.query_rope, x.key_rope)
    lengths = {"actual_seq_qlen": x.actual_seq_qlen, "actual_seq_klen": x.actual_seq_klen}
    yield from check_length_lists(x.layout, x.query, x.key, **lengths)
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


def fake(
    query: Tensor, query_index: Tensor, key_index: Tensor, weights: Tensor, **_: Any
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    d_query, d_key, d_weights = (tensor.new_empty(tensor.shape) for tensor in (query_index, key_index, weights))
    return d_query, d_key, d_weights, query.new_empty([1], dtype=statistics_dtype(query))


def sharding(layout: str, **arguments: Any) -> Iterator[Strategy]:
    """Shard the batch.

    The heads cannot be sharded: both distributions of the loss are sums over all heads. Neither can the rows of a
    sequence: the causal boundary of sparse_mode 3, the only mode, starts at the last row of a rank.
    """
    if layout == "BSND":
        yield [Shard(0), Shard(0), Shard(0), Partial()], {name: Shard(0) for name in arguments}


def sample(weights: TensorDescription = WEIGHTS, layout: str = "BSND", **_: Any) -> dict[str, Any]:
    attention, indexer = attention_sample(layout), indexer_sample(weights, layout)
    passed = ("query", "key", "sparse_indices", "softmax_max", "softmax_sum", "scale_value", "query_rope", "key_rope")
    of_indexer = {"query_index": indexer["query"], "key_index": indexer["key"], "weights": indexer["weights"]}
    ends = sample_ends(layout, "actual_seq_qlen", "actual_seq_klen")
    lengths = {name: tensor.tolist() for name, tensor in ends.items()}
    return {**{name: attention[name] for name in passed}, **of_indexer, **lengths, "layout": layout}


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
call :func:`torchtitan_npu.ops.indexer_kl_loss.spans.loss_in_spans`.
"""


in_triton = kernel(reference.npu_sparse_lightning_indexer_grad_kl_loss)
in_gluon = kernel(reference.npu_sparse_lightning_indexer_grad_kl_loss, "gluon")


def cuda(
    query: Tensor, key: Tensor, query_rope: Tensor | None, query_index: Tensor, **others: Any
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Run the Gluon kernel on a Hopper GPU at the sizes it takes, and the Triton kernel otherwise."""
    arguments = {"query": query, "key": key, "query_rope": query_rope, "query_index": query_index, **others}
    hopper = is_hopper(query) and suits_gluon(query, query_rope, query_index)
    return (in_gluon if hopper else in_triton)(**arguments)


def suits_gluon(query: Tensor, query_rope: Tensor | None, query_index: Tensor) -> bool:
    """Return whether the Gluon kernel takes these: half precision, and the features of DeepSeek-V3.2."""
    if query.dtype not in HALVES or query_index.dtype != query.dtype:
        return False
    sizes = query.shape[-1], rope_size(query_rope), query_index.shape[-1]
    return sizes == (512, 64, 128) and query.shape[-2] <= 128 and query_index.shape[-2] <= 64


declare(
    Op(
        schema="npu::npu_sparse_lightning_indexer_grad_kl_loss(Tensor query, Tensor key, Tensor query_index, "
        "Tensor key_index, Tensor weights, Tensor sparse_indices, Tensor softmax_max, Tensor softmax_sum, "
        "float scale_value, *, Tensor? query_rope=None, Tensor? key_rope=None, SymInt[]? actual_seq_qlen=None, "
        'SymInt[]? actual_seq_klen=None, str? layout="BSND", int? sparse_mode=3, '
        "int? pre_tokens=9223372036854775807, int? next_tokens=9223372036854775807, Tensor? sinks=None) "
        "-> (Tensor, Tensor, Tensor, Tensor)",
        reference=reference.npu_sparse_lightning_indexer_grad_kl_loss,
        cuda=cuda,
        fake=fake,
        checks=checks,
        sharding=sharding,
        limits=(
            Limit("query.dtype", lambda query, **_: query.dtype, HALVES),
            Limit("weights.dtype", lambda weights, **_: weights.dtype, (*HALVES, torch.float32)),
            Limit("the number of heads of query", lambda query, **_: query.shape[-2], (32, 64, 128)),
            Limit("the head size of query", lambda query, **_: query.shape[-1], (512,)),
            Limit("the head size of query_rope", lambda query_rope, **_: rope_size(query_rope), ROPE_SIZES),
            Limit(
                "the number of heads of query_index", lambda query_index, **_: query_index.shape[-2], (8, 16, 32, 64)
            ),
            Limit("the head size of query_index", lambda query_index, **_: query_index.shape[-1], (128,)),
            Limit("top-k", lambda sparse_indices, **_: sparse_indices.shape[-1], TOP_K_OF_GRADIENTS),
            Limit(
                "the batch size",
                lambda query, actual_seq_qlen=None, **_: batch_size(query, actual_seq_qlen),
                BATCH_SIZES,
            ),
            Limit(
                "the number of queries",
                lambda query, actual_seq_qlen=None, **_: longest(query, actual_seq_qlen),
                range(1, MAX_QUERIES + 1),
            ),
            Limit(
                "the number of keys",
                lambda key, actual_seq_klen=None, **_: longest(key, actual_seq_klen),
                SEQUENCE_LENGTHS,
            ),
            Limit("sparse_mode", lambda sparse_mode=3, **_: sparse_mode, (3,)),
        ),
        sample=sample,
        flops=flops,
    )
)
