"""``npu_sparse_flash_attention`` and ``npu_sparse_flash_attention_grad``: attention over selected keys."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import Partial, Placement, Replicate, Shard

from torchtitan_npu.log import log_on_first_rank
from torchtitan_npu.ops.core.autograd import Autograd, save_by_name, saved_by_name
from torchtitan_npu.ops.core.checks import check_alike
from torchtitan_npu.ops.core.op import Limit, Op, declare
from torchtitan_npu.ops.core.samples import randn
from torchtitan_npu.ops.core.sharding import Strategy
from torchtitan_npu.ops.core.triton_kernel import is_hopper, kernel
from torchtitan_npu.ops.sparse_flash_attention import reference
from torchtitan_npu.ops.sparse_flash_attention.checks import (
    HALVES,
    ROPE_SIZES,
    TOP_K_OF_GRADIENTS,
    batch_size,
    check_absent,
    check_indices,
    check_layouts,
    check_length_tensors,
    check_no_window,
    check_ropes,
    check_sparse_mode,
    check_statistics,
    check_tokens,
    memory_format,
    rope_size,
    sequence_length,
    statistics_dtype,
    statistics_shape,
)

MLA_ABSORBED = 2
"""The ``attention_mode`` in which keys are latent vectors with separate ropes, and the values are the same vectors."""


def checks(
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
    yield from check_layouts(layout_query=layout_query, layout_kv=layout_kv)
    yield from check_absent("paged keys are for inference", block_table=block_table)
    yield from check_absent("torch_npu does not document it and has no gradient for it", sinks=sinks)
    yield from _check_inputs(layout_query, query, key, value, sparse_indices, query_rope, key_rope)
    yield from check_length_tensors(
        layout_query,
        query,
        actual_seq_lengths_query=actual_seq_lengths_query,
        actual_seq_lengths_kv=actual_seq_lengths_kv,
    )
    yield from _check_block_size(sparse_block_size)
    yield from check_sparse_mode(sparse_mode)
    yield from check_no_window(pre_tokens=pre_tokens, next_tokens=next_tokens)
    if attention_mode != MLA_ABSORBED:
        yield f"attention_mode must be {MLA_ABSORBED} (absorbed MLA), not {attention_mode}"


def _check_inputs(
    layout: str,
    query: Tensor,
    key: Tensor,
    value: Tensor | None,
    sparse_indices: Tensor,
    query_rope: Tensor | None,
    key_rope: Tensor | None,
) -> Iterator[str]:
    yield from check_tokens(layout, "query", query, "key", key)
    if value is not None:
        yield from check_alike("value", value, "key", key)
    yield from check_indices(sparse_indices, query, key)
    yield from check_ropes(query, key, query_rope, key_rope)


def _check_block_size(sparse_block_size: int) -> Iterator[str]:
    if sparse_block_size != 1:
        yield f"sparse_block_size must be 1 (indices of single keys), not {sparse_block_size}"


def fake(query: Tensor, key: Tensor, return_softmax_lse: bool, **_: Any) -> tuple[Tensor, Tensor, Tensor]:
    shape = statistics_shape(query, key) if return_softmax_lse else [0]
    statistics = [query.new_empty(shape, dtype=statistics_dtype(query)) for _ in range(2)]
    return query.new_empty(query.shape), statistics[0], statistics[1]


def _sharded_dims(layout: str, key: Any, sparse_mode: int, query_lengths: Any) -> Iterator[tuple[str, int, int]]:
    """Yield what may be sharded, with its dimension in the query and in the softmax's statistics.

    Heads may be sharded if they share one key. Rows may be sharded only if their keys do not depend on their position:
    the causal boundary of sparse_mode 3 starts at the last row of a rank.
    """
    if layout == "BSND":
        yield "batch", 0, 0
        if sparse_mode == 0 and query_lengths is None:
            yield "rows", 1, 2
    if key.shape[-2] == 1:
        yield "heads", key.ndim - 2, key.ndim - 1


def _sharded_inputs(what: str, dim: int, lengths: tuple[str, str]) -> dict[str, Placement]:
    names = ["query", "query_rope", "d_out", "out"]
    if what != "heads":
        names.append("sparse_indices")
    if what == "batch":
        names += ["key", "key_rope", "value", *lengths]
    return {name: Shard(dim) for name in names}


def sharding(
    key: Any, layout_query: str, sparse_mode: int, actual_seq_lengths_query: Any, return_softmax_lse: bool, **_: Any
) -> Iterator[Strategy]:
    for what, dim, statistics_dim in _sharded_dims(layout_query, key, sparse_mode, actual_seq_lengths_query):
        statistics = Shard(statistics_dim) if return_softmax_lse else Replicate()
        inputs = _sharded_inputs(what, dim, ("actual_seq_lengths_query", "actual_seq_lengths_kv"))
        yield [Shard(dim), statistics, statistics], inputs


PASSED_TO_GRAD = (
    *("query", "key", "value", "sparse_indices", "scale_value", "sparse_block_size", "query_rope", "key_rope"),
    *("sparse_mode", "pre_tokens", "next_tokens", "attention_mode"),
)


def save(ctx: Any, output: tuple[Tensor, Tensor, Tensor], **arguments: Any) -> None:
    out, softmax_max, softmax_sum = output
    ctx.mark_non_differentiable(softmax_max, softmax_sum)
    if arguments["value"] is arguments["key"]:
        arguments["value"] = None  # one tensor has one gradient: that of the key then includes the value's
    save_by_name(
        ctx,
        out=out,
        softmax_max=softmax_max,
        softmax_sum=softmax_sum,
        actual_seq_qlen=arguments["actual_seq_lengths_query"],
        actual_seq_kvlen=arguments["actual_seq_lengths_kv"],
        layout=arguments["layout_query"],
        **{name: arguments[name] for name in PASSED_TO_GRAD},
    )


def backward(npu: Any, ctx: Any, d_out: Tensor, *_: None) -> dict[str, Tensor]:
    saved = saved_by_name(ctx)
    gradients = npu.npu_sparse_flash_attention_grad(d_out=d_out, **saved)
    names = ("query", "key", "value", "query_rope", "key_rope")
    return {name: grad for name, grad in zip(names, gradients, strict=True) if saved[name] is not None}


def sample(layout_query: str = "BSND", **_: Any) -> dict[str, Any]:
    lengths = {f"actual_seq_lengths_{name}": ends for name, ends in sample_ends(layout_query, "query", "kv").items()}
    layouts = {"layout_query": layout_query, "layout_kv": layout_query}
    options = {"return_softmax_lse": True, "attention_mode": MLA_ABSORBED}
    return {**sample_inputs(layout_query), **lengths, **layouts, **options}


SAMPLE_QUERIES, SAMPLE_KEYS, SAMPLE_DOCUMENTS = 8, 2048, {"BSND": 1, "TND": 2}


def sample_randn(layout: str, tokens: int, *shape: int) -> Tensor:
    """Return a bfloat16 tensor of ``tokens``: of one sequence, or of packed documents."""
    return randn(*((tokens,) if layout == "TND" else (1, tokens)), *shape)


def sample_inputs(layout: str) -> dict[str, Any]:
    """Return the last queries of each document, each of which selects every key that it may attend to."""
    heads, size, rope = 32, 512, 64
    key = sample_randn(layout, SAMPLE_KEYS, 1, size)
    return {
        "query": sample_randn(layout, SAMPLE_QUERIES, heads, size),
        "key": key,
        "value": key,
        "sparse_indices": sample_selection(layout),
        "scale_value": (size + rope) ** -0.5,
        "query_rope": sample_randn(layout, SAMPLE_QUERIES, heads, rope),
        "key_rope": sample_randn(layout, SAMPLE_KEYS, 1, rope),
    }


def sample_ends(layout: str, query: str, key: str) -> dict[str, Tensor]:
    """Return the ends of the packed documents under the given names, or nothing in BSND: (documents) int32."""
    if layout == "BSND":
        return {}
    parts = torch.arange(1, SAMPLE_DOCUMENTS[layout] + 1, dtype=torch.int32)
    return {name: parts * (size // len(parts)) for name, size in ((query, SAMPLE_QUERIES), (key, SAMPLE_KEYS))}


def sample_selection(layout: str) -> Tensor:
    """Return the selected keys of :func:`sample_inputs` in random order, then -1: (..., queries, 1, keys) int32."""
    documents = SAMPLE_DOCUMENTS[layout]
    queries, keys = SAMPLE_QUERIES // documents, SAMPLE_KEYS // documents
    rows = []
    for query in [*range(queries)] * documents:
        visible = keys - queries + 1 + query
        rows.append(torch.cat((torch.randperm(visible), torch.full((SAMPLE_KEYS - visible,), -1))))
    selection = torch.stack(rows).int()[:, None]
    return selection if layout == "TND" else selection[None]


def flops(**arguments: Any) -> int:
    """Return the FLOPs of the scores and of their product with the values."""
    keys, key_size, value_size = _flop_sizes(**arguments)
    return 2 * keys * (key_size + value_size)


def grad_flops(**arguments: Any) -> int:
    """Return the FLOPs of the scores, and of the gradients of scores, queries, keys and values."""
    keys, key_size, value_size = _flop_sizes(**arguments)
    return 2 * keys * (3 * key_size + 2 * value_size)


def _flop_sizes(
    query: Tensor,
    key: Tensor,
    value: Tensor | None,
    sparse_indices: Tensor,
    sparse_block_size: int,
    query_rope: Tensor | None,
    **_: Any,
) -> tuple[int, int, int]:
    """Return the selected keys of all rows and heads, the size of a key with its rope, and the size of a value."""
    rows = query.numel() // query.shape[-1]
    value_size = (key if value is None else value).shape[-1]
    return (
        rows * sparse_indices.shape[-1] * sparse_block_size,
        query.shape[-1] + (rope_size(query_rope) or 0),
        value_size,
    )


POWERS_OF_TWO = (1, 2, 4, 8, 16, 32, 64, 128)
SIZES = (
    Limit("query.dtype", lambda query, **_: query.dtype, HALVES),
    Limit("the number of heads of query", lambda query, **_: query.shape[-2], POWERS_OF_TWO),
    Limit("the number of heads of key", lambda key, **_: key.shape[-2], (1,)),
    Limit("the head size of query", lambda query, **_: query.shape[-1], (512,)),
    Limit("the head size of query_rope", lambda query_rope, **_: rope_size(query_rope), ROPE_SIZES),
)


in_triton = kernel(reference.npu_sparse_flash_attention)
in_gluon = kernel(reference.npu_sparse_flash_attention, "gluon")


def cuda(
    query: Tensor, key: Tensor, value: Tensor | None, query_rope: Tensor | None, **others: Any
) -> tuple[Tensor, Tensor, Tensor]:
    """Run the Gluon kernel on a Hopper GPU at the sizes it takes, and the Triton kernel otherwise."""
    arguments = {"query": query, "key": key, "value": value, "query_rope": query_rope, **others}
    if is_hopper(query) and suits_gluon(query, key, value, query_rope):
        log_gluon()
        return in_gluon(**arguments)
    return in_triton(**arguments)


def suits_gluon(query: Tensor, key: Tensor, value: Tensor | None, query_rope: Tensor | None) -> bool:
    """Return whether the Gluon kernel takes these: half precision, 512 + 64 features, and keys that are the values."""
    if query.dtype not in HALVES or query.shape[-1] != 512 or rope_size(query_rope) != 64:
        return False
    return value is None or (value.data_ptr() == key.data_ptr() and value.stride() == key.stride())


@cache
def log_gluon() -> None:
    log_on_first_rank("npu_sparse_flash_attention runs its kernel for Hopper GPUs (Gluon)", logging.INFO)


FORWARD = declare(
    Op(
        schema="npu::npu_sparse_flash_attention(Tensor query, Tensor key, Tensor? value, Tensor sparse_indices, "
        "float scale_value, *, Tensor? block_table=None, Tensor? actual_seq_lengths_query=None, "
        "Tensor? actual_seq_lengths_kv=None, Tensor? query_rope=None, Tensor? key_rope=None, "
        'int sparse_block_size=1, str layout_query="BSND", str layout_kv="BSND", int sparse_mode=3, '
        "int pre_tokens=9223372036854775807, int next_tokens=9223372036854775807, int attention_mode=0, "
        "bool return_softmax_lse=False, Tensor? sinks=None) -> (Tensor, Tensor, Tensor)",
        reference=reference.npu_sparse_flash_attention,
        cuda=cuda,
        fake=fake,
        checks=checks,
        sharding=sharding,
        autograd=Autograd(save, backward),
        limits=(
            *SIZES,
            Limit("sparse_block_size", lambda sparse_block_size=1, **_: sparse_block_size, POWERS_OF_TWO),
            Limit("attention_mode", lambda attention_mode=MLA_ABSORBED, **_: attention_mode, (MLA_ABSORBED,)),
            Limit("query's memory", lambda query, **_: memory_format(query), ("contiguous",)),
            Limit("key's memory", lambda key, **_: memory_format(key), ("contiguous",)),
            Limit("value's memory", lambda value, **_: memory_format(value), ("contiguous",)),
            Limit("sparse_indices' memory", lambda sparse_indices, **_: memory_format(sparse_indices), ("contiguous",)),
            Limit("query_rope's memory", lambda query_rope, **_: memory_format(query_rope), ("contiguous",)),
            Limit("key_rope's memory", lambda key_rope, **_: memory_format(key_rope), ("contiguous",)),
        ),
        sample=sample,
        flops=flops,
    )
)


# npu_sparse_flash_attention_grad


def grad_checks(
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
    yield from check_layouts(layout=layout)
    assert layout is not None
    yield from _check_inputs(layout, query, key, value, sparse_indices, query_rope, key_rope)
    yield from check_alike("d_out", d_out, "query", query)
    yield from check_alike("out", out, "query", query)
    yield from check_statistics(query, key, softmax_max=softmax_max, softmax_sum=softmax_sum)
    yield from check_length_tensors(layout, query, actual_seq_qlen=actual_seq_qlen, actual_seq_kvlen=actual_seq_kvlen)
    yield from _check_block_size(sparse_block_size)
    yield from check_sparse_mode(sparse_mode)


def grad_fake(
    query: Tensor, key: Tensor, value: Tensor | None, query_rope: Tensor | None, key_rope: Tensor | None, **_: Any
) -> tuple[Tensor, ...]:
    inputs = (query, key, value, query_rope, key_rope)
    return tuple(query.new_empty([0] if tensor is None else tensor.shape) for tensor in inputs)


def grad_sharding(
    key: Any, value: Any, query_rope: Any, layout: str, sparse_mode: int, actual_seq_qlen: Any, **_: Any
) -> Iterator[Strategy]:
    for what, dim, statistics_dim in _sharded_dims(layout, key, sparse_mode, actual_seq_qlen):
        inputs = _sharded_inputs(what, dim, ("actual_seq_qlen", "actual_seq_kvlen"))
        inputs |= {"softmax_max": Shard(statistics_dim), "softmax_sum": Shard(statistics_dim)}
        # every row and every head adds to the gradients of its keys
        of_key: Placement = Shard(0) if what == "batch" else Partial()
        outputs = [Shard(dim), of_key, of_key, Shard(dim), of_key]
        given = [True, True, value is not None, query_rope is not None, query_rope is not None]
        yield [place if is_given else Replicate() for place, is_given in zip(outputs, given, strict=True)], inputs


def grad_sample(layout: str = "BSND", **_: Any) -> dict[str, Any]:
    forward = sample(layout)
    out, softmax_max, softmax_sum = FORWARD.reference(**FORWARD.complete(**forward))
    statistics = {"out": out, "softmax_max": softmax_max, "softmax_sum": softmax_sum}
    options = {"sparse_block_size": 1, "attention_mode": MLA_ABSORBED, "layout": layout}
    lengths = sample_ends(layout, "actual_seq_qlen", "actual_seq_kvlen")
    inputs = {name: forward[name] for name in PASSED_TO_GRAD if name in forward}
    return {**inputs, "d_out": randn(*out.shape), **statistics, **lengths, **options}


grad_in_triton = kernel(reference.npu_sparse_flash_attention_grad, "triton_grad")
grad_in_gluon = kernel(reference.npu_sparse_flash_attention_grad, "gluon_grad")


def cuda_grad(
    query: Tensor, key: Tensor, value: Tensor | None, query_rope: Tensor | None, sparse_indices: Tensor, **others: Any
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Run the Gluon kernel on a Hopper GPU at the sizes it takes, else those of Triton."""
    inputs = {"query": query, "key": key, "value": value, "query_rope": query_rope, "sparse_indices": sparse_indices}
    hopper = is_hopper(query) and grad_suits_gluon(query, key, value, query_rope, sparse_indices)
    return (grad_in_gluon if hopper else grad_in_triton)(**inputs, **others)


def grad_suits_gluon(
    query: Tensor, key: Tensor, value: Tensor | None, query_rope: Tensor | None, sparse_indices: Tensor
) -> bool:
    """Return whether the Gluon kernel takes these: as in the forward pass, without ``value`` and in whole blocks."""
    if value is not None or not suits_gluon(query, key, value, query_rope):
        return False
    return sparse_indices.shape[-1] % 64 == 0


declare(
    Op(
        schema="npu::npu_sparse_flash_attention_grad(Tensor query, Tensor key, Tensor? value, Tensor sparse_indices, "
        "Tensor d_out, Tensor out, Tensor softmax_max, Tensor softmax_sum, float scale_value, int sparse_block_size, "
        "Tensor? query_rope=None, Tensor? key_rope=None, Tensor? actual_seq_qlen=None, "
        'Tensor? actual_seq_kvlen=None, str? layout="BSND", int? sparse_mode=3, '
        "int? pre_tokens=9223372036854775807, int? next_tokens=9223372036854775807, int? attention_mode=0) "
        "-> (Tensor, Tensor, Tensor, Tensor, Tensor)",
        reference=reference.npu_sparse_flash_attention_grad,
        cuda=cuda_grad,
        fake=grad_fake,
        checks=grad_checks,
        sharding=grad_sharding,
        limits=(
            *SIZES,
            Limit("top-k", lambda sparse_indices, **_: sparse_indices.shape[-1], TOP_K_OF_GRADIENTS),
            Limit("sparse_indices.dtype", lambda sparse_indices, **_: sparse_indices.dtype, (torch.int32,)),
            Limit("sparse_block_size", lambda sparse_block_size=1, **_: sparse_block_size, (1, 8, 16, 32, 64)),
            Limit(
                "the batch size",
                lambda query, actual_seq_qlen=None, **_: batch_size(query, actual_seq_qlen),
                range(1, 257),
            ),
            Limit(
                "the number of queries",
                lambda query, actual_seq_qlen=None, **_: sequence_length(query, actual_seq_qlen),
                range(1, 131073),
            ),
            Limit(
                "the number of keys",
                lambda key, actual_seq_kvlen=None, **_: sequence_length(key, actual_seq_kvlen),
                range(1, 131073),
            ),
        ),
        sample=grad_sample,
        flops=grad_flops,
    )
)
