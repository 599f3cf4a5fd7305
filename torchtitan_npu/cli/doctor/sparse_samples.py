"""One call of each operator of DeepSeek's sparse attention, with the head sizes and the top-k that an NPU takes."""

from __future__ import annotations

from collections.abc import Iterator

from torchtitan_npu.cli.doctor.samples import Sample, randn

QUERIES, KEYS, TOP_K = 8, 2048, 2048
HEADS, HEAD, ROPE = 32, 512, 64
INDEX_HEADS, INDEX_HEAD = 64, 128
SCALE = (HEAD + ROPE) ** -0.5


def sparse_attention() -> Iterator[Sample]:
    """The last eight queries of a sequence: each sees nearly every key, and selects all it sees."""
    index_query, index_key = randn(1, QUERIES, INDEX_HEADS, INDEX_HEAD), randn(1, KEYS, 1, INDEX_HEAD)
    weights = randn(1, QUERIES, INDEX_HEADS)
    options = {"sparse_count": TOP_K, "return_value": True}
    indexer = Sample("npu_lightning_indexer", (index_query, index_key, weights), options, any_order=True)
    yield indexer
    selected, _ = indexer.reference()
    dy = randn(1, QUERIES, 1, TOP_K)
    yield Sample("npu_lightning_indexer_grad", (index_query, index_key, dy, selected, weights))

    query, key = randn(1, QUERIES, HEADS, HEAD), randn(1, KEYS, 1, HEAD)
    rope = {"query_rope": randn(1, QUERIES, HEADS, ROPE), "key_rope": randn(1, KEYS, 1, ROPE)}
    more = {"attention_mode": 2, "return_softmax_lse": True}
    attention = Sample("npu_sparse_flash_attention", (query, key, key, selected, SCALE), rope | more)
    yield attention
    out, largest, total = attention.reference()
    gradient = (query, key, key, selected, randn(1, QUERIES, HEADS, HEAD), out, largest, total, SCALE, 1)
    yield Sample("npu_sparse_flash_attention_grad", gradient, rope | {"attention_mode": 2})
    loss = (query, key, index_query, index_key, weights, selected, largest, total, SCALE)
    yield Sample("npu_sparse_lightning_indexer_grad_kl_loss", loss, rope)
