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
from torchtitan_npu.ops.core.dtypes import compute_dtype
from torchtitan_npu.ops.core.op import Limit, declare
from torchtitan_npu.ops.core.sharding import Strategy
from torchtitan_npu.ops.sparse_flash_attention import checks as shared
from torchtitan_npu.ops.sparse_flash_attention.selected_keys import (
    SelectedKeys,
    documents,
    heads_of,
    with_zero_row,
    without_zero_row,
)


def npu_lightning_indexer(
    query: Tensor,
    key: Tensor,
    weights: Tensor,
    actual_seq_lengths_query: Tensor | None,
    actual_seq_lengths_key: Tensor | None,
    layout_query: str,
    sparse_count: int,
    sparse_mode: int,
    return_value: bool,
    **_: object,
) -> tuple[Tensor, Tensor]:
    r"""Select the ``sparse_count`` keys s with the highest scores for each query row t.

    .. math:: I_{t,s} = \sum_h w_{t,h} \, \mathrm{ReLU}(q_{t,h} \cdot k_s)

    ``query`` (B, S1, N1, D), ``key`` (B, S2, N2, D), ``weights`` (B, S1, N1); or (T1, N1, D), (T2, N2, D), (T1, N1).
    Returns the indices of the keys, int32 (B, S1, N2, sparse_count) or (T1, N2, sparse_count), and their scores in the
    dtype of ``query``, or an empty tensor without ``return_value``. Indices count from the start of the document. The
    highest score comes first, and the lower index among equal scores. A row with fewer keys ends in indices of -1 and
    scores of -inf.
    """
    key_heads = key.shape[-2]
    shape = (*query.shape[:-2], key_heads, sparse_count)
    indices = torch.full(shape, -1, dtype=torch.int32, device=query.device)
    values = torch.full(shape if return_value else (0,), -torch.inf, dtype=query.dtype, device=query.device)
    for document in documents(layout_query, sparse_mode, query, key, actual_seq_lengths_query, actual_seq_lengths_key):
        keys = key[document.key_index].to(compute_dtype(key))
        count = min(sparse_count, len(keys))
        positions = torch.arange(len(keys), device=query.device)
        for rows in document.rows(query.shape[-2] * len(keys), query.device):
            q, w = heads_of(query[rows.index], key_heads), heads_of(weights[rows.index], key_heads)
            logits = torch.einsum("rngd,snd->rngs", q, keys).relu_()
            scores = torch.einsum("rng,rngs->rns", w.to(logits.dtype), logits)
            scores.masked_fill_(positions >= rows.visible, -torch.inf)
            best, order = (t[..., :count] for t in scores.sort(dim=-1, descending=True, stable=True))
            indices[rows.index][..., :count] = order.to(torch.int32).masked_fill_(positions[:count] >= rows.visible, -1)
            if return_value:
                values[rows.index][..., :count] = best
    return indices, values


def npu_lightning_indexer_grad(
    query: Tensor,
    key: Tensor,
    dy: Tensor,
    sparse_indices: Tensor,
    weights: Tensor,
    actual_seq_lengths_query: Tensor | None,
    actual_seq_lengths_key: Tensor | None,
    layout: str,
    sparse_mode: int,
    **_: object,
) -> tuple[Tensor, Tensor, Tensor]:
    r"""Return the gradients of the selected scores with respect to ``query``, ``key`` and ``weights``.

    With :math:`S_h = q_h \cdot k_{selected}` and ``dy`` the gradient of the scores, in the shape of ``sparse_indices``:

    .. math::
        dw_h = \sum_s dy_s \, \mathrm{ReLU}(S_{h,s}), \qquad dS_{h,s} = dy_s \, w_h \, [S_{h,s} > 0], \qquad
        dq_h = \sum_s dS_{h,s} \, k_s, \qquad dk_s = \sum_{t,h} dS_{h,s} \, q_h

    The gradients have the shapes and dtypes of their arguments.
    """
    key_heads = key.shape[-2]
    d_query, d_key, d_weights = (torch.zeros(t.shape, dtype=t.dtype, device=t.device) for t in (query, key, weights))
    for document in documents(layout, sparse_mode, query, key, actual_seq_lengths_query, actual_seq_lengths_key):
        keys = with_zero_row(key[document.key_index])
        d_keys = torch.zeros_like(keys)
        elements = sparse_indices.shape[-2] * sparse_indices.shape[-1] * indexer_elements(query)
        for rows in document.rows(elements, query.device):
            selected = SelectedKeys(sparse_indices[rows.index], rows.visible, len(document.keys))
            d_scores = dy[rows.index][..., : selected.indices.shape[-1]]
            gradient = d_scores.to(keys.dtype).masked_fill(~selected.valid, 0)
            dq, dw = indexer_gradients(
                gradient,
                heads_of(query[rows.index], key_heads),
                heads_of(weights[rows.index], key_heads),
                selected.gather(keys),
                selected,
                d_keys,
            )
            d_query[rows.index], d_weights[rows.index] = dq.flatten(1, 2), dw.flatten(1, 2)
        d_key[document.key_index] = without_zero_row(d_keys).to(d_key.dtype)
    return d_query, d_key, d_weights


def indexer_elements(query_index: Tensor) -> int:
    """Return the elements that one selected key of one row needs: features, scores, and the gradients of both."""
    heads, size = query_index.shape[-2:]
    return 2 * (heads + size)


def indexer_gradients(
    gradient: Tensor, q: Tensor, w: Tensor, k: Tensor, selected: SelectedKeys, d_keys: Tensor
) -> tuple[Tensor, Tensor]:
    """Return the gradients of ``q`` (r, n, g, d) and ``w`` (r, n, g) from that of the scores, (r, n, entries).

    Adds the gradients of the selected keys ``k`` (r, n, entries, d) to ``d_keys``.
    """
    # zero at entries without a key, also in a padding row, which may hold any value
    logits = torch.einsum("rngd,rnsd->rngs", q, k).masked_fill_(~selected.valid[:, :, None], 0)
    dw = torch.einsum("rns,rngs->rng", gradient, logits.relu())
    d_logits = torch.where(logits > 0, gradient[:, :, None] * w.to(q.dtype)[..., None], 0)
    selected.scatter_add_(d_keys, torch.einsum("rngs,rngd->rnsd", d_logits, q))
    return torch.einsum("rngs,rnsd->rngd", d_logits, k), dw


LENGTHS = ("actual_seq_lengths_query", "actual_seq_lengths_key")


def checks(call: Call) -> Iterator[str]:
    yield from shared.check_layouts(**call.pick("layout_query", "layout_key"))
    yield from shared.check_absent("paged keys are for inference", block_table=call.block_table)
    yield from shared.check_tokens(call.layout_query, "query", call.query, "key", call.key)
    yield from shared.check_weights(call.weights, "query", call.query)
    yield from shared.check_length_tensors(call.layout_query, call.query, **call.pick(*LENGTHS))
    if call.sparse_count <= 0:
        yield f"sparse_count must be at least 1, not {call.sparse_count}"
    yield from shared.check_sparse_mode(call.sparse_mode)
    yield from shared.check_no_window(**call.pick("pre_tokens", "next_tokens"))


def fake(call: Call) -> tuple[Tensor, Tensor]:
    shape = [*call.query.shape[:-2], call.key.shape[-2], call.sparse_count]
    return call.query.new_empty(shape, dtype=torch.int32), call.query.new_empty(shape if call.return_value else [0])


def sharding(call: Call) -> Iterator[Strategy]:
    """Shard the batch, or the query rows if a row's keys do not depend on its position.

    The heads cannot be sharded: a score sums over all heads before the selection.
    """
    if call.layout_query != "BSND":
        return
    dims = {0: ["query", "weights", "key", *LENGTHS]}
    if call.sparse_mode == 0 and call.actual_seq_lengths_query is None:
        dims[1] = ["query", "weights"]
    for dim, names in dims.items():
        yield [Shard(dim), Shard(dim) if call.return_value else Replicate()], dict.fromkeys(names, Shard(dim))


def save(ctx: Any, output: tuple[Tensor, Tensor], call: Call) -> None:
    ctx.mark_non_differentiable(output[0])
    passed = call.pick("query", "key", "weights", *LENGTHS, "sparse_mode", "pre_tokens", "next_tokens")
    save_by_name(ctx, sparse_indices=output[0], layout=call.layout_query, **passed)


def backward(npu: Any, ctx: Any, _: None, dy: Tensor) -> dict[str, Tensor]:
    gradients = npu.npu_lightning_indexer_grad(dy=dy, **saved_by_name(ctx))
    return dict(zip(("query", "key", "weights"), gradients, strict=True))


def flops(query: Tensor, key: Tensor, layout_key: str, **_: Any) -> int:
    """Return the FLOPs of the scores of all keys."""
    return 2 * query.numel() * key.shape[layout_key.index("T" if "T" in layout_key else "S")]


def grad_flops(query: Tensor, sparse_indices: Tensor, **_: Any) -> int:
    """Return the FLOPs of the selected scores, and of the gradients of queries and keys."""
    return 6 * query.numel() * sparse_indices.shape[-1]


SELECTED = Limit(
    "sparse_count", lambda call: call.sparse_count, shared.AnyOf((range(1, 2049), *range(3072, 8193, 1024)))
)
SIZES = (
    Limit("query.dtype", lambda call: call.query.dtype, shared.HALVES),
    Limit("the head size of query", lambda call: call.query.shape[-1], (128,)),
    Limit("the number of heads of key", lambda call: call.key.shape[-2], (1,)),
)

declare(
    schema="npu::npu_lightning_indexer(Tensor query, Tensor key, Tensor weights, *, "
    "Tensor? actual_seq_lengths_query=None, Tensor? actual_seq_lengths_key=None, Tensor? block_table=None, "
    'str layout_query="BSND", str layout_key="BSND", int sparse_count=2048, int sparse_mode=3, '
    "int pre_tokens=9223372036854775807, int next_tokens=9223372036854775807, bool return_value=False) "
    "-> (Tensor, Tensor)",
    reference=npu_lightning_indexer,
    fake=fake,
    checks=checks,
    sharding=sharding,
    autograd=Autograd(save, backward),
    limits=(
        *SIZES,
        Limit("the number of heads of query", lambda call: call.query.shape[-2], range(1, 65)),
        SELECTED,
        Limit("weights.dtype", lambda call: call.weights.dtype, (*shared.HALVES, torch.float32)),
        *shared.contiguous("query", "key", "weights"),
    ),
    flops=flops,
)


def grad_checks(call: Call) -> Iterator[str]:
    yield from shared.check_layouts(layout=call.layout)
    yield from shared.check_tokens(call.layout, "query", call.query, "key", call.key)
    yield from shared.check_weights(call.weights, "query", call.query)
    yield from shared.check_indices(call.sparse_indices, call.query, call.key)
    dy, shape, dtype = call.dy, call.sparse_indices.shape, call.query.dtype
    if (dy.shape, dy.dtype) != (shape, dtype):
        yield (
            f"dy must have the shape of sparse_indices, {tuple(shape)}, and the dtype of query, {dtype}, not "
            f"{tuple(dy.shape)} and {dy.dtype}: the scores come with return_value=True"
        )
    yield from shared.check_length_tensors(call.layout, call.query, **call.pick(*LENGTHS))
    yield from shared.check_sparse_mode(call.sparse_mode)


def grad_sharding(call: Call) -> Iterator[Strategy]:
    if call.layout != "BSND":
        return
    rows = ("query", "dy", "sparse_indices", "weights")
    yield [Shard(0), Shard(0), Shard(0)], dict.fromkeys((*rows, "key", *LENGTHS), Shard(0))
    if call.sparse_mode == 0 and call.actual_seq_lengths_query is None:
        # every row adds to the gradients of its keys
        yield [Shard(1), Partial(), Shard(1)], dict.fromkeys(rows, Shard(1))


declare(
    schema="npu::npu_lightning_indexer_grad(Tensor query, Tensor key, Tensor dy, Tensor sparse_indices, "
    "Tensor weights, Tensor? actual_seq_lengths_query=None, Tensor? actual_seq_lengths_key=None, "
    'str? layout="BSND", int? sparse_mode=3, int? pre_tokens=9223372036854775807, '
    "int? next_tokens=9223372036854775807) -> (Tensor, Tensor, Tensor)",
    reference=npu_lightning_indexer_grad,
    fake=lambda call: tuple(x.new_empty(x.shape) for x in (call.query, call.key, call.weights)),
    checks=grad_checks,
    sharding=grad_sharding,
    limits=(
        *SIZES,
        Limit("the number of heads of query", lambda call: call.query.shape[-2], range(1, 65)),
        Limit("top-k", lambda call: call.sparse_indices.shape[-1], (2048,)),
        Limit("sparse_indices.dtype", lambda call: call.sparse_indices.dtype, (torch.int32,)),
        Limit(
            "the batch size", lambda call: shared.batch_size(call.query, call.actual_seq_lengths_query), range(1, 1025)
        ),
        Limit(
            "the number of queries",
            lambda call: shared.sequence_length(call.query, call.actual_seq_lengths_query),
            range(1, 131073),
        ),
    ),
    flops=grad_flops,
)
