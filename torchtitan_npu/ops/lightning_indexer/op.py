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

from torchtitan_npu.ops.core.arguments import Call
from torchtitan_npu.ops.core.autograd import Autograd, save_by_name, saved_by_name
from torchtitan_npu.ops.core.op import Limit, Op, declare
from torchtitan_npu.ops.core.sharding import Strategy
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

LENGTHS = ("actual_seq_lengths_query", "actual_seq_lengths_key")


def checks(call: Call) -> Iterator[str]:
    yield from check_layouts(**call.pick("layout_query", "layout_key"))
    yield from check_absent("paged keys are for inference", block_table=call.block_table)
    yield from check_tokens(call.layout_query, "query", call.query, "key", call.key)
    yield from check_weights(call.weights, "query", call.query)
    yield from check_length_tensors(call.layout_query, call.query, **call.pick(*LENGTHS))
    if call.sparse_count <= 0:
        yield f"sparse_count must be at least 1, not {call.sparse_count}"
    yield from check_sparse_mode(call.sparse_mode)
    yield from check_no_window(**call.pick("pre_tokens", "next_tokens"))


def fake(call: Call) -> tuple[Tensor, Tensor]:
    shape = [*call.query.shape[:-2], call.key.shape[-2], call.sparse_count]
    return call.query.new_empty(shape, dtype=torch.int32), call.query.new_empty(shape if call.return_value else [0])


def sharding(call: Call) -> Iterator[Strategy]:
    """Shard the batch, or the query rows if a row's keys do not depend on its position.

    The heads cannot be sharded: a score sums over all heads before the selection.
    """
    if call.layout_query != "BSND":
        return
    rows = ["query", "weights"]
    dims = {0: [*rows, "key", "actual_seq_lengths_query", "actual_seq_lengths_key"]}
    if call.sparse_mode == 0 and call.actual_seq_lengths_query is None:
        dims[1] = rows
    for dim, names in dims.items():
        yield [Shard(dim), Shard(dim) if call.return_value else Replicate()], {name: Shard(dim) for name in names}


PASSED_TO_GRAD = (*("query", "key", "weights", *LENGTHS, "sparse_mode", "pre_tokens", "next_tokens"),)


def save(ctx: Any, output: tuple[Tensor, Tensor], call: Call) -> None:
    ctx.mark_non_differentiable(output[0])
    save_by_name(ctx, sparse_indices=output[0], layout=call.layout_query, **call.pick(*PASSED_TO_GRAD))


def backward(npu: Any, ctx: Any, _: None, dy: Tensor) -> dict[str, Tensor]:
    gradients = npu.npu_lightning_indexer_grad(dy=dy, **saved_by_name(ctx))
    return dict(zip(("query", "key", "weights"), gradients, strict=True))


def flops(query: Tensor, key: Tensor, layout_key: str, **_: Any) -> int:
    """Return the FLOPs of the scores of all keys."""
    return 2 * query.numel() * key.shape[layout_key.index("T" if "T" in layout_key else "S")]


def grad_flops(query: Tensor, sparse_indices: Tensor, **_: Any) -> int:
    """Return the FLOPs of the selected scores, and of the gradients of queries and keys."""
    return 6 * query.numel() * sparse_indices.shape[-1]


SELECTED = Limit("sparse_count", lambda call: call.sparse_count, AnyOf((range(1, 2049), *range(3072, 8193, 1024))))
SIZES = (
    Limit("query.dtype", lambda call: call.query.dtype, HALVES),
    Limit("the head size of query", lambda call: call.query.shape[-1], (128,)),
    Limit("the number of heads of key", lambda call: call.key.shape[-2], (1,)),
)

declare(
    Op(
        schema="npu::npu_lightning_indexer(Tensor query, Tensor key, Tensor weights, *, "
        "Tensor? actual_seq_lengths_query=None, Tensor? actual_seq_lengths_key=None, Tensor? block_table=None, "
        'str layout_query="BSND", str layout_key="BSND", int sparse_count=2048, int sparse_mode=3, '
        "int pre_tokens=9223372036854775807, int next_tokens=9223372036854775807, bool return_value=False) "
        "-> (Tensor, Tensor)",
        reference=reference.npu_lightning_indexer,
        fake=fake,
        checks=checks,
        sharding=sharding,
        autograd=Autograd(save, backward),
        limits=(
            *SIZES,
            Limit("the number of heads of query", lambda call: call.query.shape[-2], range(1, 65)),
            SELECTED,
            Limit("weights.dtype", lambda call: call.weights.dtype, (*HALVES, torch.float32)),
            Limit("query's memory", lambda call: memory_format(call.query), ("contiguous",)),
            Limit("key's memory", lambda call: memory_format(call.key), ("contiguous",)),
            Limit("weights' memory", lambda call: memory_format(call.weights), ("contiguous",)),
        ),
        flops=flops,
    )
)


def grad_checks(call: Call) -> Iterator[str]:
    yield from check_layouts(layout=call.layout)
    yield from check_tokens(call.layout, "query", call.query, "key", call.key)
    yield from check_weights(call.weights, "query", call.query)
    yield from check_indices(call.sparse_indices, call.query, call.key)
    dy, shape, dtype = call.dy, call.sparse_indices.shape, call.query.dtype
    if (dy.shape, dy.dtype) != (shape, dtype):
        yield (
            f"dy must have the shape of sparse_indices, {tuple(shape)}, and the dtype of query, {dtype}, not "
            f"{tuple(dy.shape)} and {dy.dtype}: the scores come with return_value=True"
        )
    yield from check_length_tensors(call.layout, call.query, **call.pick(*LENGTHS))
    yield from check_sparse_mode(call.sparse_mode)


def grad_fake(call: Call) -> tuple[Tensor, Tensor, Tensor]:
    d_query, d_key, d_weights = (x.new_empty(x.shape) for x in (call.query, call.key, call.weights))
    return d_query, d_key, d_weights


def grad_sharding(call: Call) -> Iterator[Strategy]:
    if call.layout != "BSND":
        return
    rows = ["query", "dy", "sparse_indices", "weights"]
    batch = [*rows, "key", "actual_seq_lengths_query", "actual_seq_lengths_key"]
    yield [Shard(0), Shard(0), Shard(0)], {name: Shard(0) for name in batch}
    if call.sparse_mode == 0 and call.actual_seq_lengths_query is None:
        yield (
            [Shard(1), Partial(), Shard(1)],
            {name: Shard(1) for name in rows},
        )  # every row adds to the gradients of its keys


declare(
    Op(
        schema="npu::npu_lightning_indexer_grad(Tensor query, Tensor key, Tensor dy, Tensor sparse_indices, "
        "Tensor weights, Tensor? actual_seq_lengths_query=None, Tensor? actual_seq_lengths_key=None, "
        'str? layout="BSND", int? sparse_mode=3, int? pre_tokens=9223372036854775807, '
        "int? next_tokens=9223372036854775807) -> (Tensor, Tensor, Tensor)",
        reference=reference.npu_lightning_indexer_grad,
        fake=grad_fake,
        checks=grad_checks,
        sharding=grad_sharding,
        limits=(
            *SIZES,
            Limit("the number of heads of query", lambda call: call.query.shape[-2], range(1, 65)),
            Limit("top-k", lambda call: call.sparse_indices.shape[-1], (2048,)),
            Limit("sparse_indices.dtype", lambda call: call.sparse_indices.dtype, (torch.int32,)),
            Limit(
                "the batch size",
                lambda call: batch_size(call.query, call.actual_seq_lengths_query),
                range(1, 1025),
            ),
            Limit(
                "the number of queries",
                lambda call: sequence_length(call.query, call.actual_seq_lengths_query),
                range(1, 131073),
            ),
        ),
        flops=grad_flops,
    )
)
