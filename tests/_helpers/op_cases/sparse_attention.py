"""Calls of the lightning indexer, of sparse attention and of the indexer's loss, with DeepSeek-V3.2's head sizes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from tests._helpers.op_cases import Case

Arguments = Callable[[str], tuple[tuple[Any, ...], dict[str, Any]]]
BF16, F16, F32 = torch.bfloat16, torch.float16, torch.float32
QUERIES, KEYS = 6, 8
"""Tokens of each document."""


def make(
    device: str,
    layout: str,
    dtype: torch.dtype,
    *sizes: tuple[int, ...],
    batch: int = 2,
    queries: int = QUERIES,
    keys: int = KEYS,
) -> list[torch.Tensor]:
    """Return tensors of ``dtype``. A size starts with 0 for the query's tokens and with 1 for the key's."""
    tensors = []
    for of_key, *rest in sizes:
        tokens = keys if of_key else queries
        shape = (batch, tokens, *rest) if layout == "BSND" else (batch * tokens, *rest)
        tensors.append(torch.randn(shape, dtype=dtype, device=device))
    return tensors


def lengths(device: str, layout: str, tokens: int, batch: int = 2) -> torch.Tensor | None:
    """Return the ends of packed documents of ``tokens`` each."""
    if layout != "TND":
        return None
    return torch.arange(tokens, batch * tokens + 1, tokens, dtype=torch.int32, device=device)


def indices(
    device: str, layout: str, top_k: int, heads: int = 1, batch: int = 2, queries: int = QUERIES
) -> torch.Tensor:
    shape = (batch, queries, heads, top_k) if layout == "BSND" else (batch * queries, heads, top_k)
    return torch.zeros(shape, dtype=torch.int32, device=device)


def statistics(device: str, layout: str, heads: int, batch: int = 2, queries: int = QUERIES) -> list[torch.Tensor]:
    shape = (batch, 1, queries, heads) if layout == "BSND" else (1, batch * queries, heads)
    return [torch.ones(shape, dtype=F32, device=device) for _ in range(2)]


def indexer(
    layout: str = "BSND", dtype: torch.dtype = BF16, weights: torch.dtype | None = None, heads: int = 1, **options: Any
) -> Arguments:
    def arguments(device: str) -> tuple[tuple[Any, ...], dict[str, Any]]:
        query, key, w = make(device, layout, dtype, (0, 64, 128), (1, heads, 128), (0, 64))
        call = {"layout_query": layout, "layout_key": layout, "sparse_count": 16}
        call |= {
            "actual_seq_lengths_query": lengths(device, layout, QUERIES),
            "actual_seq_lengths_key": lengths(device, layout, KEYS),
        }
        return (query, key, w.to(weights or dtype)), call | options

    return arguments


def indexer_grad(layout: str = "BSND", dtype: torch.dtype = BF16, **options: Any) -> Arguments:
    def arguments(device: str) -> tuple[tuple[Any, ...], dict[str, Any]]:
        query, key, dy, weights = make(device, layout, dtype, (0, 64, 128), (1, 1, 128), (0, 1, 16), (0, 64))
        call = {"layout": layout}
        call |= {
            "actual_seq_lengths_query": lengths(device, layout, QUERIES),
            "actual_seq_lengths_key": lengths(device, layout, KEYS),
        }
        return (query, key, dy, indices(device, layout, 16), weights), call | options

    return arguments


def attention(
    layout: str = "BSND",
    dtype: torch.dtype = BF16,
    rope: bool = True,
    value: bool = True,
    index_dtype: torch.dtype = torch.int32,
    **options: Any,
) -> Arguments:
    def arguments(device: str) -> tuple[tuple[Any, ...], dict[str, Any]]:
        sizes = ((0, 16, 512), (1, 1, 512), (1, 1, 512), (0, 16, 64), (1, 1, 64))
        query, key, values, query_rope, key_rope = make(device, layout, dtype, *sizes)
        call = {"layout_query": layout, "layout_kv": layout, "attention_mode": 2}
        call |= {
            "actual_seq_lengths_query": lengths(device, layout, QUERIES),
            "actual_seq_lengths_kv": lengths(device, layout, KEYS),
        }
        if rope:
            call |= {"query_rope": query_rope, "key_rope": key_rope}
        chosen = indices(device, layout, 16).to(index_dtype)
        return (query, key, values if value else None, chosen, 0.1), call | options

    return arguments


def attention_grad(
    layout: str = "BSND", dtype: torch.dtype = BF16, rope: bool = True, value: bool = True, **options: Any
) -> Arguments:
    def arguments(device: str) -> tuple[tuple[Any, ...], dict[str, Any]]:
        sizes = ((0, 16, 512), (1, 1, 512), (1, 1, 512), (0, 16, 512), (0, 16, 512), (0, 16, 64), (1, 1, 64))
        query, key, values, d_out, out, query_rope, key_rope = make(device, layout, dtype, *sizes)
        call = {"layout": layout}
        call |= {"actual_seq_qlen": lengths(device, layout, QUERIES), "actual_seq_kvlen": lengths(device, layout, KEYS)}
        if rope:
            call |= {"query_rope": query_rope, "key_rope": key_rope}
        of_forward = (d_out, out, *statistics(device, layout, 16))
        return (query, key, values if value else None, indices(device, layout, 16), *of_forward, 0.1, 1), call | options

    return arguments


def loss(
    layout: str = "BSND",
    dtype: torch.dtype = BF16,
    weights: torch.dtype | None = None,
    rope: bool = True,
    **options: Any,
) -> Arguments:
    def arguments(device: str) -> tuple[tuple[Any, ...], dict[str, Any]]:
        sizes = ((0, 32, 512), (1, 1, 512), (0, 8, 128), (1, 1, 128), (0, 8), (0, 32, 64), (1, 1, 64))
        query, key, query_index, key_index, w, query_rope, key_rope = make(device, layout, dtype, *sizes)
        call = document_ends(layout) | ({"query_rope": query_rope, "key_rope": key_rope} if rope else {})
        of_forward = (indices(device, layout, 16), *statistics(device, layout, 32))
        return (query, key, query_index, key_index, w.to(weights or dtype), *of_forward, 0.1), call | options

    return arguments


def index_inputs(device: str, layout: str, dtype: torch.dtype, weights: torch.dtype | None) -> list[torch.Tensor]:
    query_index, key_index, w = make(device, layout, dtype, (0, 8, 128), (1, 1, 128), (0, 8))
    return [query_index, key_index, w.to(weights or dtype)]


def document_ends(layout: str) -> dict[str, Any]:
    return {"layout": layout} | ({"actual_seq_qlen": [5, 12], "actual_seq_klen": [9, 16]} if layout == "TND" else {})


def dense_statistics(
    layout: str = "BSND", dtype: torch.dtype = BF16, weights: torch.dtype | None = None, **options: Any
) -> Arguments:
    def arguments(device: str) -> tuple[tuple[Any, ...], dict[str, Any]]:
        return tuple(index_inputs(device, layout, dtype, weights)), document_ends(layout) | options

    return arguments


def dense_loss(
    layout: str = "BSND",
    dtype: torch.dtype = BF16,
    weights: torch.dtype | None = None,
    rope: bool = True,
    **options: Any,
) -> Arguments:
    def arguments(device: str) -> tuple[tuple[Any, ...], dict[str, Any]]:
        sizes = ((0, 32, 128), (1, 32, 128), (0, 32, 64), (1, 32, 64))
        query, key, query_rope, key_rope = make(device, layout, dtype, *sizes)
        shape: tuple[int, ...] = (2, 32, QUERIES, 1) if layout == "BSND" else (32, 2 * QUERIES, 1)
        index_shape = (2, 1, QUERIES) if layout == "BSND" else (1, 2 * QUERIES)
        of_softmax = [torch.ones(s, dtype=F32, device=device) for s in (shape, shape, index_shape, index_shape)]
        call = document_ends(layout) | ({"query_rope": query_rope, "key_rope": key_rope} if rope else {})
        return (query, key, *index_inputs(device, layout, dtype, weights), *of_softmax, 0.1), call | options

    return arguments


def replace(build: Arguments, position: int, change: Callable[[torch.Tensor], Any]) -> Arguments:
    """Return the call with one positional argument changed."""

    def arguments(device: str) -> tuple[tuple[Any, ...], dict[str, Any]]:
        args, kwargs = build(device)
        return (*args[:position], change(args[position]), *args[position + 1 :]), kwargs

    return arguments


INDEXER, INDEXER_GRAD = "npu_lightning_indexer", "npu_lightning_indexer_grad"
ATTENTION, ATTENTION_GRAD = "npu_sparse_flash_attention", "npu_sparse_flash_attention_grad"
LOSS = "npu_sparse_lightning_indexer_grad_kl_loss"
DENSE_STATISTICS, DENSE_LOSS = "npu_dense_lightning_indexer_softmax_lse", "npu_dense_lightning_indexer_grad_kl_loss"

CASES = [
    Case(INDEXER, "BSND", indexer(), forward_only=True),
    Case(INDEXER, "BSND, scores too", indexer(return_value=True)),
    Case(INDEXER, "TND", indexer("TND"), forward_only=True),
    Case(INDEXER, "TND, scores too", indexer("TND", return_value=True)),
    Case(INDEXER, "float16, sees every key", indexer(dtype=F16, sparse_mode=0, return_value=True)),
    Case(INDEXER, "float32", indexer(dtype=F32, return_value=True)),
    Case(INDEXER, "weights in float32", indexer(weights=F32, return_value=True)),
    Case(INDEXER, "two key heads", indexer(heads=2, return_value=True)),
    Case(INDEXER, "two key heads, TND", indexer("TND", heads=2, return_value=True)),
    Case(INDEXER, "defaults", lambda device: (indexer()(device)[0], {}), forward_only=True),
    Case(INDEXER, "no query", replace(indexer(), 0, lambda t: t[:0]), "torch_npu"),
    Case(INDEXER, "no key", replace(indexer(), 1, lambda t: t[:, :0]), "torch_npu"),
    Case(INDEXER, "sparse_count 0", indexer(sparse_count=0), "torch_npu"),
    Case(INDEXER, "sparse_count -1", indexer(sparse_count=-1), "torch_npu"),
    Case(INDEXER, "unknown layout_query", indexer(layout_query="BNSD"), "us"),
    Case(INDEXER, "unknown layout_key", indexer(layout_key="BNSD"), "us"),
    Case(INDEXER, "paged keys", indexer(layout_key="PA_BSND"), "us"),
    Case(INDEXER, "sparse_mode 1", indexer(sparse_mode=1), "us"),
    Case(INDEXER, "a window", indexer(pre_tokens=65536), "us"),
    Case(INDEXER, "weights of the wrong heads", replace(indexer(), 2, lambda t: t[..., :63]), "us"),
    Case(INDEXER, "key of another head size", replace(indexer(), 1, lambda t: t[..., :64]), "us"),
    Case(INDEXER, "TND without lengths", indexer("TND", actual_seq_lengths_query=None), "us"),
    Case(INDEXER_GRAD, "BSND", indexer_grad()),
    Case(INDEXER_GRAD, "TND", indexer_grad("TND")),
    Case(INDEXER_GRAD, "float16, sees every key", indexer_grad(dtype=F16, sparse_mode=0)),
    Case(INDEXER_GRAD, "float32", indexer_grad(dtype=F32)),
    Case(INDEXER_GRAD, "query not contiguous", replace(indexer_grad(), 0, lambda t: t.mT.contiguous().mT)),
    Case(INDEXER_GRAD, "unknown layout", indexer_grad(layout="BNSD"), "us"),
    Case(INDEXER_GRAD, "without scores", replace(indexer_grad(), 2, lambda t: t.new_empty(0)), "us"),
    Case(ATTENTION, "BSND", attention(), forward_only=True),
    Case(ATTENTION, "BSND, statistics", attention(return_softmax_lse=True)),
    Case(ATTENTION, "TND", attention("TND"), forward_only=True),
    Case(ATTENTION, "TND, statistics", attention("TND", return_softmax_lse=True)),
    Case(ATTENTION, "float16, sees every key", attention(dtype=F16, sparse_mode=0, return_softmax_lse=True)),
    Case(ATTENTION, "float32", attention(dtype=F32, return_softmax_lse=True)),
    Case(ATTENTION, "without rope", attention(rope=False, return_softmax_lse=True)),
    Case(ATTENTION, "without value", attention(value=False, return_softmax_lse=True)),
    Case(
        ATTENTION,
        "query not contiguous",
        replace(attention(return_softmax_lse=True), 0, lambda t: t.mT.contiguous().mT),
    ),
    Case(ATTENTION, "no query", replace(attention(), 0, lambda t: t[:0]), "torch_npu"),
    Case(ATTENTION, "no key", replace(attention(), 1, lambda t: t[:, :0]), "torch_npu"),
    Case(ATTENTION, "no value", replace(attention(), 2, lambda t: t[:, :0]), "torch_npu"),
    Case(ATTENTION, "no index", replace(attention(), 3, lambda t: t[..., :0]), "torch_npu"),
    Case(ATTENTION, "query of three dimensions", replace(attention(), 0, lambda t: t[0]), "torch_npu"),
    Case(ATTENTION, "query of four dimensions", replace(attention("TND"), 0, lambda t: t[None]), "torch_npu"),
    Case(ATTENTION, "unknown layout_query", attention(layout_query="BNSD"), "torch_npu"),
    Case(ATTENTION, "unknown layout_kv", attention(layout_kv="BNSD"), "us"),
    Case(ATTENTION, "sparse_mode 1", attention(sparse_mode=1), "us"),
    Case(ATTENTION, "attention_mode 0, the default", attention(attention_mode=0), "us"),
    Case(ATTENTION, "blocks of keys", attention(sparse_block_size=16), "us"),
    Case(ATTENTION, "half a rope", attention(key_rope=None), "us"),
    Case(ATTENTION, "indices in int64", attention(index_dtype=torch.int64), "us"),
    Case(ATTENTION_GRAD, "BSND", attention_grad()),
    Case(ATTENTION_GRAD, "TND", attention_grad("TND")),
    Case(ATTENTION_GRAD, "float16, sees every key", attention_grad(dtype=F16, sparse_mode=0)),
    Case(ATTENTION_GRAD, "without rope", attention_grad(rope=False)),
    Case(ATTENTION_GRAD, "without value", attention_grad(value=False)),
    Case(ATTENTION_GRAD, "query not contiguous", replace(attention_grad(), 0, lambda t: t.mT.contiguous().mT)),
    Case(ATTENTION_GRAD, "without statistics", replace(attention_grad(), 6, lambda t: t.new_empty(0)), "us"),
    Case(ATTENTION_GRAD, "unknown layout", attention_grad(layout="BNSD"), "us"),
    Case(LOSS, "BSND", loss()),
    Case(LOSS, "TND", loss("TND")),
    Case(LOSS, "float16", loss(dtype=F16)),
    Case(LOSS, "weights in float32", loss(weights=F32)),
    Case(LOSS, "without rope", loss(rope=False)),
    Case(LOSS, "a window, which sparse_mode 3 does not look at", loss(pre_tokens=65536, next_tokens=65536)),
    Case(LOSS, "unknown layout", loss(layout="BNSD"), "us"),
    Case(LOSS, "sees every key", loss(sparse_mode=0), "us"),
    Case(LOSS, "two key heads", replace(loss(), 3, lambda t: t.repeat(1, 1, 2, 1)), "us"),
    Case(LOSS, "TND without lengths", loss("TND", actual_seq_qlen=None), "us"),
    Case(LOSS, "lengths that do not end at the last token", loss("TND", actual_seq_klen=[9, 15]), "us"),
    Case(DENSE_STATISTICS, "BSND", dense_statistics()),
    Case(DENSE_STATISTICS, "TND", dense_statistics("TND")),
    Case(DENSE_STATISTICS, "float16, weights in float32", dense_statistics(dtype=F16, weights=F32)),
    Case(DENSE_STATISTICS, "sees every key", dense_statistics(sparse_mode=0), "us"),
    Case(DENSE_STATISTICS, "two key heads", replace(dense_statistics(), 1, lambda t: t.repeat(1, 1, 2, 1)), "us"),
    Case(DENSE_STATISTICS, "TND without lengths", dense_statistics("TND", actual_seq_qlen=None), "us"),
    Case(DENSE_LOSS, "BSND", dense_loss()),
    Case(DENSE_LOSS, "TND", dense_loss("TND")),
    Case(DENSE_LOSS, "float16, weights in float32", dense_loss(dtype=F16, weights=F32)),
    Case(DENSE_LOSS, "without rope", dense_loss(rope=False)),
    Case(DENSE_LOSS, "one key head", replace(dense_loss(), 1, lambda t: t[:, :, :1]), "us"),
    Case(DENSE_LOSS, "statistics of eight copies", replace(dense_loss(), 5, lambda t: t.repeat(1, 1, 1, 8)), "us"),
    Case(DENSE_LOSS, "statistics of another indexer", replace(dense_loss(), 7, lambda t: t[..., :-1]), "us"),
    Case(DENSE_LOSS, "sees every key", dense_loss(sparse_mode=0), "us"),
    Case(DENSE_LOSS, "half a rope", dense_loss(key_rope=None), "us"),
]
