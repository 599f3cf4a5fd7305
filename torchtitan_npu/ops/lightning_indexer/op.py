"""``npu_lightning_indexer`` and ``npu_lightning_indexer_grad``: the keys that sparse attention shall look at.

A row's keys come first and -1 after them. In which order they come is each kernel's own, as torch_npu promises none:
the reference puts the highest score first, the GPU's kernel the earliest key. Who takes them must not depend on it.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import Partial, Placement, Replicate, Shard

from torchtitan_npu.ops.core.autograd import Autograd
from torchtitan_npu.ops.core.op import Limit, Op, declare
from torchtitan_npu.ops.core.triton_kernel import kernel
from torchtitan_npu.ops.lightning_indexer import reference as reference
from torchtitan_npu.ops.sparse_flash_attention.selection import (
    HALVES,
    AnyOf,
    absent_problems,
    index_problems,
    layout_problems,
    length_tensor_problems,
    memory,
    mode_problems,
    token_problems,
    weight_problems,
    window_problems,
)


def contract(
    query: Tensor,
    key: Tensor,
    weights: Tensor,
    actual_seq_lengths_query: Tensor | None,
    actual_seq_lengths_key: Tensor | None,
    block_table: Tensor | None,
    layout_query: str,
    layout_key: str,
    sparse_count: int,
    sparse_mode: int,
    pre_tokens: int,
    next_tokens: int,
    **_: Any,
) -> Iterator[str]:
    yield from layout_problems(layout_query=layout_query, layout_key=layout_key)
    yield from absent_problems("keys in pages are for inference", block_table=block_table)
    yield from token_problems(layout_query, "query", query, "key", key)
    yield from weight_problems(weights, "query", query)
    yield from length_tensor_problems(
        layout_query,
        query,
        actual_seq_lengths_query=actual_seq_lengths_query,
        actual_seq_lengths_key=actual_seq_lengths_key,
    )
    if sparse_count <= 0:
        yield f"sparse_count must be at least 1, not {sparse_count}"
    yield from mode_problems(sparse_mode)
    yield from window_problems(pre_tokens=pre_tokens, next_tokens=next_tokens)


def fake(query: Tensor, key: Tensor, sparse_count: int, return_value: bool, **_: Any) -> tuple[Tensor, Tensor]:
    shape = [*query.shape[:-2], key.shape[-2], sparse_count]
    return query.new_empty(shape, dtype=torch.int32), query.new_empty(shape if return_value else [0])


def sharding(
    layout_query: str, sparse_mode: int, actual_seq_lengths_query: Any, return_value: bool, **_: Any
) -> Iterator[tuple[list[Placement], dict[str, Placement]]]:
    """By rows of the batch; by query rows where a row's keys do not depend on its place. Not by heads: a score sums
    over all of them before the best are taken."""
    if layout_query != "BSND":
        return
    rows = ["query", "weights"]
    dims = {0: [*rows, "key", "actual_seq_lengths_query", "actual_seq_lengths_key"]}
    if sparse_mode == 0 and actual_seq_lengths_query is None:
        dims[1] = rows
    for dim, names in dims.items():
        yield [Shard(dim), Shard(dim) if return_value else Replicate()], {name: Shard(dim) for name in names}


def save(
    ctx: Any,
    output: tuple[Tensor, Tensor],
    query: Tensor,
    key: Tensor,
    weights: Tensor,
    actual_seq_lengths_query: Tensor | None,
    actual_seq_lengths_key: Tensor | None,
    layout_query: str,
    sparse_mode: int,
    pre_tokens: int,
    next_tokens: int,
    **_: Any,
) -> None:
    indices = output[0]
    ctx.save_for_backward(query, key, indices, weights, actual_seq_lengths_query, actual_seq_lengths_key)
    ctx.options = (layout_query, sparse_mode, pre_tokens, next_tokens)
    ctx.mark_non_differentiable(indices)


def backward(npu: Any, ctx: Any, _: None, dy: Tensor) -> dict[str, Tensor]:
    query, key, indices, weights, query_lengths, key_lengths = ctx.saved_tensors
    d_query, d_key, d_weights = npu.npu_lightning_indexer_grad(
        query, key, dy, indices, weights, query_lengths, key_lengths, *ctx.options
    )
    return {"query": d_query, "key": d_key, "weights": d_weights}


SELECTED = Limit(
    "sparse_count", lambda sparse_count, **_: sparse_count, AnyOf((range(1, 2049), *range(3072, 8193, 1024)))
)
SIZES = (
    Limit("query.dtype", lambda query, **_: query.dtype, HALVES),
    Limit("the head size of query", lambda query, **_: query.shape[-1], (128,)),
    Limit("the number of heads of key", lambda key, **_: key.shape[-2], (1,)),
)

SEGMENT = 32768
"""Of how many scores the GPU's kernel selects at a time."""


def takes(keys: int, count: int) -> bool:
    """Whether the GPU's kernel can select ``count`` of so many: every round must leave less than it got."""
    return keys <= SEGMENT or 2 * count <= SEGMENT


fused = kernel("lightning_indexer.triton", "npu_lightning_indexer", reference.npu_lightning_indexer)


def cuda(key: Tensor, layout_query: str, sparse_count: int, **others: Any) -> tuple[Tensor, Tensor]:
    fits = takes(key.shape[0 if layout_query == "TND" else 1], sparse_count)
    chosen = fused if fits else reference.npu_lightning_indexer
    return chosen(key=key, layout_query=layout_query, sparse_count=sparse_count, **others)


declare(
    Op(
        schema="npu::npu_lightning_indexer(Tensor query, Tensor key, Tensor weights, *, "
        "Tensor? actual_seq_lengths_query=None, Tensor? actual_seq_lengths_key=None, Tensor? block_table=None, "
        'str layout_query="BSND", str layout_key="BSND", int sparse_count=2048, int sparse_mode=3, '
        "int pre_tokens=9223372036854775807, int next_tokens=9223372036854775807, bool return_value=False) "
        "-> (Tensor, Tensor)",
        reference=reference.npu_lightning_indexer,
        cuda=cuda,
        fake=fake,
        contract=contract,
        sharding=sharding,
        autograd=Autograd(save, backward),
        limits=(
            *SIZES,
            Limit("the number of heads of query", lambda query, **_: query.shape[-2], range(1, 65)),
            SELECTED,
            Limit("query's memory", lambda query, **_: memory(query), ("contiguous",)),
            Limit("key's memory", lambda key, **_: memory(key), ("contiguous",)),
            Limit("weights' memory", lambda weights, **_: memory(weights), ("contiguous",)),
        ),
    )
)


def grad_contract(
    query: Tensor,
    key: Tensor,
    dy: Tensor,
    sparse_indices: Tensor,
    weights: Tensor,
    actual_seq_lengths_query: Tensor | None,
    actual_seq_lengths_key: Tensor | None,
    layout: str | None,
    sparse_mode: int | None,
    **_: Any,
) -> Iterator[str]:
    yield from layout_problems(layout=layout)
    assert layout is not None
    yield from token_problems(layout, "query", query, "key", key)
    yield from weight_problems(weights, "query", query)
    yield from index_problems(sparse_indices, query, key)
    if (dy.shape, dy.dtype) != (sparse_indices.shape, query.dtype):
        yield (
            f"dy must have the shape of sparse_indices, {tuple(sparse_indices.shape)}, and the dtype of query, "
            f"{query.dtype}, not {tuple(dy.shape)} and {dy.dtype}: the scores come with return_value=True"
        )
    yield from length_tensor_problems(
        layout,
        query,
        actual_seq_lengths_query=actual_seq_lengths_query,
        actual_seq_lengths_key=actual_seq_lengths_key,
    )
    yield from mode_problems(sparse_mode)


def grad_fake(query: Tensor, key: Tensor, weights: Tensor, **_: Any) -> tuple[Tensor, Tensor, Tensor]:
    return query.new_empty(query.shape), key.new_empty(key.shape), weights.new_empty(weights.shape)


def grad_sharding(
    layout: str, sparse_mode: int, actual_seq_lengths_query: Any, **_: Any
) -> Iterator[tuple[list[Placement], dict[str, Placement]]]:
    if layout != "BSND":
        return
    rows = ["query", "dy", "sparse_indices", "weights"]
    batch = [*rows, "key", "actual_seq_lengths_query", "actual_seq_lengths_key"]
    yield [Shard(0), Shard(0), Shard(0)], {name: Shard(0) for name in batch}
    if sparse_mode == 0 and actual_seq_lengths_query is None:
        yield [Shard(1), Partial(), Shard(1)], {name: Shard(1) for name in rows}  # every row adds to its keys


declare(
    Op(
        schema="npu::npu_lightning_indexer_grad(Tensor query, Tensor key, Tensor dy, Tensor sparse_indices, "
        "Tensor weights, Tensor? actual_seq_lengths_query=None, Tensor? actual_seq_lengths_key=None, "
        'str? layout="BSND", int? sparse_mode=3, int? pre_tokens=9223372036854775807, '
        "int? next_tokens=9223372036854775807) -> (Tensor, Tensor, Tensor)",
        reference=reference.npu_lightning_indexer_grad,
        cuda=kernel(
            "lightning_indexer.triton_grad", "npu_lightning_indexer_grad", reference.npu_lightning_indexer_grad
        ),
        fake=grad_fake,
        contract=grad_contract,
        sharding=grad_sharding,
        limits=(
            *SIZES,
            Limit("the number of heads of query", lambda query, **_: query.shape[-2], (64,)),
            Limit("top-k", lambda sparse_indices, **_: sparse_indices.shape[-1], (2048,)),
        ),
    )
)
