"""``npu_lightning_indexer`` and its gradient: against a float64 oracle."""

from __future__ import annotations

import itertools
from typing import Any
from unittest.mock import patch

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from tests._helpers.error_budget import assert_within, rounding_budget
from tests._helpers.sparse_oracle import Documents, Scores, documents, leaf
from torchtitan_npu.errors import UsageError
from torchtitan_npu.ops.sparse_flash_attention import selected_keys

npu_lightning_indexer = torch.ops.npu.npu_lightning_indexer
npu_lightning_indexer_grad = torch.ops.npu.npu_lightning_indexer_grad

heads = st.sampled_from([(1, 1), (4, 1), (6, 2)])
"""Heads of the query and of the key."""
CHUNKS = st.sampled_from([1, 40, 2**25])
"""Elements of one chunk of rows in the reference kernels."""


def call(docs: Documents, top_k: int, **options: Any) -> dict[str, Any]:
    lengths = docs.lengths("actual_seq_lengths_query", "actual_seq_lengths_key")
    layouts = {"layout_query": docs.layout, "layout_key": docs.layout}
    return {"sparse_count": top_k, "sparse_mode": docs.sparse_mode, "return_value": True} | layouts | lengths | options


@settings(max_examples=100, deadline=None)
@given(documents(), heads, st.sampled_from([1, 5]), st.sampled_from([1, 3, 9]), st.booleans(), CHUNKS)
def test_agrees_with_the_oracle(
    docs: Documents, heads: tuple[int, int], size: int, top_k: int, float_weights: bool, chunk: int
) -> None:
    query_heads, key_heads = heads
    parts = [docs.random(False, query_heads, size), docs.random(True, key_heads, size), docs.random(False, query_heads)]
    if float_weights and docs.dtype != torch.float64:
        parts[2] = [part.float() for part in parts[2]]
    query, key, weights = (leaf(docs.lay_out(part)) for part in parts)
    with patch.object(selected_keys, "CHUNK_ELEMENTS", chunk):
        indices, values = npu_lightning_indexer(query, key, weights, **call(docs, top_k))
        dy = torch.randn(values.shape, generator=docs.generator).to(docs.dtype)
        values.backward(dy)
    assert (indices.dtype, values.dtype) == (torch.int32, docs.dtype)
    assert indices.shape == values.shape == (*query.shape[:-2], key_heads, top_k)
    assert (docs.padding(indices, False) == -1).all() and (docs.padding(values, False) == -torch.inf).all()

    # padding is NaN, so a gradient that read it would be NaN
    for padded, of_key in ((query, False), (key, True), (weights, False)):
        assert (docs.padding(padded.grad, of_key) == 0).all()

    outputs = zip(*parts, docs.visible(), *(docs.split(t, False) for t in (indices, values.detach(), dy)), strict=True)
    grads = [docs.split(tensor.grad, of_key) for tensor, of_key in ((query, False), (key, True), (weights, False))]
    for document, (q, k, w, visible, chosen, scores, gradient) in enumerate(outputs):
        oracle = Scores(q, k, w, docs.u)
        check_selection(chosen, visible, oracle)
        entries = chosen.clamp_min(0).long()
        held = chosen >= 0
        if len(k):
            expected, budget = (t.gather(-1, entries) for t in (oracle.scores, oracle.budget))
            budget = (budget + rounding_budget(expected, docs.dtype)).masked_fill(~held, 0)
            assert_within("scores", scores.masked_fill(~held, 0), expected.masked_fill(~held, 0), budget)
        assert (scores[~held] == -torch.inf).all()

        dense = torch.zeros_like(oracle.scores)
        if len(k):
            dense.scatter_add_(-1, entries, gradient.double().masked_fill(~held, 0))
        expected_grads = oracle.gradients(dense, torch.zeros_like(dense), dense.abs(), docs.u)
        for (name, (value, budget)), grad in zip(expected_grads.items(), grads, strict=True):
            got = grad[document]
            assert_within(f"gradient of {name}", got, value, budget + rounding_budget(value, got.dtype))


def check_selection(chosen: Tensor, visible: Tensor, oracle: Scores) -> None:
    """Check the best keys of each row, best first, then -1, up to the error of the scores."""
    for row in range(chosen.shape[0]):
        for head in range(chosen.shape[1]):
            keys = chosen[row, head]
            count = min(len(keys), int(visible[row].sum()))
            assert (keys[count:] == -1).all()
            held = keys[:count].tolist()
            assert len(set(held)) == count and all(key >= 0 and visible[row, key] for key in held)
            scores, budget = oracle.scores[row, head], oracle.budget[row, head]
            for better, worse in itertools.pairwise(held):
                assert scores[better] + budget[better] >= scores[worse] - budget[worse]
            left = [key for key in range(len(scores)) if visible[row, key] and key not in held]
            for key in left:
                assert scores[held[-1]] + budget[held[-1]] >= scores[key] - budget[key]


def test_equal_scores_keep_the_order_of_the_keys() -> None:
    key = torch.tensor([1.0, 3.0, 1.0, 3.0, -5.0, 0.0]).view(1, 6, 1, 1)
    indices, values = npu_lightning_indexer(
        torch.ones(1, 1, 1, 1), key, torch.ones(1, 1, 1), sparse_count=8, return_value=True
    )
    assert indices.flatten().tolist() == [1, 3, 0, 2, 4, 5, -1, -1]
    assert values.flatten().tolist() == [3, 3, 1, 1, 0, 0, -torch.inf, -torch.inf]


def test_a_zero_logit_has_no_gradient() -> None:
    """The ReLU's derivative at 0 is 0, as in torch."""
    query, key, weights = torch.ones(1, 2, 3, 4), torch.zeros(1, 2, 1, 4), torch.ones(1, 2, 3)
    indices = torch.zeros(1, 2, 1, 1, dtype=torch.int32)
    grads = npu_lightning_indexer_grad(query, key, torch.ones(1, 2, 1, 1), indices, weights)
    assert all((grad == 0).all() for grad in grads)


def test_the_last_query_attends_to_the_last_key() -> None:
    """2 queries align with the last 2 of 4 keys. Of 4 queries with 2 keys, the first two have none."""
    key = torch.arange(1.0, 5.0).view(1, 4, 1, 1)
    indices, _ = npu_lightning_indexer(torch.ones(1, 2, 1, 1), key, torch.ones(1, 2, 1), sparse_count=4)
    assert indices.view(2, 4).tolist() == [[2, 1, 0, -1], [3, 2, 1, 0]]
    indices, _ = npu_lightning_indexer(torch.ones(1, 4, 1, 1), key[:, :2], torch.ones(1, 4, 1), sparse_count=2)
    assert indices.view(4, 2).tolist() == [[-1, -1], [-1, -1], [0, -1], [1, 0]]
    indices, _ = npu_lightning_indexer(torch.ones(1, 2, 1, 1), key, torch.ones(1, 2, 1), sparse_count=2, sparse_mode=0)
    assert indices.view(2, 2).tolist() == [[3, 2], [3, 2]]


def example(dtype: torch.dtype = torch.float64, batch: int = 2, queries: int = 4) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    shapes = (batch, queries, 3, 4), (batch, 6, 1, 4), (batch, queries, 3)
    query, key, weights = (torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype) for shape in shapes)
    return query.requires_grad_(), key.requires_grad_(), weights.requires_grad_()


def test_gradients_stop_where_torch_npu_has_none() -> None:
    query, key, weights = example(torch.float32)
    indices, values = npu_lightning_indexer(query, key, weights, sparse_count=2)
    assert values.shape == (0,) and values.requires_grad and not indices.requires_grad
    with pytest.raises(UsageError, match=r"npu_lightning_indexer_grad: dy must have the shape .* return_value=True"):
        values.sum().backward()


def test_compiles_fullgraph() -> None:
    query, key, weights = example(torch.float32)

    def scores(query: Tensor, key: Tensor, weights: Tensor) -> Tensor:
        values = npu_lightning_indexer(query * 2, key, weights, sparse_count=3, return_value=True)[1]
        return values.clamp_min(-1e3)

    compiled = torch.compile(scores, fullgraph=True, backend="aot_eager", dynamic=True)
    plain, traced = scores(query, key, weights), compiled(query, key, weights)
    assert torch.equal(plain, traced)
    for a, b in zip(*(torch.autograd.grad(y.sum(), (query, key, weights)) for y in (plain, traced)), strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize(
    ("layout", "lengths", "message"),
    [
        ("BSND", [4, 5], "of the query must be between 0 and the sequence length 4, not"),
        ("BSND", [-1, 4], "of the query must be between 0 and the sequence length 4, not"),
        ("TND", [4, 7], "of the query must end with the number of tokens, 8, not"),
        ("TND", [9, 8], "of the query must not decrease"),
    ],
)
def test_names_bad_lengths(layout: str, lengths: list[int], message: str) -> None:
    query, key, weights = (tensor.detach() for tensor in example())
    if layout == "TND":
        query, key, weights = (tensor.flatten(0, 1) for tensor in (query, key, weights))
    key_lengths = torch.tensor([6, 12] if layout == "TND" else [6, 6], dtype=torch.int32)
    with pytest.raises(UsageError, match=message):
        npu_lightning_indexer(
            query,
            key,
            weights,
            actual_seq_lengths_query=torch.tensor(lengths, dtype=torch.int32),
            actual_seq_lengths_key=key_lengths,
            layout_query=layout,
            layout_key=layout,
        )


def test_keys_must_come_before_the_padding() -> None:
    query, key, weights = (tensor.detach() for tensor in example(batch=1))
    indices = torch.tensor([-1, 0], dtype=torch.int32).expand(1, 4, 1, 2)
    with pytest.raises(UsageError, match="sparse_indices must have its keys first and -1 after them"):
        npu_lightning_indexer_grad(query, key, torch.ones(1, 4, 1, 2, dtype=key.dtype), indices, weights)
