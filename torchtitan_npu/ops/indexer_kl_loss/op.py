"""``npu_sparse_lightning_indexer_grad_kl_loss``: the indexer's loss and gradients in one operator, without autograd.

To train with it, call :func:`with_indexer_loss`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor
from torch.distributed.tensor import Partial, Shard

from torchtitan_npu.ops.core.arguments import Call
from torchtitan_npu.ops.core.dtypes import compute_dtype
from torchtitan_npu.ops.core.op import Limit, declare
from torchtitan_npu.ops.core.run_backward_once import gradients_once
from torchtitan_npu.ops.core.sharding import Strategy
from torchtitan_npu.ops.indexer_kl_loss import reference
from torchtitan_npu.ops.sparse_flash_attention import checks as shared


def checks(x: Call) -> Iterator[str]:
    yield from check_inputs(x)
    yield from shared.check_absent("torch_npu does not document it", sinks=x.sinks)
    if x.key.shape[-2] != 1:
        yield f"key must have one head, not {x.key.shape[-2]}"
    yield from shared.check_indices(x.sparse_indices, x.query, x.key)


def check_inputs(x: Call) -> Iterator[str]:
    """Check the arguments that the sparse and the dense loss have in common."""
    yield from shared.check_layouts(layout=x.layout)
    yield from shared.check_tokens(x.layout, "query", x.query, "key", x.key)
    yield from shared.check_tokens(x.layout, "query_index", x.query_index, "key_index", x.key_index)
    for name, tensor, other_name, other in (
        ("query_index", x.query_index, "query", x.query),
        ("key_index", x.key_index, "key", x.key),
    ):
        if tensor.shape[:-2] != other.shape[:-2] or tensor.dtype != other.dtype:
            yield (
                f"{name} must have the tokens and dtype of {other_name}, {tuple(other.shape[:-2])} and {other.dtype}, "
                f"not {tuple(tensor.shape[:-2])} and {tensor.dtype}"
            )
    yield from check_indexer(x)
    yield from shared.check_statistics(x.query, x.key, **x.pick("softmax_max", "softmax_sum"))
    yield from shared.check_ropes(x.query, x.key, x.query_rope, x.key_rope)
    yield from shared.check_length_lists(x.layout, x.query, x.key, **x.pick("actual_seq_qlen", "actual_seq_klen"))
    yield from shared.check_sparse_mode(x.sparse_mode, (3,))


def check_indexer(x: Call) -> Iterator[str]:
    """Check the indexer's keys and weights."""
    if x.key_index.shape[-2] != 1:
        yield f"key_index must have one head, not {x.key_index.shape[-2]}"
    yield from shared.check_weights(x.weights, "query_index", x.query_index)


def fake(call: Call) -> tuple[Tensor, ...]:
    gradients = (tensor.new_empty(tensor.shape) for tensor in (call.query_index, call.key_index, call.weights))
    return *gradients, call.query.new_empty([1], dtype=compute_dtype(call.query))


def sharding(call: Call) -> Iterator[Strategy]:
    """Shard the batch.

    The heads cannot be sharded: both distributions of the loss are sums over all heads. Neither can the rows of a
    sequence: the causal boundary of sparse_mode 3, the only mode, starts at the last row of a rank.
    """
    if call.layout == "BSND":
        yield [Shard(0), Shard(0), Shard(0), Partial()], {name: Shard(0) for name in vars(call)}


def flops(keys: int, query: Tensor, query_rope: Tensor | None, query_index: Tensor, **_: Any) -> int:
    """Return the FLOPs of both scores of ``keys`` keys per row, and of the gradients of the indexer's query and key."""
    attention = query.numel() + (0 if query_rope is None else query_rope.numel())
    return 2 * keys * (attention + 3 * query_index.numel())


MAX_QUERIES = 8192
"""The most queries of a document in one call: documented for CANN 9.0 and 9.1, and not checked by CANN.

Documents: ops-transformer, attention/sparse_lightning_indexer_grad_kl_loss/docs, at v9.0.0 and 9.1.0. For more queries,
call :func:`loss_in_chunks`.
"""
INDEX_LIMITS = (
    Limit("weights.dtype", lambda call: call.weights.dtype, (*shared.HALVES, torch.float32)),
    Limit("the number of heads of query_index", lambda call: call.query_index.shape[-2], (8, 16, 32, 64)),
    Limit("the head size of query_index", lambda call: call.query_index.shape[-1], (128,)),
    Limit(
        "the batch size",
        lambda call: shared.batch_size(call.query_index, call.actual_seq_qlen),
        range(1, shared.MAX_DOCUMENTS + 1),
    ),
    Limit(
        "the number of keys",
        lambda call: shared.longest(call.key_index, call.actual_seq_klen),
        shared.SEQUENCE_LENGTHS,
    ),
    Limit("sparse_mode", lambda call: 3 if call.sparse_mode is None else call.sparse_mode, (3,)),
)

declare(
    schema="npu::npu_sparse_lightning_indexer_grad_kl_loss(Tensor query, Tensor key, Tensor query_index, "
    "Tensor key_index, Tensor weights, Tensor sparse_indices, Tensor softmax_max, Tensor softmax_sum, "
    "float scale_value, *, Tensor? query_rope=None, Tensor? key_rope=None, SymInt[]? actual_seq_qlen=None, "
    'SymInt[]? actual_seq_klen=None, str? layout="BSND", int? sparse_mode=3, '
    "int? pre_tokens=9223372036854775807, int? next_tokens=9223372036854775807, Tensor? sinks=None) "
    "-> (Tensor, Tensor, Tensor, Tensor)",
    reference=reference.npu_sparse_lightning_indexer_grad_kl_loss,
    fake=fake,
    checks=checks,
    sharding=sharding,
    limits=(
        Limit("query.dtype", lambda call: call.query.dtype, shared.HALVES),
        Limit("the number of heads of query", lambda call: call.query.shape[-2], (32, 64, 128)),
        Limit("the head size of query", lambda call: call.query.shape[-1], (512,)),
        Limit("the head size of query_rope", lambda call: shared.rope_size(call.query_rope), (None, 64)),
        Limit("top-k", lambda call: call.sparse_indices.shape[-1], shared.TOP_K_OF_GRADIENTS),
        Limit(
            "the number of queries",
            lambda call: shared.longest(call.query, call.actual_seq_qlen),
            range(1, MAX_QUERIES + 1),
        ),
        *INDEX_LIMITS,
    ),
    flops=lambda sparse_indices, **arguments: flops(sparse_indices.shape[-1], **arguments),
)


# training

TRAINED = ("query_index", "key_index", "weights")


class LossScale(Protocol):
    """The weight of a loss in the total, and the sum of its values."""

    def scale(self) -> Tensor:
        """Return the factor of the loss's gradients."""

    def count(self, loss: Tensor) -> None:
        """Add a value of the loss to the sum."""


Loss = Callable[..., Sequence[Tensor]]
"""Returns the gradients of :data:`TRAINED` and the loss (1,). Takes the arguments by name."""


def with_indexer_loss(output: Tensor, aux_loss: LossScale, loss: Loss, **arguments: Any) -> Tensor:
    """Return ``output``. Its backward pass computes the indexer's loss and its gradients, exactly once.

    The loss is the sum over tokens of the KL divergence of the indexer's distribution over the attended keys from
    attention's. ``output`` is the result of attention. ``loss`` computes the loss and its gradients from ``arguments``:
    :func:`loss_in_chunks` for selected keys. ``query_index``, ``key_index``
    and ``weights`` get gradients. The loss does not train attention: its tensors get none.
    """
    tensors = {name: value for name, value in arguments.items() if isinstance(value, Tensor)}
    options = {name: value for name, value in arguments.items() if name not in tensors}
    return _IndexerLoss.apply(output, aux_loss, loss, options, tuple(tensors), *tensors.values())


class _IndexerLoss(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        output: Tensor,
        aux_loss: LossScale,
        loss: Loss,
        options: dict[str, Any],
        names: tuple[str, ...],
        *tensors: Tensor,
    ) -> Tensor:
        ctx.aux_loss, ctx.loss, ctx.options, ctx.names = aux_loss, loss, options, names
        ctx.save_for_backward(*tensors)
        return output.view_as(output)

    @staticmethod
    def backward(ctx: Any, output_grad: Tensor) -> tuple[Tensor | None, ...]:
        def compute(*tensors: Tensor) -> list[Tensor]:
            by_name = dict(zip(ctx.names, tensors, strict=True))
            scale = ctx.aux_loss.scale().expand(1)
            *gradients, loss = ctx.loss(**by_name, **ctx.options)
            ctx.aux_loss.count(loss.squeeze(0))
            # in the wider dtype: rounding the scale to bfloat16 first would bias all gradients alike
            return [
                (gradient * scale).to(by_name[name].dtype) for name, gradient in zip(TRAINED, gradients, strict=True)
            ]

        # among the tensor inputs, output comes first
        gradients = gradients_once(ctx, [1 + ctx.names.index(name) for name in TRAINED], compute)
        by_name = dict(zip(TRAINED, gradients, strict=True))
        return output_grad, None, None, None, None, *(by_name.get(name) for name in ctx.names)


# more queries than the NPU kernel takes in one call

QUERY_INPUTS = ("query", "query_index", "weights", "sparse_indices", "query_rope")
KEY_INPUTS = ("key", "key_index", "key_rope")
STATISTICS = ("softmax_max", "softmax_sum")


class QueryChunk(NamedTuple):
    """Neighbouring queries, and the keys that they may attend to."""

    queries: slice
    keys: slice
    ends: dict[str, list[int]]
    """The ends of the packed documents in the chunk, as the operator takes them. Empty for the layout BSND."""


def loss_in_chunks(**arguments: Any) -> list[Tensor]:
    """Return the gradients of ``query_index``, ``key_index`` and ``weights``, and the loss (1,).

    The arguments are those of the operator. A key gets gradients from several chunks, which are summed in float32, in
    the order of the chunks; with more than one chunk, its gradient stays in float32. There must not be more queries
    than keys in a document, which CANN requires too.
    """
    loss = torch.ops.npu.npu_sparse_lightning_indexer_grad_kl_loss
    chunks = list(chunks_of(**arguments))
    if len(chunks) == 1:
        return list(loss(**arguments))
    token_dim = 1 if arguments["layout"] == "BSND" else 0
    key_index = arguments["key_index"]
    d_key = torch.zeros_like(key_index, dtype=torch.promote_types(key_index.dtype, torch.float32))
    by_query: list[tuple[Tensor, Tensor]] = []
    losses = []
    for chunk in chunks:
        d_query, d_chunk, d_weights, value = loss(**part_of(arguments, chunk))
        by_query.append((d_query, d_weights))
        losses.append(value)
        d_key.narrow(token_dim, chunk.keys.start, d_chunk.shape[token_dim]).add_(d_chunk)
    d_query, d_weights = (torch.cat(parts, token_dim) for parts in zip(*by_query, strict=True))
    return [d_query, d_key, d_weights, torch.stack(losses).sum(0)]


def chunks_of(
    query: Tensor,
    key: Tensor,
    layout: str,
    actual_seq_qlen: Sequence[int] | None = None,
    actual_seq_klen: Sequence[int] | None = None,
    **_: Any,
) -> Iterator[QueryChunk]:
    """Yield chunks of at most :data:`MAX_QUERIES` queries: of every batch row, or of all packed documents together."""
    if layout == "BSND":
        queries, keys = query.shape[1], key.shape[1]
        for first in range(0, queries, MAX_QUERIES):
            last = min(first + MAX_QUERIES, queries)
            yield QueryChunk(slice(first, last), slice(0, max(0, keys - queries + last)), {})
        return
    assert actual_seq_qlen is not None and actual_seq_klen is not None
    ends = list(zip(actual_seq_qlen, actual_seq_klen, strict=True))
    documents = list(zip([(0, 0), *ends], ends, strict=False))
    for first in range(0, query.shape[0], MAX_QUERIES):
        last = min(first + MAX_QUERIES, query.shape[0])
        cu_seqlens_q, cu_seqlens_k, start = [], [], None
        for (query_start, key_start), (query_end, key_end) in documents:
            if first <= query_start < last or query_start < first < query_end:
                start = key_start if start is None else start
                stop = min(query_end, last)
                cu_seqlens_q.append(stop - first)
                cu_seqlens_k.append(key_end - (query_end - stop) - start)
        assert start is not None
        lengths = {"actual_seq_qlen": cu_seqlens_q, "actual_seq_klen": cu_seqlens_k}
        yield QueryChunk(slice(first, last), slice(start, start + cu_seqlens_k[-1]), lengths)


def part_of(arguments: dict[str, Any], chunk: QueryChunk) -> dict[str, Any]:
    """Return the arguments for one chunk. An NPU needs contiguous tensors."""
    token_dim = 1 if arguments["layout"] == "BSND" else 0
    slices_of = {
        **dict.fromkeys(QUERY_INPUTS, (token_dim, chunk.queries)),
        **dict.fromkeys(KEY_INPUTS, (token_dim, chunk.keys)),
        **dict.fromkeys(STATISTICS, (-2, chunk.queries)),
    }
    part = {**arguments, **chunk.ends}
    for name, (dim, tokens) in slices_of.items():
        if part.get(name) is not None:
            part[name] = part[name].narrow(dim, tokens.start, tokens.stop - tokens.start).contiguous()
    return part
