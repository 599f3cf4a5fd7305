"""Calls of the lightning indexer, of sparse attention and of the indexer's loss, with DeepSeek-V3.2's head sizes."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tests._helpers.op_cases import Arguments, Case, bf16, changed, fp16, fp32, int32

BATCH, QUERIES, KEYS, TOP_K = 2, 6, 8, 16
"""Documents, the tokens of each, and selected keys."""
NO_ROPE = {"query_rope": None, "key_rope": None}


def make(device: str, layout: str, dtype: torch.dtype, *sizes: tuple[int, ...]) -> list[Tensor]:
    """Return tensors of ``dtype``. A size starts with 0 for the query's tokens and with 1 for the key's."""
    tokens = [((BATCH, n) if layout == "BSND" else (BATCH * n,)) for n in (QUERIES, KEYS)]
    return [torch.randn((*tokens[of_key], *rest), dtype=dtype, device=device) for of_key, *rest in sizes]


def lengths(device: str, layout: str, query: str, key: str) -> dict[str, Tensor | None]:
    """Return the ends of packed documents as the arguments ``query`` and ``key``."""
    ends = torch.arange(1, BATCH + 1, dtype=int32, device=device)
    return {name: n * ends if layout == "TND" else None for name, n in ((query, QUERIES), (key, KEYS))}


def document_ends(layout: str) -> dict[str, Any]:
    return {"layout": layout} | ({"actual_seq_qlen": [5, 12], "actual_seq_klen": [9, 16]} if layout == "TND" else {})


def indices(device: str, layout: str) -> Tensor:
    return torch.zeros_like(make(device, layout, bf16, (0, 1, TOP_K))[0], dtype=int32)


def statistics(device: str, layout: str, heads: int) -> list[Tensor]:
    shape = (BATCH, 1, QUERIES, heads) if layout == "BSND" else (1, BATCH * QUERIES, heads)
    return [torch.ones(shape, device=device) for _ in range(2)]


def indexer(layout: str = "BSND", dtype: torch.dtype = bf16, **options: Any) -> Arguments:
    def arguments(device: str) -> tuple[tuple[Any, ...], dict[str, Any]]:
        tensors = make(device, layout, dtype, (0, 64, 128), (1, 1, 128), (0, 64))
        call = {"layout_query": layout, "layout_key": layout, "sparse_count": TOP_K}
        ends = lengths(device, layout, "actual_seq_lengths_query", "actual_seq_lengths_key")
        return tuple(tensors), call | ends | options

    return arguments


def indexer_grad(layout: str = "BSND", dtype: torch.dtype = bf16, **options: Any) -> Arguments:
    def arguments(device: str) -> tuple[tuple[Any, ...], dict[str, Any]]:
        query, key, dy, weights = make(device, layout, dtype, (0, 64, 128), (1, 1, 128), (0, 1, TOP_K), (0, 64))
        ends = lengths(device, layout, "actual_seq_lengths_query", "actual_seq_lengths_key")
        return (query, key, dy, indices(device, layout), weights), {"layout": layout} | ends | options

    return arguments


def attention(layout: str = "BSND", dtype: torch.dtype = bf16, **options: Any) -> Arguments:
    def arguments(device: str) -> tuple[tuple[Any, ...], dict[str, Any]]:
        sizes = ((0, 16, 512), (1, 1, 512), (1, 1, 512), (0, 16, 64), (1, 1, 64))
        query, key, value, query_rope, key_rope = make(device, layout, dtype, *sizes)
        call = {"layout_query": layout, "layout_kv": layout, "attention_mode": 2}
        call |= lengths(device, layout, "actual_seq_lengths_query", "actual_seq_lengths_kv")
        call |= {"query_rope": query_rope, "key_rope": key_rope}
        return (query, key, value, indices(device, layout), 0.1), call | options

    return arguments


def attention_grad(layout: str = "BSND", dtype: torch.dtype = bf16, **options: Any) -> Arguments:
    def arguments(device: str) -> tuple[tuple[Any, ...], dict[str, Any]]:
        sizes = ((0, 16, 512), (1, 1, 512), (1, 1, 512), (0, 16, 512), (0, 16, 512), (0, 16, 64), (1, 1, 64))
        *tensors, d_out, out, query_rope, key_rope = make(device, layout, dtype, *sizes)
        call = {"layout": layout, "query_rope": query_rope, "key_rope": key_rope}
        call |= lengths(device, layout, "actual_seq_qlen", "actual_seq_kvlen")
        of_forward = (d_out, out, *statistics(device, layout, 16))
        return (*tensors, indices(device, layout), *of_forward, 0.1, 1), call | options

    return arguments


def loss(layout: str = "BSND", dtype: torch.dtype = bf16, **options: Any) -> Arguments:
    def arguments(device: str) -> tuple[tuple[Any, ...], dict[str, Any]]:
        sizes = ((0, 32, 512), (1, 1, 512), (0, 8, 128), (1, 1, 128), (0, 8), (0, 32, 64), (1, 1, 64))
        *tensors, query_rope, key_rope = make(device, layout, dtype, *sizes)
        call = document_ends(layout) | {"query_rope": query_rope, "key_rope": key_rope}
        return (*tensors, indices(device, layout), *statistics(device, layout, 32), 0.1), call | options

    return arguments


def dense_statistics(layout: str = "BSND", dtype: torch.dtype = bf16, **options: Any) -> Arguments:
    def arguments(device: str) -> tuple[tuple[Any, ...], dict[str, Any]]:
        tensors = make(device, layout, dtype, (0, 8, 128), (1, 1, 128), (0, 8))
        return tuple(tensors), document_ends(layout) | options

    return arguments


def dense_loss(layout: str = "BSND", dtype: torch.dtype = bf16, **options: Any) -> Arguments:
    def arguments(device: str) -> tuple[tuple[Any, ...], dict[str, Any]]:
        sizes = ((0, 32, 128), (1, 32, 128), (0, 8, 128), (1, 1, 128), (0, 8), (0, 32, 64), (1, 32, 64))
        *tensors, query_rope, key_rope = make(device, layout, dtype, *sizes)
        shape: tuple[int, ...] = (2, 32, QUERIES, 1) if layout == "BSND" else (32, 2 * QUERIES, 1)
        index_shape = (2, 1, QUERIES) if layout == "BSND" else (1, 2 * QUERIES)
        of_softmax = [torch.ones(s, device=device) for s in (shape, shape, index_shape, index_shape)]
        call = document_ends(layout) | {"query_rope": query_rope, "key_rope": key_rope}
        return (*tensors, *of_softmax, 0.1), call | options

    return arguments


def column_major(tensor: Tensor) -> Tensor:
    return tensor.mT.contiguous().mT


def two_heads(tensor: Tensor) -> Tensor:
    return tensor.repeat_interleave(2, -2)


INDEXER, INDEXER_GRAD = "npu_lightning_indexer", "npu_lightning_indexer_grad"
ATTENTION, ATTENTION_GRAD = "npu_sparse_flash_attention", "npu_sparse_flash_attention_grad"
LOSS = "npu_sparse_lightning_indexer_grad_kl_loss"
DENSE_STATISTICS, DENSE_LOSS = "npu_dense_lightning_indexer_softmax_lse", "npu_dense_lightning_indexer_grad_kl_loss"

CASES = [
    Case(INDEXER, "BSND", indexer(), forward_only=True),
    Case(INDEXER, "BSND, scores too", indexer(return_value=True)),
    Case(INDEXER, "TND", indexer("TND"), forward_only=True),
    Case(INDEXER, "TND, scores too", indexer("TND", return_value=True)),
    Case(INDEXER, "float16, sees every key", indexer(dtype=fp16, sparse_mode=0, return_value=True)),
    Case(INDEXER, "float32", indexer(dtype=fp32, return_value=True)),
    Case(INDEXER, "weights in float32", changed(indexer(return_value=True), 2, Tensor.float)),
    Case(INDEXER, "two key heads", changed(indexer(return_value=True), 1, two_heads)),
    Case(INDEXER, "two key heads, TND", changed(indexer("TND", return_value=True), 1, two_heads)),
    Case(INDEXER, "defaults", lambda device: (indexer()(device)[0], {}), forward_only=True),
    Case(INDEXER, "no query", changed(indexer(), 0, lambda t: t[:0]), "torch_npu"),
    Case(INDEXER, "no key", changed(indexer(), 1, lambda t: t[:, :0]), "torch_npu"),
    Case(INDEXER, "sparse_count 0", indexer(sparse_count=0), "torch_npu"),
    Case(INDEXER, "sparse_count -1", indexer(sparse_count=-1), "torch_npu"),
    Case(INDEXER, "unknown layout_query", indexer(layout_query="BNSD"), "us"),
    Case(INDEXER, "unknown layout_key", indexer(layout_key="BNSD"), "us"),
    Case(INDEXER, "paged keys", indexer(layout_key="PA_BSND"), "us"),
    Case(INDEXER, "sparse_mode 1", indexer(sparse_mode=1), "us"),
    Case(INDEXER, "a window", indexer(pre_tokens=65536), "us"),
    Case(INDEXER, "weights of the wrong heads", changed(indexer(), 2, lambda t: t[..., :63]), "us"),
    Case(INDEXER, "key of another head size", changed(indexer(), 1, lambda t: t[..., :64]), "us"),
    Case(INDEXER, "TND without lengths", indexer("TND", actual_seq_lengths_query=None), "us"),
    Case(INDEXER_GRAD, "BSND", indexer_grad()),
    Case(INDEXER_GRAD, "TND", indexer_grad("TND")),
    Case(INDEXER_GRAD, "float16, sees every key", indexer_grad(dtype=fp16, sparse_mode=0)),
    Case(INDEXER_GRAD, "float32", indexer_grad(dtype=fp32)),
    Case(INDEXER_GRAD, "query not contiguous", changed(indexer_grad(), 0, column_major)),
    Case(INDEXER_GRAD, "unknown layout", indexer_grad(layout="BNSD"), "us"),
    Case(INDEXER_GRAD, "without scores", changed(indexer_grad(), 2, lambda t: t.new_empty(0)), "us"),
    Case(ATTENTION, "BSND", attention(), forward_only=True),
    Case(ATTENTION, "BSND, statistics", attention(return_softmax_lse=True)),
    Case(ATTENTION, "TND", attention("TND"), forward_only=True),
    Case(ATTENTION, "TND, statistics", attention("TND", return_softmax_lse=True)),
    Case(ATTENTION, "float16, sees every key", attention(dtype=fp16, sparse_mode=0, return_softmax_lse=True)),
    Case(ATTENTION, "float32", attention(dtype=fp32, return_softmax_lse=True)),
    Case(ATTENTION, "without rope", attention(**NO_ROPE, return_softmax_lse=True)),
    Case(ATTENTION, "without value", changed(attention(return_softmax_lse=True), 2, lambda t: None)),
    Case(ATTENTION, "query not contiguous", changed(attention(return_softmax_lse=True), 0, column_major)),
    Case(ATTENTION, "no query", changed(attention(), 0, lambda t: t[:0]), "torch_npu"),
    Case(ATTENTION, "no key", changed(attention(), 1, lambda t: t[:, :0]), "torch_npu"),
    Case(ATTENTION, "no value", changed(attention(), 2, lambda t: t[:, :0]), "torch_npu"),
    Case(ATTENTION, "no index", changed(attention(), 3, lambda t: t[..., :0]), "torch_npu"),
    Case(ATTENTION, "query of three dimensions", changed(attention(), 0, lambda t: t[0]), "torch_npu"),
    Case(ATTENTION, "query of four dimensions", changed(attention("TND"), 0, lambda t: t[None]), "torch_npu"),
    Case(ATTENTION, "unknown layout_query", attention(layout_query="BNSD"), "torch_npu"),
    Case(ATTENTION, "unknown layout_kv", attention(layout_kv="BNSD"), "us"),
    Case(ATTENTION, "sparse_mode 1", attention(sparse_mode=1), "us"),
    Case(ATTENTION, "attention_mode 0, the default", attention(attention_mode=0), "us"),
    Case(ATTENTION, "blocks of keys", attention(sparse_block_size=16), "us"),
    Case(ATTENTION, "half a rope", attention(key_rope=None), "us"),
    Case(ATTENTION, "indices in int64", changed(attention(), 3, Tensor.long), "us"),
    Case(ATTENTION_GRAD, "BSND", attention_grad()),
    Case(ATTENTION_GRAD, "TND", attention_grad("TND")),
    Case(ATTENTION_GRAD, "float16, sees every key", attention_grad(dtype=fp16, sparse_mode=0)),
    Case(ATTENTION_GRAD, "without rope", attention_grad(**NO_ROPE)),
    Case(ATTENTION_GRAD, "without value", changed(attention_grad(), 2, lambda t: None)),
    Case(ATTENTION_GRAD, "query not contiguous", changed(attention_grad(), 0, column_major)),
    Case(ATTENTION_GRAD, "without statistics", changed(attention_grad(), 6, lambda t: t.new_empty(0)), "us"),
    Case(ATTENTION_GRAD, "unknown layout", attention_grad(layout="BNSD"), "us"),
    Case(LOSS, "BSND", loss()),
    Case(LOSS, "TND", loss("TND")),
    Case(LOSS, "float16", loss(dtype=fp16)),
    Case(LOSS, "weights in float32", changed(loss(), 4, Tensor.float)),
    Case(LOSS, "without rope", loss(**NO_ROPE)),
    Case(LOSS, "a window, which sparse_mode 3 does not look at", loss(pre_tokens=65536, next_tokens=65536)),
    Case(LOSS, "unknown layout", loss(layout="BNSD"), "us"),
    Case(LOSS, "sees every key", loss(sparse_mode=0), "us"),
    Case(LOSS, "two key heads", changed(loss(), 3, two_heads), "us"),
    Case(LOSS, "TND without lengths", loss("TND", actual_seq_qlen=None), "us"),
    Case(LOSS, "lengths that do not end at the last token", loss("TND", actual_seq_klen=[9, 15]), "us"),
    Case(DENSE_STATISTICS, "BSND", dense_statistics()),
    Case(DENSE_STATISTICS, "TND", dense_statistics("TND")),
    Case(DENSE_STATISTICS, "float16, weights in float32", changed(dense_statistics(dtype=fp16), 2, Tensor.float)),
    Case(DENSE_STATISTICS, "sees every key", dense_statistics(sparse_mode=0), "us"),
    Case(DENSE_STATISTICS, "two key heads", changed(dense_statistics(), 1, two_heads), "us"),
    Case(DENSE_STATISTICS, "TND without lengths", dense_statistics("TND", actual_seq_qlen=None), "us"),
    Case(DENSE_LOSS, "BSND", dense_loss()),
    Case(DENSE_LOSS, "TND", dense_loss("TND")),
    Case(DENSE_LOSS, "float16, weights in float32", changed(dense_loss(dtype=fp16), 4, Tensor.float)),
    Case(DENSE_LOSS, "without rope", dense_loss(**NO_ROPE)),
    Case(DENSE_LOSS, "one key head", changed(dense_loss(), 1, lambda t: t[:, :, :1]), "us"),
    Case(DENSE_LOSS, "statistics of eight copies", changed(dense_loss(), 5, lambda t: t.repeat(1, 1, 1, 8)), "us"),
    Case(DENSE_LOSS, "statistics of another indexer", changed(dense_loss(), 7, lambda t: t[..., :-1]), "us"),
    Case(DENSE_LOSS, "sees every key", dense_loss(sparse_mode=0), "us"),
    Case(DENSE_LOSS, "half a rope", dense_loss(key_rope=None), "us"),
]
