"""``npu_sparse_flash_attention`` and ``npu_sparse_flash_attention_grad``: attention over selected keys."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import Partial, Placement, Replicate, Shard

from torchtitan_npu.ops.core.arguments import Call
from torchtitan_npu.ops.core.autograd import Autograd, save_by_name, saved_by_name
from torchtitan_npu.ops.core.checks import check_alike
from torchtitan_npu.ops.core.dtypes import compute_dtype
from torchtitan_npu.ops.core.op import Limit, declare
from torchtitan_npu.ops.core.sharding import Strategy
from torchtitan_npu.ops.sparse_flash_attention import checks as shared
from torchtitan_npu.ops.sparse_flash_attention import reference

MLA_ABSORBED = 2
"""The ``attention_mode`` in which keys are latent vectors with separate ropes, and the values are the same vectors."""


def checks(call: Call) -> Iterator[str]:
    yield from shared.check_layouts(**call.pick("layout_query", "layout_kv"))
    yield from shared.check_absent("paged keys are for inference", block_table=call.block_table)
    yield from shared.check_absent("torch_npu does not document it and has no gradient for it", sinks=call.sinks)
    yield from _check_inputs(call, call.layout_query)
    lengths = call.pick("actual_seq_lengths_query", "actual_seq_lengths_kv")
    yield from shared.check_length_tensors(call.layout_query, call.query, **lengths)
    yield from _check_block_size(call.sparse_block_size)
    yield from shared.check_sparse_mode(call.sparse_mode)
    yield from shared.check_no_window(**call.pick("pre_tokens", "next_tokens"))
    if call.attention_mode != MLA_ABSORBED:
        yield f"attention_mode must be {MLA_ABSORBED} (absorbed MLA), not {call.attention_mode}"


def _check_inputs(call: Call, layout: str) -> Iterator[str]:
    yield from shared.check_tokens(layout, "query", call.query, "key", call.key)
    if call.value is not None:
        yield from check_alike("value", call.value, "key", call.key)
    yield from shared.check_indices(call.sparse_indices, call.query, call.key)
    yield from shared.check_ropes(call.query, call.key, call.query_rope, call.key_rope)


def _check_block_size(sparse_block_size: int) -> Iterator[str]:
    if sparse_block_size != 1:
        yield f"sparse_block_size must be 1 (indices of single keys), not {sparse_block_size}"


def fake(call: Call) -> tuple[Tensor, Tensor, Tensor]:
    shape = shared.statistics_shape(call.query, call.key) if call.return_softmax_lse else [0]
    statistics = [call.query.new_empty(shape, dtype=compute_dtype(call.query)) for _ in range(2)]
    return call.query.new_empty(call.query.shape), statistics[0], statistics[1]


def _shardings(call: Call, layout: str, *lengths: str) -> Iterator[tuple[int, int, dict[str, Placement]]]:
    """Yield a dimension of the query, the same one in the softmax's statistics, and the inputs to shard by it.

    Heads may be sharded if they share one key. Rows may be sharded only if their keys do not depend on their position:
    the causal boundary of sparse_mode 3 starts at the last row of a rank.
    """
    heads = ("query", "query_rope", "d_out", "out")
    rows = (*heads, "sparse_indices")
    if layout == "BSND":
        yield 0, 0, dict.fromkeys((*rows, "key", "key_rope", "value", *lengths), Shard(0))
        if call.sparse_mode == 0 and getattr(call, lengths[0]) is None:
            yield 1, 2, dict.fromkeys(rows, Shard(1))
    if call.key.shape[-2] == 1:
        dim = call.key.ndim - 2
        yield dim, dim + 1, dict.fromkeys(heads, Shard(dim))


def sharding(call: Call) -> Iterator[Strategy]:
    lengths = ("actual_seq_lengths_query", "actual_seq_lengths_kv")
    for dim, statistics_dim, inputs in _shardings(call, call.layout_query, *lengths):
        statistics = Shard(statistics_dim) if call.return_softmax_lse else Replicate()
        yield [Shard(dim), statistics, statistics], inputs


PASSED_TO_GRAD = (
    *("query", "key", "value", "sparse_indices", "scale_value", "sparse_block_size", "query_rope", "key_rope"),
    *("sparse_mode", "pre_tokens", "next_tokens", "attention_mode"),
)


def save(ctx: Any, output: tuple[Tensor, Tensor, Tensor], call: Call) -> None:
    out, softmax_max, softmax_sum = output
    ctx.mark_non_differentiable(softmax_max, softmax_sum)
    saved = call.pick(*PASSED_TO_GRAD)
    if call.value is call.key:
        saved["value"] = None  # one tensor has one gradient: that of the key then includes the value's
    save_by_name(
        ctx,
        out=out,
        softmax_max=softmax_max,
        softmax_sum=softmax_sum,
        actual_seq_qlen=call.actual_seq_lengths_query,
        actual_seq_kvlen=call.actual_seq_lengths_kv,
        layout=call.layout_query,
        **saved,
    )


def backward(npu: Any, ctx: Any, d_out: Tensor, *_: None) -> dict[str, Tensor]:
    saved = saved_by_name(ctx)
    gradients = npu.npu_sparse_flash_attention_grad(d_out=d_out, **saved)
    names = ("query", "key", "value", "query_rope", "key_rope")
    return {name: grad for name, grad in zip(names, gradients, strict=True) if saved[name] is not None}


def flops(key_products: int = 1, value_products: int = 1, **arguments: Any) -> int:
    """Return the FLOPs of products with the selected keys and values: one for the scores and one for the output."""
    x = Call(**arguments)
    keys = x.query.numel() // x.query.shape[-1] * x.sparse_indices.shape[-1] * x.sparse_block_size  # of all heads
    key_size = x.query.shape[-1] + (shared.rope_size(x.query_rope) or 0)
    value_size = (x.key if x.value is None else x.value).shape[-1]
    return 2 * keys * (key_products * key_size + value_products * value_size)


POWERS_OF_TWO = (1, 2, 4, 8, 16, 32, 64, 128)
SIZES = (
    Limit("query.dtype", lambda call: call.query.dtype, shared.HALVES),
    Limit("the number of heads of query", lambda call: call.query.shape[-2], POWERS_OF_TWO),
    Limit("the number of heads of key", lambda call: call.key.shape[-2], (1,)),
    Limit("the head size of query", lambda call: call.query.shape[-1], (512,)),
    Limit("the head size of query_rope", lambda call: shared.rope_size(call.query_rope), (None, 64)),
)


declare(
    schema="npu::npu_sparse_flash_attention(Tensor query, Tensor key, Tensor? value, Tensor sparse_indices, "
    "float scale_value, *, Tensor? block_table=None, Tensor? actual_seq_lengths_query=None, "
    "Tensor? actual_seq_lengths_kv=None, Tensor? query_rope=None, Tensor? key_rope=None, "
    'int sparse_block_size=1, str layout_query="BSND", str layout_kv="BSND", int sparse_mode=3, '
    "int pre_tokens=9223372036854775807, int next_tokens=9223372036854775807, int attention_mode=0, "
    "bool return_softmax_lse=False, Tensor? sinks=None) -> (Tensor, Tensor, Tensor)",
    reference=reference.npu_sparse_flash_attention,
    fake=fake,
    checks=checks,
    sharding=sharding,
    autograd=Autograd(save, backward),
    limits=(
        *SIZES,
        Limit(
            "sparse_block_size",
            lambda call: 1 if call.sparse_block_size is None else call.sparse_block_size,
            POWERS_OF_TWO,
        ),
        Limit(
            "attention_mode",
            lambda call: MLA_ABSORBED if call.attention_mode is None else call.attention_mode,
            (MLA_ABSORBED,),
        ),
        *shared.contiguous("query", "key", "value", "sparse_indices", "query_rope", "key_rope"),
    ),
    flops=flops,
)


# npu_sparse_flash_attention_grad


def grad_checks(call: Call) -> Iterator[str]:
    yield from shared.check_layouts(layout=call.layout)
    yield from _check_inputs(call, call.layout)
    yield from check_alike("d_out", call.d_out, "query", call.query)
    yield from check_alike("out", call.out, "query", call.query)
    yield from shared.check_statistics(call.query, call.key, **call.pick("softmax_max", "softmax_sum"))
    yield from shared.check_length_tensors(call.layout, call.query, **call.pick("actual_seq_qlen", "actual_seq_kvlen"))
    yield from _check_block_size(call.sparse_block_size)
    yield from shared.check_sparse_mode(call.sparse_mode)


def grad_fake(call: Call) -> tuple[Tensor, ...]:
    inputs = (call.query, call.key, call.value, call.query_rope, call.key_rope)
    return tuple(call.query.new_empty([0] if tensor is None else tensor.shape) for tensor in inputs)


def grad_sharding(call: Call) -> Iterator[Strategy]:
    for dim, statistics_dim, inputs in _shardings(call, call.layout, "actual_seq_qlen", "actual_seq_kvlen"):
        inputs |= {"softmax_max": Shard(statistics_dim), "softmax_sum": Shard(statistics_dim)}
        # every row and every head adds to the gradients of its keys
        of_key: Placement = Shard(0) if "key" in inputs else Partial()
        outputs = [Shard(dim), of_key, of_key, Shard(dim), of_key]
        tensors = (call.query, call.key, call.value, call.query_rope, call.key_rope)
        yield [Replicate() if x is None else output for x, output in zip(tensors, outputs, strict=True)], inputs


declare(
    schema="npu::npu_sparse_flash_attention_grad(Tensor query, Tensor key, Tensor? value, Tensor sparse_indices, "
    "Tensor d_out, Tensor out, Tensor softmax_max, Tensor softmax_sum, float scale_value, int sparse_block_size, "
    "Tensor? query_rope=None, Tensor? key_rope=None, Tensor? actual_seq_qlen=None, "
    'Tensor? actual_seq_kvlen=None, str? layout="BSND", int? sparse_mode=3, '
    "int? pre_tokens=9223372036854775807, int? next_tokens=9223372036854775807, int? attention_mode=0) "
    "-> (Tensor, Tensor, Tensor, Tensor, Tensor)",
    reference=reference.npu_sparse_flash_attention_grad,
    fake=grad_fake,
    checks=grad_checks,
    sharding=grad_sharding,
    limits=(
        *SIZES,
        Limit("top-k", lambda call: call.sparse_indices.shape[-1], shared.TOP_K_OF_GRADIENTS),
        Limit("sparse_indices.dtype", lambda call: call.sparse_indices.dtype, (torch.int32,)),
        Limit(
            "sparse_block_size",
            lambda call: 1 if call.sparse_block_size is None else call.sparse_block_size,
            (1, 8, 16, 32, 64),
        ),
        Limit("the batch size", lambda call: shared.batch_size(call.query, call.actual_seq_qlen), range(1, 257)),
        Limit(
            "the number of queries",
            lambda call: shared.sequence_length(call.query, call.actual_seq_qlen),
            range(1, 131073),
        ),
        Limit(
            "the number of keys", lambda call: shared.sequence_length(call.key, call.actual_seq_kvlen), range(1, 131073)
        ),
    ),
    # the scores, and the gradients of scores, queries, keys and values
    flops=lambda **arguments: flops(3, 2, **arguments),
)
