"""``npu_sparse_flash_attention``: attention over selected keys. Its gradient is in ``sparse_flash_attention_grad``."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import Tensor
from torch.distributed.tensor import Placement, Replicate, Shard

from torchtitan_npu.ops.core.autograd import Autograd
from torchtitan_npu.ops.core.op import Limit, Op, declare
from torchtitan_npu.ops.core.triton_kernel import kernel
from torchtitan_npu.ops.sparse_flash_attention import reference as reference
from torchtitan_npu.ops.sparse_flash_attention.selection import (
    HALVES,
    absent_problems,
    index_problems,
    layout_problems,
    length_tensor_problems,
    memory,
    mode_problems,
    rope_problems,
    same_problems,
    statistics_dtype,
    statistics_shape,
    token_problems,
    window_problems,
)

MLA_ABSORBED = 2
"""The ``attention_mode`` in which keys are latent vectors with a rope of their own, and values are the same vectors."""


def contract(
    query: Tensor,
    key: Tensor,
    value: Tensor | None,
    sparse_indices: Tensor,
    block_table: Tensor | None,
    actual_seq_lengths_query: Tensor | None,
    actual_seq_lengths_kv: Tensor | None,
    query_rope: Tensor | None,
    key_rope: Tensor | None,
    sparse_block_size: int,
    layout_query: str,
    layout_kv: str,
    sparse_mode: int,
    pre_tokens: int,
    next_tokens: int,
    attention_mode: int,
    sinks: Tensor | None,
    **_: Any,
) -> Iterator[str]:
    yield from layout_problems(layout_query=layout_query, layout_kv=layout_kv)
    yield from absent_problems("keys in pages are for inference", block_table=block_table)
    yield from absent_problems("torch_npu does not say what it does, and has no gradient for it", sinks=sinks)
    yield from input_problems(layout_query, query, key, value, sparse_indices, query_rope, key_rope)
    yield from length_tensor_problems(
        layout_query,
        query,
        actual_seq_lengths_query=actual_seq_lengths_query,
        actual_seq_lengths_kv=actual_seq_lengths_kv,
    )
    yield from block_problems(sparse_block_size)
    yield from mode_problems(sparse_mode)
    yield from window_problems(pre_tokens=pre_tokens, next_tokens=next_tokens)
    if attention_mode != MLA_ABSORBED:
        yield f"attention_mode must be {MLA_ABSORBED} (absorbed MLA), not {attention_mode}"


def input_problems(
    layout: str,
    query: Tensor,
    key: Tensor,
    value: Tensor | None,
    sparse_indices: Tensor,
    query_rope: Tensor | None,
    key_rope: Tensor | None,
) -> Iterator[str]:
    yield from token_problems(layout, "query", query, "key", key)
    if value is not None:
        yield from same_problems("value", value, "key", key)
    yield from index_problems(sparse_indices, query, key)
    yield from rope_problems(query, key, query_rope, key_rope)


def block_problems(sparse_block_size: int) -> Iterator[str]:
    if sparse_block_size != 1:
        yield f"sparse_block_size must be 1 (indices of single keys), not {sparse_block_size}"


def fake(query: Tensor, key: Tensor, return_softmax_lse: bool, **_: Any) -> tuple[Tensor, Tensor, Tensor]:
    shape = statistics_shape(query, key) if return_softmax_lse else [0]
    statistics = [query.new_empty(shape, dtype=statistics_dtype(query)) for _ in range(2)]
    return query.new_empty(query.shape), statistics[0], statistics[1]


def ways_to_shard(layout: str, key: Any, sparse_mode: int, query_lengths: Any) -> Iterator[tuple[str, int, int]]:
    """What may be split over the ranks, and its dimension in the query and in the softmax's statistics.

    Heads, where they share one key. Rows only where their keys do not depend on their place in the sequence: the causal
    line of sparse_mode 3 starts at the last row a rank has.
    """
    if layout == "BSND":
        yield "batch", 0, 0
        if sparse_mode == 0 and query_lengths is None:
            yield "rows", 1, 2
    if key.shape[-2] == 1:
        yield "heads", key.ndim - 2, key.ndim - 1


def shards(way: str, dim: int, lengths: tuple[str, str]) -> dict[str, Placement]:
    names = ["query", "query_rope", "d_out", "out"]
    if way != "heads":
        names.append("sparse_indices")
    if way == "batch":
        names += ["key", "key_rope", "value", *lengths]
    return {name: Shard(dim) for name in names}


def sharding(
    key: Any, layout_query: str, sparse_mode: int, actual_seq_lengths_query: Any, return_softmax_lse: bool, **_: Any
) -> Iterator[tuple[list[Placement], dict[str, Placement]]]:
    for way, dim, statistics_dim in ways_to_shard(layout_query, key, sparse_mode, actual_seq_lengths_query):
        statistics = Shard(statistics_dim) if return_softmax_lse else Replicate()
        inputs = shards(way, dim, ("actual_seq_lengths_query", "actual_seq_lengths_kv"))
        yield [Shard(dim), statistics, statistics], inputs


def save(
    ctx: Any,
    output: tuple[Tensor, Tensor, Tensor],
    query: Tensor,
    key: Tensor,
    value: Tensor | None,
    sparse_indices: Tensor,
    scale_value: float,
    actual_seq_lengths_query: Tensor | None,
    actual_seq_lengths_kv: Tensor | None,
    query_rope: Tensor | None,
    key_rope: Tensor | None,
    sparse_block_size: int,
    layout_query: str,
    sparse_mode: int,
    pre_tokens: int,
    next_tokens: int,
    attention_mode: int,
    **_: Any,
) -> None:
    out, softmax_max, softmax_sum = output
    if value is key:
        value = None  # one tensor has one gradient: the key's, with the value's part in it
    ctx.save_for_backward(
        *(query, key, value, sparse_indices, out, softmax_max, softmax_sum),
        *(query_rope, key_rope, actual_seq_lengths_query, actual_seq_lengths_kv),
    )
    ctx.scale, ctx.block_size = scale_value, sparse_block_size
    ctx.options = (layout_query, sparse_mode, pre_tokens, next_tokens, attention_mode)
    ctx.mark_non_differentiable(softmax_max, softmax_sum)


def backward(npu: Any, ctx: Any, d_out: Tensor, *_: None) -> dict[str, Tensor]:
    query, key, value, indices, out, softmax_max, softmax_sum, *optional = ctx.saved_tensors
    gradients = npu.npu_sparse_flash_attention_grad(
        *(query, key, value, indices, d_out, out, softmax_max, softmax_sum, ctx.scale, ctx.block_size),
        *(*optional, *ctx.options),
    )
    names = ("query", "key", "value", "query_rope", "key_rope")
    inputs = (query, key, value, *optional[:2])
    return {
        name: gradient for name, gradient, tensor in zip(names, gradients, inputs, strict=True) if tensor is not None
    }


HEADS = (1, 2, 4, 8, 16, 32, 64, 128)
ROPE_SIZES = (None, 64)
SIZES = (
    Limit("query.dtype", lambda query, **_: query.dtype, HALVES),
    Limit("the number of heads of query", lambda query, **_: query.shape[-2], HEADS),
    Limit("the number of heads of key", lambda key, **_: key.shape[-2], (1,)),
    Limit("the head size of query", lambda query, **_: query.shape[-1], (512,)),
    Limit("the head size of query_rope", lambda query_rope, **_: rope_size(query_rope), ROPE_SIZES),
)


def rope_size(rope: Tensor | None) -> int | None:
    return None if rope is None else rope.shape[-1]


declare(
    Op(
        schema="npu::npu_sparse_flash_attention(Tensor query, Tensor key, Tensor? value, Tensor sparse_indices, "
        "float scale_value, *, Tensor? block_table=None, Tensor? actual_seq_lengths_query=None, "
        "Tensor? actual_seq_lengths_kv=None, Tensor? query_rope=None, Tensor? key_rope=None, "
        'int sparse_block_size=1, str layout_query="BSND", str layout_kv="BSND", int sparse_mode=3, '
        "int pre_tokens=9223372036854775807, int next_tokens=9223372036854775807, int attention_mode=0, "
        "bool return_softmax_lse=False, Tensor? sinks=None) -> (Tensor, Tensor, Tensor)",
        reference=reference.npu_sparse_flash_attention,
        cuda=kernel(
            "sparse_flash_attention.triton", "npu_sparse_flash_attention", reference.npu_sparse_flash_attention
        ),
        fake=fake,
        contract=contract,
        sharding=sharding,
        autograd=Autograd(save, backward),
        limits=(
            *SIZES,
            Limit("query's memory", lambda query, **_: memory(query), ("contiguous",)),
            Limit("key's memory", lambda key, **_: memory(key), ("contiguous",)),
            Limit("value's memory", lambda value, **_: memory(value), ("contiguous",)),
            Limit("sparse_indices' memory", lambda sparse_indices, **_: memory(sparse_indices), ("contiguous",)),
            Limit("query_rope's memory", lambda query_rope, **_: memory(query_rope), ("contiguous",)),
            Limit("key_rope's memory", lambda key_rope, **_: memory(key_rope), ("contiguous",)),
        ),
    )
)
