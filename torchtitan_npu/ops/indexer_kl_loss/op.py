"""``npu_sparse_lightning_indexer_grad_kl_loss``: the indexer's loss and its gradients in one op, without autograd.

To train with it, call :func:`torchtitan_npu.ops.indexer_kl_loss.function.with_indexer_loss`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from torch import Tensor
from torch.distributed.tensor import Partial, Placement, Shard

from torchtitan_npu.ops.core.op import Limit, Op, declare
from torchtitan_npu.ops.core.triton_kernel import kernel
from torchtitan_npu.ops.indexer_kl_loss import reference as reference
from torchtitan_npu.ops.sparse_flash_attention.op import ROPE_SIZES, rope_size
from torchtitan_npu.ops.sparse_flash_attention.selection import (
    HALVES,
    absent_problems,
    index_problems,
    layout_problems,
    length_list_problems,
    mode_problems,
    rope_problems,
    statistics_dtype,
    statistics_problems,
    token_problems,
    weight_problems,
)


def contract(
    query: Tensor,
    key: Tensor,
    query_index: Tensor,
    key_index: Tensor,
    weights: Tensor,
    sparse_indices: Tensor,
    softmax_max: Tensor,
    softmax_sum: Tensor,
    query_rope: Tensor | None,
    key_rope: Tensor | None,
    actual_seq_qlen: Sequence[int] | None,
    actual_seq_klen: Sequence[int] | None,
    layout: str | None,
    sparse_mode: int | None,
    sinks: Tensor | None,
    **_: Any,
) -> Iterator[str]:
    yield from layout_problems(layout=layout)
    assert layout is not None
    yield from absent_problems("torch_npu does not say what it does", sinks=sinks)
    yield from token_problems(layout, "query", query, "key", key)
    yield from token_problems(layout, "query_index", query_index, "key_index", key_index)
    for name, tensor, other_name, other in (
        ("query_index", query_index, "query", query),
        ("key_index", key_index, "key", key),
    ):
        if tensor.shape[:-2] != other.shape[:-2] or tensor.dtype != other.dtype:
            yield (
                f"{name} must have the tokens and dtype of {other_name}, {tuple(other.shape[:-2])} and {other.dtype}, "
                f"not {tuple(tensor.shape[:-2])} and {tensor.dtype}"
            )
    for name, tensor in (("key", key), ("key_index", key_index)):
        if tensor.shape[-2] != 1:
            yield f"{name} must have one head, not {tensor.shape[-2]}"
    yield from weight_problems(weights, "query_index", query_index)
    yield from index_problems(sparse_indices, query, key)
    yield from statistics_problems(query, key, softmax_max=softmax_max, softmax_sum=softmax_sum)
    yield from rope_problems(query, key, query_rope, key_rope)
    yield from length_list_problems(
        layout, query, key, actual_seq_qlen=actual_seq_qlen, actual_seq_klen=actual_seq_klen
    )
    yield from mode_problems(sparse_mode, (3,))


def fake(
    query: Tensor, query_index: Tensor, key_index: Tensor, weights: Tensor, **_: Any
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    d_query, d_key, d_weights = (tensor.new_empty(tensor.shape) for tensor in (query_index, key_index, weights))
    return d_query, d_key, d_weights, query.new_empty([1], dtype=statistics_dtype(query))


def sharding(layout: str, **tensors: Any) -> Iterator[tuple[list[Placement], dict[str, Placement]]]:
    """By rows of the batch. Not by heads: both distributions of the loss are taken over all of them. Not by rows of a
    sequence: sparse_mode 3, the only one, draws its causal line from the last row a rank has."""
    if layout == "BSND":
        yield [Shard(0), Shard(0), Shard(0), Partial()], {name: Shard(0) for name in tensors}


declare(
    Op(
        schema="npu::npu_sparse_lightning_indexer_grad_kl_loss(Tensor query, Tensor key, Tensor query_index, "
        "Tensor key_index, Tensor weights, Tensor sparse_indices, Tensor softmax_max, Tensor softmax_sum, "
        "float scale_value, *, Tensor? query_rope=None, Tensor? key_rope=None, SymInt[]? actual_seq_qlen=None, "
        'SymInt[]? actual_seq_klen=None, str? layout="BSND", int? sparse_mode=3, '
        "int? pre_tokens=9223372036854775807, int? next_tokens=9223372036854775807, Tensor? sinks=None) "
        "-> (Tensor, Tensor, Tensor, Tensor)",
        reference=reference.npu_sparse_lightning_indexer_grad_kl_loss,
        cuda=kernel(
            "indexer_kl_loss.triton",
            "npu_sparse_lightning_indexer_grad_kl_loss",
            reference.npu_sparse_lightning_indexer_grad_kl_loss,
        ),
        fake=fake,
        contract=contract,
        sharding=sharding,
        limits=(
            Limit("query.dtype", lambda query, **_: query.dtype, HALVES),
            Limit("the number of heads of query", lambda query, **_: query.shape[-2], (32, 64, 128)),
            Limit("the head size of query", lambda query, **_: query.shape[-1], (512,)),
            Limit("the head size of query_rope", lambda query_rope, **_: rope_size(query_rope), ROPE_SIZES),
            Limit(
                "the number of heads of query_index", lambda query_index, **_: query_index.shape[-2], (8, 16, 32, 64)
            ),
            Limit("the head size of query_index", lambda query_index, **_: query_index.shape[-1], (128,)),
            Limit("top-k", lambda sparse_indices, **_: sparse_indices.shape[-1], tuple(range(1024, 8193, 1024))),
        ),
    )
)
