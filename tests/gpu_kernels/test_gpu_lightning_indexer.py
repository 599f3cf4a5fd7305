"""``npu_lightning_indexer`` in Triton, against the float64 oracle."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from tests._helpers.error_budget import assert_within, rounding_budget
from tests._helpers.sparse_oracle import Documents, Scores
from tests.gpu_kernels.kernel_checks import DEVICE, docs_of, kernel_documents
from torchtitan_npu.ops import OPS

INDEXER: Any = OPS["npu_lightning_indexer"]
LENGTHS = ("actual_seq_lengths_query", "actual_seq_lengths_key")


def arguments(docs: Documents, parts: list[list[Tensor]], top_k: int, return_value: bool = True) -> dict[str, Any]:
    """Run the kernel on ``parts``: query, key and weights, by document."""
    tensors = dict(zip(("query", "key", "weights"), map(docs.lay_out, parts), strict=True))
    tensors = {name: tensor.to(DEVICE) for name, tensor in (tensors | docs.lengths(*LENGTHS)).items()}
    options = {"sparse_count": top_k, "sparse_mode": docs.sparse_mode, "return_value": return_value}
    return dict.fromkeys(LENGTHS) | tensors | options | {"layout_query": docs.layout}


def parts_of(docs: Documents, heads: tuple[int, int], size: int) -> list[list[Tensor]]:
    query_heads, key_heads = heads
    return [docs.random(False, query_heads, size), docs.random(True, key_heads, size), docs.random(False, query_heads)]


def check(docs: Documents, parts: list[list[Tensor]], top_k: int, run: Any = INDEXER.cuda) -> None:
    """Check the best keys of each row, ascending, up to the error of the scores; with and without scores."""
    indices, values = (tensor.cpu() for tensor in run(**arguments(docs, parts, top_k)))
    only_indices, nothing = run(**arguments(docs, parts, top_k, return_value=False))
    assert torch.equal(only_indices.cpu(), indices) and nothing.shape == (0,) and nothing.dtype == docs.dtype
    assert (indices.dtype, values.dtype) == (torch.int32, docs.dtype)
    assert (docs.padding(indices, False) == -1).all() and (docs.padding(values, False) == -torch.inf).all()
    for q, k, w, visible, chosen, scores in zip(
        *parts, docs.visible(), docs.split(indices, False), docs.split(values, False), strict=True
    ):
        oracle = Scores(q, k, w, docs.u)
        count = visible.sum(1).clamp(max=top_k)[:, None, None]
        held = torch.arange(top_k) < count
        assert ((chosen >= 0) == held).all() and (scores[~held.expand_as(chosen)] == -torch.inf).all()
        assert (chosen[..., 1:] > chosen[..., :-1])[held.expand_as(chosen)[..., 1:]].all()
        if not len(k):
            continue
        entries = chosen.clamp_min(0).long()
        expected, budget = (t.gather(-1, entries) for t in (oracle.scores, oracle.budget))
        held = held.expand_as(chosen)
        exact, rounded = (t.masked_fill(~held, 0) for t in (expected, budget + rounding_budget(expected, docs.dtype)))
        assert_within("scores", scores.masked_fill(~held, 0), exact, rounded)
        left = visible[:, None].expand_as(oracle.scores).clone()
        left &= ~torch.zeros_like(left, dtype=torch.int).scatter_add_(-1, entries, held.int()).bool()
        worst = (expected + budget).masked_fill(~held, torch.inf).amin(-1)
        assert (worst >= (oracle.scores - oracle.budget).masked_fill(~left, -torch.inf).amax(-1)).all()


@settings(max_examples=8, deadline=None)
@given(
    kernel_documents(),
    st.sampled_from([(1, 1), (4, 1), (6, 2)]),
    st.sampled_from([1, 3, 9]),
    st.booleans(),
)
def test_agrees_with_the_oracle(docs: Documents, heads: tuple[int, int], top_k: int, float_weights: bool) -> None:
    parts = parts_of(docs, heads, 5)
    if float_weights:
        parts[2] = [part.float() for part in parts[2]]
    check(docs, parts, top_k)


@pytest.mark.parametrize("layout", ["BSND", "TND"])
def test_chunk_sizes_do_not_affect_the_result(layout: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows, keys and the values of a row are chunked, and a program's rows belong to several documents."""
    monkeypatch.setattr("torchtitan_npu.gpu_kernels.lightning_indexer.triton.WORKSPACE", 0)
    monkeypatch.setattr("torchtitan_npu.gpu_kernels.lightning_indexer.triton.SPAN", 32)
    monkeypatch.setattr("torchtitan_npu.gpu_kernels.lightning_indexer.triton_top_k.SEGMENT", 16)
    sizes = [(4, 3), (1, 40), (0, 2), (1, 0), (1, 35)]
    docs = docs_of(layout, sizes, torch.float32, arranged="strided")
    check(docs, parts_of(docs, (2, 1), 20), 5)


def test_chunks_of_causal_sequences_without_lengths(monkeypatch: pytest.MonkeyPatch) -> None:
    """A row is searched up to the last key that its chunk of 16 rows sees: in the first chunk 17, one more than 16."""
    monkeypatch.setattr("torchtitan_npu.gpu_kernels.lightning_indexer.triton.WORKSPACE", 0)
    docs = docs_of("BSND", [(20, 21)] * 2, torch.float32)
    check(docs, parts_of(docs, (1, 1), 5), 16)


def test_sizes_of_deepseek_v32(half: torch.dtype) -> None:
    docs = docs_of("BSND", [(3, 133)] * 2, half)
    check(docs, parts_of(docs, (64, 1), 128), 64)


def check_nan(docs: Documents, heads: tuple[int, int], size: int, run: Any = INDEXER.cuda) -> None:
    """A NaN key has a NaN score and is selected first, as torch sorts it, so that it is noticed."""
    parts = parts_of(docs, heads, size)
    key = len(parts[1][0]) - 2
    parts[1][0][key] = torch.nan
    indices, values = (tensor.flatten().cpu() for tensor in run(**arguments(docs, parts, 2)))
    assert key in indices.tolist() and values[indices == key].isnan().all() and values.isnan().sum() == 1


def test_nan_is_selected() -> None:
    check_nan(docs_of("BSND", [(1, 6)], torch.float32, causal=False), (2, 1), 3)
