"""``npu_lightning_indexer`` and ``npu_lightning_indexer_grad``: the selection of keys for sparse attention.

A row holds its keys first, then -1. torch_npu does not specify the order of the keys: the reference puts the highest
score first, the Triton kernel the earliest key. Callers must not depend on it.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import Partial, Replicate, Shard

from torchtitan_npu.ops.core.autograd import Autograd, save_by_name, saved_by_name
from torchtitan_npu.ops.core.call_description import TensorDescription
from torchtitan_npu.ops.core.op import Limit, Op, declare
from torchtitan_npu.ops.core.samples import randn
from torchtitan_npu.ops.core.sharding import Strategy
from torchtitan_npu.ops.core.triton_kernel import is_hopper, kernel
from torchtitan_npu.ops.lightning_indexer import reference
from torchtitan_npu.ops.sparse_flash_attention.checks import (
    HALVES,
    AnyOf,
    batch_size,
    check_absent,
    check_indices,
    check_layouts,
    check_length_tensors,
    check_no_window,
    check_sparse_mode,
    check_tokens,
    check_weights,
    memory_format,
    sequence_length,
)
from torchtitan_npu.ops.sparse_flash_attention.op import (
    SAMPLE_DOCUMENTS,
    SAMPLE_KEYS,
    SAMPLE_QUERIES,
    sample_ends,
    sample_randn,
    sample_selection,
)


def checks(
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
    yield from check_layouts(layout_query=layout_query, layout_key=layout_key)
    yield from check_absent("paged keys are for inference", block_table=block_table)
    yield from check_tokens(layout_query, "query", query, "key", key)
    yield from check_weights(weights, "query", query)
    yield from check_length_tensors(
        layout_query,
        query,
        actual_seq_lengths_query=actual_seq_lengths_query,
        actual_seq_lengths_key=actual_seq_lengths_key,
    )
    if sparse_count <= 0:
        yield f"sparse_count must be at least 1, not {sparse_count}"
    yield from check_sparse_mode(sparse_mode)
    yield from check_no_window(pre_tokens=pre_tokens, next_tokens=next_tokens)


def fake(query: Tensor, key: Tensor, sparse_count: int, return_value: bool, **_: Any) -> tuple[Tensor, Tensor]:
    shape = [*query.shape[:-2], key.shape[-2], sparse_count]
    return query.new_empty(shape, dtype=torch.int32), query.new_empty(shape if return_value else [0])


def sharding(
    layout_query: str, sparse_mode: int, actual_seq_lengths_query: Any, return_value: bool, **_: Any
) -> Iterator[Strategy]:
    """Shard the batch, or the query rows if a row's keys do not depend on its position.

    The heads cannot be sharded: a score sums over all heads before the selection.
    """
    if layout_query != "BSND":
        return
    rows = ["query", "weights"]
    dims = {0: [*rows, "key", "actual_seq_lengths_query", "actual_seq_lengths_key"]}
    if sparse_mode == 0 and actual_seq_lengths_query is None:
        dims[1] = rows
    for dim, names in dims.items():
        yield [Shard(dim), Shard(dim) if return_value else Replicate()], {name: Shard(dim) for name in names}


PASSED_TO_GRAD = (
    *("query", "key", "weights", "actual_seq_lengths_query", "actual_seq_lengths_key"),
    *("sparse_mode", "pre_tokens", "next_tokens"),
)


def save(ctx: Any, output: tuple[Tensor, Tensor], **arguments: Any) -> None:
    ctx.mark_non_differentiable(output[0])
    passed = {name: arguments[name] for name in PASSED_TO_GRAD}
    save_by_name(ctx, sparse_indices=output[0], layout=arguments["layout_query"], **passed)


def backward(npu: Any, ctx: Any, _: None, dy: Tensor) -> dict[str, Tensor]:
    gradients = npu.npu_lightning_indexer_grad(dy=dy, **saved_by_name(ctx))
    return dict(zip(("query", "key", "weights"), gradients, strict=True))


WEIGHTS = TensorDescription(torch.bfloat16, 3)


def sample(weights: TensorDescription = WEIGHTS, layout_query: str = "BSND", **_: Any) -> dict[str, Any]:
    """Return queries that score some keys above 0 and the others 0, so that rounding does not change the selection."""
    inputs = sample_inputs(weights, layout_query)
    documents, selected = SAMPLE_DOCUMENTS[layout_query], SAMPLE_KEYS // 4
    keys = SAMPLE_KEYS // documents
    sign = -torch.ones(documents, keys)
    for row in sign:
        row[torch.randperm(keys - SAMPLE_QUERIES)[:selected]] = 1  # visible to all queries
    inputs["key"] = inputs["key"].abs() * sign.view(inputs["key"].shape[:-1])[..., None].to(inputs["key"].dtype)
    inputs |= {"query": inputs["query"].abs(), "weights": inputs["weights"].abs()}
    lengths = {f"actual_seq_lengths_{name}": ends for name, ends in sample_ends(layout_query, "query", "key").items()}
    layouts = {"layout_query": layout_query, "layout_key": layout_query}
    return {**inputs, **lengths, **layouts, "sparse_count": selected}


def sample_inputs(weights: TensorDescription, layout: str) -> dict[str, Any]:
    """Return the indexer's inputs for the queries and keys of sparse attention's sample."""
    heads, size = 64, 128
    query, key = sample_randn(layout, SAMPLE_QUERIES, heads, size), sample_randn(layout, SAMPLE_KEYS, 1, size)
    return {"query": query, "key": key, "weights": randn(*query.shape[:-1], dtype=weights.dtype)}


def flops(query: Tensor, key: Tensor, layout_key: str, **_: Any) -> int:
    """Return the FLOPs of the scores of all keys."""
    return 2 * query.numel() * key.shape[layout_key.index("T" if "T" in layout_key else "S")]


def grad_flops(query: Tensor, sparse_indices: Tensor, **_: Any) -> int:
    """Return the FLOPs of the selected scores, and of the gradients of queries and keys."""
    return 6 * query.numel() * sparse_indices.shape[-1]


SELECTED = Limit(
    "sparse_count", lambda sparse_count, **_: sparse_count, AnyOf((range(1, 2049), *range(3072, 8193, 1024)))
)
SIZES = (
    Limit("query.dtype", lambda query, **_: query.dtype, HALVES),
    Limit("the head size of query", lambda query, **_: query.shape[-1], (128,)),
    Limit("the number of heads of key", lambda key, **_: key.shape[-2], (1,)),
)

SEGMENT = 32768
"""The number of scores from which a kernel selects at a time."""


def can_select(keys: int, count: int) -> bool:
    """Return whether the kernels can select ``count`` of ``keys``: every round must reduce the candidates."""
    return keys <= SEGMENT or 2 * count <= SEGMENT


in_triton = kernel(reference.npu_lightning_indexer)
in_gluon = kernel(reference.npu_lightning_indexer, "gluon")


def cuda(query: Tensor, key: Tensor, layout_query: str, sparse_count: int, **others: Any) -> tuple[Tensor, Tensor]:
    """Run the Gluon kernel on a Hopper GPU at the sizes it takes, and the Triton kernel otherwise.

    The reference makes a selection that neither can make.
    """
    arguments = {"query": query, "key": key, "layout_query": layout_query, "sparse_count": sparse_count, **others}
    if not can_select(key.shape[0 if layout_query == "TND" else 1], sparse_count):
        return reference.npu_lightning_indexer(**arguments)
    return (in_gluon if is_hopper(query) and suits_gluon(query, key) else in_triton)(**arguments)


def suits_gluon(query: Tensor, key: Tensor) -> bool:
    """Return whether the Gluon kernel takes these: half precision, 128 features, at most 64 heads per key head."""
    half = query.dtype in HALVES and key.dtype == query.dtype
    return half and query.shape[-1] == 128 and query.shape[-2] <= 64 * key.shape[-2]


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
        checks=checks,
        sharding=sharding,
        autograd=Autograd(save, backward),
        limits=(
            *SIZES,
            Limit("the number of heads of query", lambda query, **_: query.shape[-2], range(1, 65)),
            SELECTED,
            Limit("weights.dtype", lambda weights, **_: weights.dtype, (*HALVES, torch.float32)),
            Limit("query's memory", lambda query, **_: memory_format(query), ("contiguous",)),
            Limit("key's memory", lambda key, **_: memory_format(key), ("contiguous",)),
            Limit("weights' memory", lambda weights, **_: memory_format(weights), ("contiguous",)),
        ),
        sample=sample,
        unordered_integers=True,
        flops=flops,
    )
)


def grad_checks(
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
    yield from check_layouts(layout=layout)
    assert layout is not None
    yield from check_tokens(layout, "query", query, "key", key)
    yield from check_weights(weights, "query", query)
    yield from check_indices(sparse_indices, query, key)
    if (dy.shape, dy.dtype) != (sparse_indices.shape, query.dtype):
        yield (
            f"dy must have the shape of sparse_indices, {tuple(sparse_indices.shape)}, and the dtype of query, "
            f"{query.dtype}, not {tuple(dy.shape)} and {dy.dtype}: the scores come with return_value=True"
        )
    yield from check_length_tensors(
        layout,
        query,
        actual_seq_lengths_query=actual_seq_lengths_query,
        actual_seq_lengths_key=actual_seq_lengths_key,
    )
    yield from check_sparse_mode(sparse_mode)


def grad_fake(query: Tensor, key: Tensor, weights: Tensor, **_: Any) -> tuple[Tensor, Tensor, Tensor]:
    return query.new_empty(query.shape), key.new_empty(key.shape), weights.new_empty(weights.shape)


def grad_sharding(layout: str, sparse_mode: int, actual_seq_lengths_query: Any, **_: Any) -> Iterator[Strategy]:
    if layout != "BSND":
        return
    rows = ["query", "dy", "sparse_indices", "weights"]
    batch = [*rows, "key", "actual_seq_lengths_query", "actual_seq_lengths_key"]
    yield [Shard(0), Shard(0), Shard(0)], {name: Shard(0) for name in batch}
    if sparse_mode == 0 and actual_seq_lengths_query is None:
        yield (
            [Shard(1), Partial(), Shard(1)],
            {name: Shard(1) for name in rows},
        )  # every row adds to the gradients of its keys


grad_in_triton = kernel(reference.npu_lightning_indexer_grad, "triton_grad")
grad_in_gluon = kernel(reference.npu_lightning_indexer_grad, "gluon_grad")


def grad_cuda(query: Tensor, key: Tensor, **others: Any) -> tuple[Tensor, Tensor, Tensor]:
    """Run the Gluon kernel on a Hopper GPU at the sizes it takes, and the Triton kernel otherwise."""
    hopper = is_hopper(query) and grad_suits_gluon(query, key)
    return (grad_in_gluon if hopper else grad_in_triton)(query=query, key=key, **others)


def grad_suits_gluon(query: Tensor, key: Tensor) -> bool:
    """Return whether the Gluon kernel of the gradients takes these: half precision, and the sizes of DeepSeek-V3.2."""
    if query.dtype not in HALVES or key.dtype != query.dtype:
        return False
    return query.shape[-1] == 128 and query.shape[-2] <= 64 and key.shape[-2] == 1


def grad_sample(**_: Any) -> dict[str, Any]:
    selection = sample_selection("BSND")
    return {**sample_inputs(WEIGHTS, "BSND"), "sparse_indices": selection, "dy": randn(*selection.shape)}


declare(
    Op(
        schema="npu::npu_lightning_indexer_grad(Tensor query, Tensor key, Tensor dy, Tensor sparse_indices, "
        "Tensor weights, Tensor? actual_seq_lengths_query=None, Tensor? actual_seq_lengths_key=None, "
        'str? layout="BSND", int? sparse_mode=3, int? pre_tokens=9223372036854775807, '
        "int? next_tokens=9223372036854775807) -> (Tensor, Tensor, Tensor)",
        reference=reference.npu_lightning_indexer_grad,
        cuda=grad_cuda,
        fake=grad_fake,
        checks=grad_checks,
        sharding=grad_sharding,
        limits=(
            *SIZES,
            Limit("the number of heads of query", lambda query, **_: query.shape[-2], range(1, 65)),
            Limit("top-k", lambda sparse_indices, **_: sparse_indices.shape[-1], (2048,)),
            Limit("sparse_indices.dtype", lambda sparse_indices, **_: sparse_indices.dtype, (torch.int32,)),
            Limit(
                "the batch size",
                lambda query, actual_seq_lengths_query=None, **_: batch_size(query, actual_seq_lengths_query),
                range(1, 1025),
            ),
            Limit(
                "the number of queries",
                lambda query, actual_seq_lengths_query=None, **_: sequence_length(query, actual_seq_lengths_query),
                range(1, 131073),
            ),
        ),
        sample=grad_sample,
        flops=grad_flops,
    )
)
