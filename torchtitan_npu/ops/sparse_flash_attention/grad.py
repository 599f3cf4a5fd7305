"""``npu_sparse_flash_attention_grad``: the gradients of attention over selected keys."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import Tensor
from torch.distributed.tensor import Partial, Placement, Replicate, Shard

from torchtitan_npu.ops.core.op import Limit, Op, declare
from torchtitan_npu.ops.core.triton_kernel import kernel
from torchtitan_npu.ops.sparse_flash_attention import reference as reference
from torchtitan_npu.ops.sparse_flash_attention.op import SIZES, block_problems, input_problems, shards, ways_to_shard
from torchtitan_npu.ops.sparse_flash_attention.selection import (
    layout_problems,
    length_tensor_problems,
    mode_problems,
    same_problems,
    statistics_problems,
)


def contract(
    query: Tensor,
    key: Tensor,
    value: Tensor | None,
    sparse_indices: Tensor,
    d_out: Tensor,
    out: Tensor,
    softmax_max: Tensor,
    softmax_sum: Tensor,
    sparse_block_size: int,
    query_rope: Tensor | None,
    key_rope: Tensor | None,
    actual_seq_qlen: Tensor | None,
    actual_seq_kvlen: Tensor | None,
    layout: str | None,
    sparse_mode: int | None,
    **_: Any,
) -> Iterator[str]:
    yield from layout_problems(layout=layout)
    assert layout is not None
    yield from input_problems(layout, query, key, value, sparse_indices, query_rope, key_rope)
    yield from same_problems("d_out", d_out, "query", query)
    yield from same_problems("out", out, "query", query)
    yield from statistics_problems(query, key, softmax_max=softmax_max, softmax_sum=softmax_sum)
    yield from length_tensor_problems(layout, query, actual_seq_qlen=actual_seq_qlen, actual_seq_kvlen=actual_seq_kvlen)
    yield from block_problems(sparse_block_size)
    yield from mode_problems(sparse_mode)


def fake(
    query: Tensor, key: Tensor, value: Tensor | None, query_rope: Tensor | None, key_rope: Tensor | None, **_: Any
) -> tuple[Tensor, ...]:
    inputs = (query, key, value, query_rope, key_rope)
    return tuple(query.new_empty([0] if tensor is None else tensor.shape) for tensor in inputs)


def sharding(
    key: Any, value: Any, query_rope: Any, layout: str, sparse_mode: int, actual_seq_qlen: Any, **_: Any
) -> Iterator[tuple[list[Placement], dict[str, Placement]]]:
    for way, dim, statistics_dim in ways_to_shard(layout, key, sparse_mode, actual_seq_qlen):
        inputs = shards(way, dim, ("actual_seq_qlen", "actual_seq_kvlen"))
        inputs |= {"softmax_max": Shard(statistics_dim), "softmax_sum": Shard(statistics_dim)}
        # every row, and every head, adds to its keys
        of_key: Placement = Shard(0) if way == "batch" else Partial()
        outputs = [Shard(dim), of_key, of_key, Shard(dim), of_key]
        given = [True, True, value is not None, query_rope is not None, query_rope is not None]
        yield [place if is_given else Replicate() for place, is_given in zip(outputs, given, strict=True)], inputs


declare(
    Op(
        schema="npu::npu_sparse_flash_attention_grad(Tensor query, Tensor key, Tensor? value, Tensor sparse_indices, "
        "Tensor d_out, Tensor out, Tensor softmax_max, Tensor softmax_sum, float scale_value, int sparse_block_size, "
        "Tensor? query_rope=None, Tensor? key_rope=None, Tensor? actual_seq_qlen=None, "
        'Tensor? actual_seq_kvlen=None, str? layout="BSND", int? sparse_mode=3, '
        "int? pre_tokens=9223372036854775807, int? next_tokens=9223372036854775807, int? attention_mode=0) "
        "-> (Tensor, Tensor, Tensor, Tensor, Tensor)",
        reference=reference.npu_sparse_flash_attention_grad,
        cuda=kernel(
            "sparse_flash_attention.triton_grad",
            "npu_sparse_flash_attention_grad",
            reference.npu_sparse_flash_attention_grad,
        ),
        fake=fake,
        contract=contract,
        sharding=sharding,
        limits=(
            *SIZES,
            Limit("top-k", lambda sparse_indices, **_: sparse_indices.shape[-1], tuple(range(1024, 8193, 1024))),
        ),
    )
)
