"""The indexer's KL loss and the indexer's gradients in Triton, against the float64 oracle."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor

from tests._helpers.error_budget import assert_within, rounding_budget, unit_roundoff
from tests._helpers.sparse_oracle import Attention, Documents, Loss, Scores, dense_mask
from tests.gpu_kernels.kernel_checks import DEVICE, docs_of, dtype_on, kernel_documents
from torchtitan_npu.ops import OPS

GRADIENT: Any = OPS["npu_lightning_indexer_grad"]
LOSS: Any = OPS["npu_sparse_lightning_indexer_grad_kl_loss"]
SCALE = 0.4
LEARNS = ("query_index", "key_index", "weights")


def of_key(name: str) -> bool:
    return name.startswith("key")


def arranged(how: str, queries: int = 3, keys: int = 5) -> Documents:
    """A batch of strided tensors."""
    return docs_of("BSND", [(queries, keys)] * 2, torch.float32, arranged=how)


def on_device(tensors: dict[str, Any]) -> dict[str, Any]:
    return {name: value.to(DEVICE) if isinstance(value, Tensor) else value for name, value in tensors.items()}


def check_gradients(docs: Documents, scores: list[Scores], d_scores: list[tuple[Tensor, ...]], grads: Any) -> None:
    """Check gradients. ``d_scores`` holds the gradient of each document's scores, its budget and a bound."""
    half = 0.0 if docs.dtype == torch.float32 else unit_roundoff(docs.dtype)
    grads = {name: grad.cpu() for name, grad in zip(LEARNS, grads, strict=True)}
    for name, grad in grads.items():
        assert (docs.padding(grad, of_key(name)) == 0).all()
    parts = [docs.split(grad, of_key(name)) for name, grad in grads.items()]
    for document, (oracle, (dy, budget, mass)) in enumerate(zip(scores, d_scores, strict=True)):
        # the gradient of a logit is rounded to the dtype of the inputs before the products
        expected = oracle.gradients(dy, budget + half * mass + (2.0**-24 if half else 0), mass, docs.u)
        for (name, (value, allowed)), part in zip(expected.items(), parts, strict=True):
            got = part[document]
            assert_within(f"gradient of {name}", got, value, allowed + rounding_budget(value, got.dtype))


@pytest.mark.parametrize(
    ("layout", "heads", "dtype"),
    [("BSND", (20, 1), torch.float32), ("TND", (6, 2), dtype_on(DEVICE, torch.bfloat16))],
    ids=str,
)
def test_gradients_agree_with_the_oracle(
    layout: str, heads: tuple[int, int], dtype: torch.dtype, deterministic: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In order, in chunks of three or six rows. One document has more keys than a tile."""
    monkeypatch.setattr("torchtitan_npu.gpu_kernels.lightning_indexer.triton_grad.WORKSPACE", 8040)
    docs = docs_of(layout, [(3, 70), (0, 2), (4, 3)], dtype)
    indices = docs.select(67, heads[1], docs.visible())
    call, grads = check_gradients_of_scores(GRADIENT.cuda, docs, heads, 20, indices)
    if deterministic:
        assert all(map(torch.equal, grads, GRADIENT.cuda(**call)))


def check_gradients_of_scores(
    run: Callable[..., Any], docs: Documents, heads: tuple[int, int], size: int, indices: list[Tensor]
) -> tuple[dict[str, Any], Any]:
    """Check ``run`` on random inputs and gradients of the selected scores. Return its arguments and results."""
    query, key = docs.random(False, heads[0], size), docs.random(True, heads[1], size)
    weights = docs.random(False, heads[0])
    dy = [torch.randn(chosen.shape, generator=docs.generator).to(docs.dtype) for chosen in indices]
    call: dict[str, Any] = {"query": query, "key": key, "weights": weights, "dy": dy}
    call = {name: docs.lay_out(part) for name, part in call.items()} | {"sparse_indices": docs.lay_out(indices, -1)}
    names = ("actual_seq_lengths_query", "actual_seq_lengths_key")
    call |= dict.fromkeys(names) | docs.lengths(*names) | {"layout": docs.layout, "sparse_mode": docs.sparse_mode}
    call = on_device(call)
    oracles = [Scores(*part, docs.u) for part in zip(query, key, weights, strict=True)]
    dense = []
    for oracle, chosen, gradient in zip(oracles, indices, dy, strict=True):
        whole = torch.zeros_like(oracle.scores)
        if whole.numel():
            whole.scatter_add_(-1, chosen.clamp_min(0).long(), gradient.double().masked_fill(chosen < 0, 0))
        dense.append((whole, torch.zeros_like(whole), whole.abs()))
    grads = run(**call)
    check_gradients(docs, oracles, dense, grads)
    return call, grads


def arguments(
    docs: Documents, parts: dict[str, list[Tensor]], indices: list[Tensor], scale: float = SCALE
) -> dict[str, Any]:
    """Return the arguments of the loss, with statistics from sparse attention's reference."""
    tensors = dict.fromkeys(("query_rope", "key_rope")) | {name: docs.lay_out(part) for name, part in parts.items()}
    tensors["sparse_indices"] = docs.lay_out(indices, -1)
    _, maximum, total = torch.ops.npu.npu_sparse_flash_attention(
        tensors["query"],
        tensors["key"],
        None,
        tensors["sparse_indices"],
        scale,
        query_rope=tensors["query_rope"],
        key_rope=tensors["key_rope"],
        **docs.lengths("actual_seq_lengths_query", "actual_seq_lengths_kv"),
        layout_query=docs.layout,
        layout_kv=docs.layout,
        attention_mode=2,
        return_softmax_lse=True,
    )
    ends = {"actual_seq_qlen": docs.ends(False), "actual_seq_klen": docs.ends(True)} if docs.layout == "TND" else {}
    options = {"scale_value": scale, "layout": docs.layout, "sparse_mode": 3}
    lengths = dict.fromkeys(("actual_seq_qlen", "actual_seq_klen")) | ends
    return on_device(LOSS.complete(**tensors, softmax_max=maximum, softmax_sum=total, **options, **lengths))


def make(
    docs: Documents,
    top_k: int,
    heads: int,
    rope: int,
    weights: torch.dtype | None = None,
    size: int = 20,
    index: tuple[int, int] = (2, 5),
) -> tuple[dict[str, list[Tensor]], list[Tensor]]:
    """Return the tensors of each document by name, and its selected keys. ``index`` is the indexer's heads and size."""
    sizes: dict[str, tuple[int, ...]] = {"query": (heads, size), "key": (1, size), "query_index": index}
    sizes |= {"key_index": (1, index[1]), "weights": index[:1]}
    sizes |= {"query_rope": (heads, rope), "key_rope": (1, rope)} if rope else {}
    parts = {name: docs.random(of_key(name), *size) for name, size in sizes.items()}
    parts["weights"] = [part.to(weights or docs.dtype) for part in parts["weights"]]
    return parts, docs.select(top_k, 1, docs.visible())


@settings(max_examples=6, deadline=None)
@given(
    kernel_documents(causal=True, uneven=False),
    st.sampled_from([1, 3, 9]),
    st.sampled_from([3, 130]),
    st.sampled_from([0, 2]),
    st.booleans(),
    st.just(20),
)
@example(arranged("strided"), 3, 3, 2, False, 20)
@example(arranged("head by head"), 3, 3, 2, False, 20)
@example(arranged("tokens first", queries=1), 3, 3, 2, False, 20)
@example(arranged("contiguous", keys=40), 37, 3, 2, False, 140)
def test_loss_agrees_with_the_oracle(docs: Documents, top_k: int, heads: int, rope: int, wide: bool, size: int) -> None:
    """``wide`` passes float32 weights with half-precision inputs, as the converter does.

    The last example has more keys than a tile, and features for several iterations of the loop.
    """
    weights = torch.float32 if wide and docs.dtype != torch.float64 else docs.dtype
    check_loss(LOSS.cuda, docs, *make(docs, top_k, heads, rope, weights, size))


def check_loss(
    run: Callable[..., Any],
    docs: Documents,
    parts: dict[str, list[Tensor]],
    indices: list[Tensor],
    scale: float = SCALE,
) -> None:
    *grads, loss = run(**arguments(docs, parts, indices, scale))
    assert loss.shape == (1,) and loss.dtype == torch.float32
    assert [grad.dtype for grad in grads] == [parts[name][0].dtype for name in LEARNS]
    total, total_budget, u = torch.zeros(1, dtype=torch.float64), torch.zeros(1, dtype=torch.float64), docs.u
    oracles, d_scores = [], []
    for document, visible in enumerate(docs.visible()):
        part = {name: tensors[document] for name, tensors in parts.items()}
        mask = dense_mask(indices[document], visible)
        q, k = (
            torch.cat([part[n], part[f"{n}_rope"]], -1) if "query_rope" in part else part[n] for n in ("query", "key")
        )
        scores = Scores(part["query_index"], part["key_index"], part["weights"], u)
        oracle = Loss(Attention(q, k, mask, scale, u), scores, mask, u)
        total, total_budget = total + oracle.loss, total_budget + oracle.budget
        oracles.append(scores)
        d_scores.append((oracle.d_scores, oracle.d_budget, oracle.mass))
    check_gradients(docs, oracles, d_scores, grads)
    assert_within("loss", loss.cpu(), total, total_budget + len(docs.sizes) * u * total.abs())


def test_entries_without_a_key_are_ignored() -> None:
    """-1 between keys, and keys that the row may not attend to, are ignored, and so are rows without keys."""
    docs = docs_of("BSND", [(4, 6)], torch.float32)
    parts, _ = make(docs, 2, 3, 2)
    clean = torch.tensor([[2, 1, -1, -1], [3, -1, -1, -1], [-1, -1, -1, -1], [4, 1, 3, -1]], dtype=torch.int32)
    spread = torch.tensor([[-1, 2, 5, 1], [-1, 3, -1, 4], [-1, -1, 5, -1], [4, 1, -1, 3]], dtype=torch.int32)
    call = arguments(docs, parts, [clean[:, None]])
    expected = LOSS.cuda(**call)
    for name in ("query", "query_rope", "query_index", "weights"):
        call[name][:, 2] = torch.nan
    for name in ("key", "key_rope", "key_index"):
        call[name][:, [0, 5]] = torch.nan
    got = LOSS.cuda(**call | {"sparse_indices": spread[None, :, None].to(DEVICE)})
    for one, other in zip(got, expected, strict=True):
        assert not one.isnan().any()
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)  # sums in another order
