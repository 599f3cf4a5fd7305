"""The indexer's KL loss over all keys, of the warm-up: operators against a float64 oracle and the sparse loss."""

from __future__ import annotations

from typing import Any
from unittest.mock import patch

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from tests._helpers.deepseek_v32_models import model_args
from tests._helpers.error_budget import assert_within, rounding_budget
from tests._helpers.peak_allocation import NewMemory
from tests._helpers.sparse_oracle import Attention, Documents, Loss, Scores, documents
from torchtitan_npu.converters.dsa import NpuDenseAttention
from torchtitan_npu.ops.dense_indexer_kl_loss import dense_loss
from torchtitan_npu.ops.sparse_flash_attention import selected_keys

npu = torch.ops.npu
STATISTICS, LOSS = "npu_dense_lightning_indexer_softmax_lse", "npu_dense_lightning_indexer_grad_kl_loss"
HEADS = 3
SIZES = {
    **{"query": (HEADS, 4), "key": (HEADS, 4), "query_rope": (HEADS, 2), "key_rope": (1, 2)},
    **{"query_index": (2, 3), "key_index": (1, 3), "weights": (2,)},
}
LEARNS = ("query_index", "key_index", "weights")
SCALE = 0.4


def of_key(name: str) -> bool:
    return name.startswith("key")


def make(docs: Documents) -> dict[str, list[Tensor]]:
    return {name: docs.random(of_key(name), *size) for name, size in SIZES.items()}


def arguments(docs: Documents, parts: dict[str, list[Tensor]]) -> dict[str, Any]:
    """Return the arguments of the loss, with the statistics of attention."""
    call: dict[str, Any] = {name: docs.lay_out(part) for name, part in parts.items()}
    rope = call["key_rope"].expand(*call["key"].shape[:-1], -1)
    packed = docs.layout == "TND"
    ends = {"actual_seq_qlen": docs.ends(False), "actual_seq_klen": docs.ends(True)} if packed else {}
    _, maximum, total, *_ = npu.npu_fusion_attention(
        torch.cat([call["query"], call["query_rope"]], -1),
        torch.cat([call["key"], rope], -1),
        call["key"],
        HEADS,
        docs.layout,
        atten_mask=torch.ones(2048, 2048, dtype=torch.bool).triu(1),
        scale=SCALE,
        actual_seq_qlen=ends.get("actual_seq_qlen"),
        actual_seq_kvlen=ends.get("actual_seq_klen"),
        sparse_mode=3,
        softmax_layout="TND" if packed else "",
    )
    maximum, total = (t[..., 0].transpose(0, 1)[..., None] if packed else t[..., :1] for t in (maximum, total))
    ends = ends or dict.fromkeys(("actual_seq_qlen", "actual_seq_klen"))
    return {**call, "softmax_max": maximum, "softmax_sum": total, "scale_value": SCALE, "layout": docs.layout, **ends}


@settings(max_examples=25, deadline=None)
@given(documents(causal=True, uneven=False), st.sampled_from([1, 100, 2**25]))
def test_agrees_with_the_oracle(docs: Documents, chunk: int) -> None:
    parts = make(docs)
    call = arguments(docs, parts)
    with patch.object(selected_keys, "CHUNK_ELEMENTS", chunk):
        *grads, loss = dense_loss(**call)
    assert loss.shape == (1,) and loss.dtype == docs.compute
    assert [grad.dtype for grad in grads] == [docs.dtype] * 3
    index = {name: call[name] for name in (*LEARNS, "layout", "actual_seq_qlen", "actual_seq_klen")}
    statistics = [docs.split(t.squeeze(-2), False) for t in npu.npu_dense_lightning_indexer_softmax_lse(**index)]
    grads = [docs.split(grad, of_key(name)) for name, grad in zip(LEARNS, grads, strict=True)]
    total, total_budget, u = torch.zeros(1, dtype=torch.float64), torch.zeros(1, dtype=torch.float64), docs.u
    for document, visible in enumerate(docs.visible()):
        part = {name: tensors[document] for name, tensors in parts.items()}
        mask, keys = visible[:, None], visible.shape[1]
        q = torch.cat([part["query"], part["query_rope"]], -1)
        k = torch.cat([part["key"], part["key_rope"].expand(-1, HEADS, -1)], -1)
        scores = Scores(part["query_index"], part["key_index"], part["weights"], u)
        oracle = Loss(Attention(q, k, mask.expand(-1, HEADS, -1), SCALE, u), scores, mask, u)

        lse = scores.scores.masked_fill(~mask, -torch.inf).logsumexp(-1)[:, 0]
        found = statistics[0][document] + statistics[1][document].log()
        some = visible.any(-1)
        assert (found[~some] == -torch.inf).all()
        if some.any():
            error = (2 * scores.budget + (scores.scores.abs() + keys + 6) * u).amax((1, 2))
            assert_within("log-sum-exp", found[some], lse[some], error[some])

        total, total_budget = total + oracle.loss, total_budget + oracle.budget
        expected = scores.gradients(oracle.d_scores, oracle.d_budget, oracle.mass, u)
        for (name, (value, budget)), grad in zip(expected.items(), grads, strict=True):
            got = grad[document]
            assert_within(f"gradient of {name}", got, value, budget + rounding_budget(value, got.dtype))
    assert_within("loss", loss, total, total_budget + len(docs.sizes) * u * total.abs())


def example(dtype: torch.dtype = torch.float64, layout: str = "BSND", heads: int = HEADS) -> dict[str, Any]:
    docs = Documents(layout, [(4, 5)] * 2, True, dtype, torch.Generator().manual_seed(0))
    return arguments(docs, make(docs))


def test_is_the_sparse_loss_of_all_keys() -> None:
    """Keys per head that are one latent head, and a selection of all keys: the sparse operator's loss."""
    docs = Documents("BSND", [(4, 5)] * 2, True, torch.float64, torch.Generator().manual_seed(0))
    parts = make(docs)
    parts["key"] = [key[:, :1].expand(-1, HEADS, -1) for key in parts["key"]]
    call = arguments(docs, parts)
    *grads, loss = dense_loss(**call)
    selected = docs.lay_out(docs.select(5, 1, docs.visible()), -1)
    sparse = {**call, "key": call["key"][:, :, :1], "sparse_indices": selected}
    for name in ("softmax_max", "softmax_sum"):
        sparse[name] = call[name].transpose(1, 3).contiguous()  # (B, 1, S1, N1)
    *expected, expected_loss = npu.npu_sparse_lightning_indexer_grad_kl_loss(**sparse)
    torch.testing.assert_close(loss, expected_loss, rtol=1e-13, atol=0)
    for one, other in zip(grads, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-13)


def test_memory_does_not_grow_with_the_square_of_the_sequence(monkeypatch: pytest.MonkeyPatch) -> None:
    """With eight times as many keys and queries, the peak grows eight times: inputs, outputs and one chunk of rows."""
    monkeypatch.setattr(selected_keys, "CHUNK_ELEMENTS", 2**12)
    peaks = []
    for tokens in (64, 512):
        docs = Documents("BSND", [(tokens, tokens)], True, torch.float32, torch.Generator().manual_seed(0))
        call = arguments(docs, make(docs))
        with NewMemory() as memory:
            dense_loss(**call)
        peaks.append(memory.peak)
    assert peaks[1] < 9 * peaks[0] and peaks[1] < 4 * 512**2 / 2


def test_a_sequence_beyond_8192_tokens() -> None:
    """Attention and loss of a warm-up step, as the converter calls them: the outputs and gradients of some queries."""
    tokens, rows, heads = 8448, torch.tensor([0, 1, 5000, 8191, 8192, 8193, 8447]), 2
    head_sizes = {"qk_nope_head_dim": 4, "qk_rope_head_dim": 2, "v_head_dim": 3, "index_head_dim": 4}
    attention = NpuDenseAttention(model_args(warmup=True, n_heads=heads, index_n_heads=2, **head_sizes))
    assert attention.indexer_loss is not None
    attention.indexer_loss.start_batch(torch.tensor(attention.indexer_loss.weight))  # a token's loss counts once
    docs = Documents("BSND", [(tokens, tokens)], True, torch.float32, torch.Generator().manual_seed(0))
    shapes = [(heads, 4), (heads, 2), (heads, 4), (1, 2), (heads, 3), (2, 4), (4,), (2,)]
    inputs = [docs.random(False, *shape)[0] for shape in shapes]
    q, q_rope, k, k_rope, v, index_q, index_k, index_weights = inputs
    trained = [x[None].requires_grad_() for x in (index_q, index_k, index_weights)]
    output = attention(*(x[None] for x in inputs[:5]), *trained, documents=None, scale=SCALE)
    output.sum().backward()

    mask = (torch.arange(tokens) <= rows[:, None])[:, None]
    queries, keys = torch.cat([q, q_rope], -1), torch.cat([k, k_rope.expand(-1, heads, -1)], -1)
    expected = Attention(queries[rows], keys, mask.expand(-1, heads, -1), SCALE, docs.u)
    assert_within("output", output[0, rows], *expected.output(v))
    scores = Scores(index_q[rows], index_k[:, None], index_weights[rows], docs.u)
    loss = Loss(expected, scores, mask, docs.u)
    gradients = scores.gradients(loss.d_scores, loss.d_budget, loss.mass, docs.u)
    for name, found in (("query", trained[0].grad), ("weights", trained[2].grad)):
        assert found is not None
        assert_within(f"gradient of {name}", found[0, rows], *gradients[name])
