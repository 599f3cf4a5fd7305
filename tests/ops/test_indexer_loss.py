"""The indexer's KL loss: operator and function, against a float64 oracle and autograd of the formula."""

from __future__ import annotations

from typing import Any
from unittest.mock import patch

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from tests._helpers.error_budget import assert_within, rounding_budget, unit_roundoff
from tests._helpers.sparse_oracle import Attention, Documents, Loss, Scores, dense_mask, documents
from torchtitan_npu.errors import UsageError
from torchtitan_npu.layers.auxiliary_loss import AuxiliaryLoss
from torchtitan_npu.ops import OPS
from torchtitan_npu.ops.indexer_kl_loss import op
from torchtitan_npu.ops.indexer_kl_loss.op import loss_in_chunks, with_indexer_loss
from torchtitan_npu.ops.sparse_flash_attention import selected_keys
from torchtitan_npu.planner import Calls

npu_loss = torch.ops.npu.npu_sparse_lightning_indexer_grad_kl_loss

SIZES = {"query": (3, 4), "key": (1, 4), "query_index": (2, 3), "key_index": (1, 3), "weights": (2,)}
ROPES = {"query_rope": (3, 2), "key_rope": (1, 2)}
LEARNS = ("query_index", "key_index", "weights")
SCALE = 0.4


def of_key(name: str) -> bool:
    return name.startswith("key")


def make(docs: Documents, top_k: int, with_rope: bool = True) -> tuple[dict[str, list[Tensor]], list[Tensor]]:
    """Return the inputs of attention and indexer, and the selected keys, by document."""
    sizes = SIZES | (ROPES if with_rope else {})
    return (
        {name: docs.random(of_key(name), *size) for name, size in sizes.items()},
        docs.select(top_k, 1, docs.visible()),
    )


def arguments(docs: Documents, parts: dict[str, list[Tensor]], indices: list[Tensor]) -> dict[str, Any]:
    """Return the arguments of the loss, with the statistics of sparse attention."""
    # a padding row has no keys; its values are NaN and must not affect the result
    tensors = {name: docs.lay_out(part) for name, part in parts.items()}
    tensors["sparse_indices"] = docs.lay_out(indices, -1)
    ropes = {name: tensors.get(name) for name in ROPES}
    _, maximum, total = torch.ops.npu.npu_sparse_flash_attention(
        tensors["query"],
        tensors["key"],
        None,
        tensors["sparse_indices"],
        SCALE,
        **ropes,
        **docs.lengths("actual_seq_lengths_query", "actual_seq_lengths_kv"),
        layout_query=docs.layout,
        layout_kv=docs.layout,
        attention_mode=2,
        return_softmax_lse=True,
    )
    call = tensors | {"softmax_max": maximum, "softmax_sum": total, "scale_value": SCALE, "layout": docs.layout}
    if docs.layout == "TND":
        call |= {"actual_seq_qlen": docs.ends(False), "actual_seq_klen": docs.ends(True)}
    return call


@settings(max_examples=80, deadline=None)
@given(
    documents(causal=True, uneven=False), st.sampled_from([1, 3, 9]), st.booleans(), st.sampled_from([1, 300, 2**25])
)
def test_agrees_with_the_oracle(docs: Documents, top_k: int, with_rope: bool, chunk: int) -> None:
    parts, indices = make(docs, top_k, with_rope)
    call = arguments(docs, parts, indices)
    with patch.object(selected_keys, "CHUNK_ELEMENTS", chunk):
        *grads, loss = npu_loss(**call)
    assert loss.shape == (1,) and loss.dtype == docs.compute
    assert [grad.dtype for grad in grads] == [docs.dtype] * 3
    grads = [docs.split(grad, of_key(name)) for name, grad in zip(LEARNS, grads, strict=True)]
    total, total_budget, u = torch.zeros(1, dtype=torch.float64), torch.zeros(1, dtype=torch.float64), docs.u
    for document, visible in enumerate(docs.visible()):
        part = {name: tensors[document] for name, tensors in parts.items()}
        mask = dense_mask(indices[document], visible)
        q, k = (torch.cat([part[n], part[f"{n}_rope"]], -1) if with_rope else part[n] for n in ("query", "key"))
        scores = Scores(part["query_index"], part["key_index"], part["weights"], u)
        oracle = Loss(Attention(q, k, mask, SCALE, u), scores, mask, u)
        total, total_budget = total + oracle.loss, total_budget + oracle.budget
        expected = scores.gradients(oracle.d_scores, oracle.d_budget, oracle.mass, u)
        for (name, (value, budget)), grad in zip(expected.items(), grads, strict=True):
            got = grad[document]
            assert_within(f"gradient of {name}", got, value, budget + rounding_budget(value, got.dtype))
    assert_within("loss", loss, total, total_budget + len(docs.sizes) * u * total.abs())


def float64(call: dict[str, Any]) -> dict[str, Any]:
    """Return the same call in float64, with the statistics that it has."""
    return {k: v.double() if isinstance(v, Tensor) and v.is_floating_point() else v for k, v in call.items()}


@pytest.mark.parametrize(
    ("layout", "sizes"),
    [
        ("BSND", [(7, 9)] * 2),
        ("TND", [(7, 9)]),  # one document in several chunks
        ("TND", [(2, 2), (1, 4), (5, 5), (0, 2), (1, 1), (3, 6)]),  # chunks that end in documents, and between two
    ],
    ids=["rows", "one document", "documents"],
)
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=str)
@pytest.mark.parametrize("most", [1, 3, 4, 100])
def test_chunks_of_queries_equal_one_call(
    most: int, dtype: torch.dtype, layout: str, sizes: list[tuple[int, int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The operator documents 8192 queries. In bfloat16 every chunk rounds its part of a key's gradient."""
    monkeypatch.setattr(op, "MAX_QUERIES", most)
    docs = Documents(layout, sizes, True, dtype, torch.Generator().manual_seed(0))
    call = arguments(docs, *make(docs, 3))
    exact = float64(call)
    *expected, expected_loss = npu_loss(**exact)
    dim = 0 if layout == "TND" else 1
    parts = list(op.chunks_of(**call))
    assert len(parts) == -(-call["query"].shape[dim] // most)
    with Calls() as calls:
        *grads, loss = loss_in_chunks(**call)
    assert calls.count("npu") == {"npu_sparse_lightning_indexer_grad_kl_loss": len(parts)}
    # a few hundred roundings in the dtype of the computation, and one of each output
    u = torch.finfo(docs.compute).eps
    torch.testing.assert_close(loss, expected_loss.to(loss.dtype), rtol=300 * u, atol=0)
    for name, grad, value in zip(LEARNS, grads, expected, strict=True):
        rounded = value.abs()
        if name == "key_index" and len(parts) > 1:
            assert grad.dtype == docs.compute
            rounded = torch.zeros_like(value)
            for chunk in parts:
                d_chunk = npu_loss(**op.part_of(exact, chunk))[1]
                rounded.narrow(dim, chunk.keys.start, d_chunk.shape[dim]).add_(d_chunk.abs())
        budget = rounded * unit_roundoff(dtype) + 300 * u * value.abs().max()
        assert_within(f"gradient of {name}", grad, value, budget)


def test_a_call_of_the_documented_limit_is_one_chunk() -> None:
    query, longer = (torch.empty(1, tokens, 1, 1, device="meta") for tokens in (8192, 8193))
    assert [s.queries for s in op.chunks_of(query, query, "BSND")] == [slice(0, 8192)]
    assert [s.queries for s in op.chunks_of(longer, longer, "BSND")] == [slice(0, 8192), slice(8192, 8193)]
    limits = {limit.what: limit for limit in OPS["npu_sparse_lightning_indexer_grad_kl_loss"].limits}
    for what, queries, ends, allowed in (
        ("the number of queries", query, None, True),
        ("the number of queries", longer, None, False),
        ("the number of queries", longer[0], [8193], False),
        ("the number of queries", longer[0], [1, 8193], True),
        ("the batch size", longer[0], list(range(256)), True),
        ("the batch size", longer[0], list(range(257)), False),
    ):
        limit = limits[what]
        assert (limit.measure(query=queries, query_index=queries, actual_seq_qlen=ends) in limit.allowed) == allowed


def formula_loss(call: dict[str, Any]) -> Tensor:
    """Compute the loss of a BSND batch by the paper's formula, for autograd to differentiate."""
    indices = call["sparse_indices"][:, :, 0].long()
    batch = torch.arange(len(indices))[:, None, None]
    held, entries = indices >= 0, indices.clamp_min(0)
    q, k = (torch.cat([call[name], call[f"{name}_rope"]], -1) for name in ("query", "key"))
    attention = torch.einsum("bqhd,bqsd->bqhs", q, k[:, :, 0][batch, entries]) * call["scale_value"]
    p = attention.masked_fill(~held[:, :, None], -torch.inf).softmax(-1).sum(2)
    p = (p / p.sum(-1, keepdim=True)).detach()
    logits = torch.einsum("bqhd,bqsd->bqhs", call["query_index"], call["key_index"][:, :, 0][batch, entries])
    scores = torch.einsum("bqh,bqhs->bqs", call["weights"], logits.relu()).masked_fill(~held, -torch.inf)
    target = torch.where(held, p, 0)
    return torch.nn.functional.kl_div(
        scores.log_softmax(-1).masked_fill(~held, 0), target.masked_fill(~held, 0), reduction="sum"
    )


def example(dtype: torch.dtype = torch.float64, batch: int = 2) -> dict[str, Any]:
    docs = Documents("BSND", [(4, 5)] * batch, True, dtype, torch.Generator().manual_seed(0))
    call = arguments(docs, *make(docs, 3))
    return call | {name: call[name].requires_grad_() for name in (*LEARNS, "query", "key", *ROPES)}


def plain(call: dict[str, Any]) -> dict[str, Any]:
    """Return the same call without autograd."""
    return {name: value.detach() if isinstance(value, Tensor) else value for name, value in call.items()}


def learn(call: dict[str, Any], weight: float = 1.0) -> tuple[Tensor, list[Tensor | None]]:
    """Return the counted loss, and the gradients of the backward pass of attention's output."""
    aux_loss = AuxiliaryLoss("indexer_loss", weight)
    aux_loss.start_batch(torch.ones((), dtype=torch.float64))
    tensors = {name: value for name, value in call.items() if isinstance(value, Tensor)}
    for tensor in tensors.values():
        tensor.grad = None
    output = torch.zeros_like(call["query"].detach()).requires_grad_()
    with_loss = with_indexer_loss(output, aux_loss, loss_in_chunks, **{"layout": "BSND", **call})
    assert torch.equal(with_loss, output) and aux_loss.total == 0  # the forward computes nothing
    (3 * with_loss).sum().backward()
    assert output.grad is not None and (output.grad == 3).all()
    assert aux_loss.total is not None
    return aux_loss.total, [tensors[name].grad for name in LEARNS]


def test_gradients_are_those_of_the_formula() -> None:
    call = example()
    written = formula_loss(call)
    for weight in (1.0, -0.3):
        loss, grads = learn(call, weight)
        assert loss.shape == () and not loss.isnan()
        torch.testing.assert_close(loss, written, rtol=1e-13, atol=0)
        expected = torch.autograd.grad(weight * written, [call[name] for name in LEARNS], retain_graph=True)
        for one, other in zip(grads, expected, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-13)


def test_only_the_indexer_learns() -> None:
    call = example()
    _, grads = learn(call)
    assert all(grad is not None for grad in grads)
    assert all(call[name].grad is None for name in ("query", "key", *ROPES))


def test_only_tensors_that_require_a_gradient_get_one() -> None:
    call = example() | {"weights": example()["weights"].detach()}
    _, (d_query, d_key, d_weights) = learn(call)
    assert d_weights is None and d_query is not None and d_key is not None


def test_half_precision_gradients_are_scaled_without_bias() -> None:
    """1/3 is not exact in bfloat16: rounding it first would make every gradient 0.1 % too large."""
    call = example(torch.bfloat16)
    d_query, *_ = npu_loss(**call)
    _, (scaled, *_) = learn(call, 1 / 3)
    assert scaled is not None and torch.equal(scaled, (d_query.double() / 3).bfloat16())


def test_rows_without_keys_contribute_nothing() -> None:
    """Rows of padding hold only -1; their other values have no effect."""
    call = plain(example(batch=1))
    whole = npu_loss(**call)[3]
    by_row = ("query", "query_index", "weights", "query_rope", "sparse_indices")
    rest = call | {name: call[name][:, 1:] for name in by_row}
    rest |= {name: call[name][:, :, 1:] for name in ("softmax_max", "softmax_sum")}
    *expected, rest_loss = npu_loss(**rest)
    padded = {name: call[name].clone() for name in by_row}
    for name, tensor in padded.items():
        tensor[:, 0] = -1 if name == "sparse_indices" else torch.nan
    *grads, loss = npu_loss(**call | padded)
    torch.testing.assert_close(loss, rest_loss, rtol=1e-14, atol=0)
    assert loss < whole
    for name, grad, rest_grad in zip(LEARNS, grads, expected, strict=True):
        row, others = (grad[:0], grad) if of_key(name) else (grad[:, 0], grad[:, 1:])
        assert (row == 0).all()
        torch.testing.assert_close(others, rest_grad, rtol=1e-13, atol=1e-14)


def test_the_operator_has_no_autograd() -> None:
    call = example()
    loss = npu_loss(**call)[3]
    with pytest.warns(UserWarning, match="npu_sparse_lightning_indexer_grad_kl_loss"):  # torch warns about it
        loss.backward()
    assert call["query_index"].grad is None


def test_a_key_beyond_the_causal_line_is_an_error() -> None:
    """Attention masks such a key. Here it means that the lengths of the two calls differ."""
    call = plain(example(batch=1))
    indices = call["sparse_indices"].clone()
    indices[0, 0, 0, 0] = 4  # with 4 queries and 5 keys, the first row attends to two keys
    with pytest.raises(
        UsageError, match="sparse_indices must not contain keys beyond those that its row may attend to"
    ):
        npu_loss(**call | {"sparse_indices": indices})
