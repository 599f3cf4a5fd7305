"""``npu_sparse_flash_attention`` and its gradient: against a float64 oracle and dense attention."""

from __future__ import annotations

from unittest.mock import patch

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from tests._helpers.sparse_attention_check import assert_agrees, attention
from tests._helpers.sparse_oracle import Documents, documents
from torchtitan_npu.errors import UsageError
from torchtitan_npu.ops.sparse_flash_attention import selected_keys

npu_sparse_flash_attention = torch.ops.npu.npu_sparse_flash_attention
npu_sparse_flash_attention_grad = torch.ops.npu.npu_sparse_flash_attention_grad

NAMES = ("query", "key", "value", "query_rope", "key_rope")


@settings(max_examples=100, deadline=None)
@given(
    documents(),
    st.sampled_from([(1, 1), (4, 1), (6, 2)]),
    st.sampled_from([1, 3, 9]),
    st.booleans(),
    st.booleans(),
    st.sampled_from([1, 200, 2**25]),
)
def test_agrees_with_the_oracle(
    docs: Documents, heads: tuple[int, int], top_k: int, with_rope: bool, with_value: bool, chunk: int
) -> None:
    with patch.object(selected_keys, "CHUNK_ELEMENTS", chunk):
        assert_agrees(torch.ops.npu, docs, heads, top_k, with_rope, with_value)


def example(
    dtype: torch.dtype = torch.float64, batch: int = 2, queries: int = 4, keys: int = 6, heads: int = 4
) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)
    sizes = {"query": (queries, heads, 4), "key": (keys, 1, 4), "value": (keys, 1, 4)}
    sizes |= {"query_rope": (queries, heads, 2), "key_rope": (keys, 1, 2)}
    return {
        name: torch.randn(batch, *size, generator=generator, dtype=torch.float64).to(dtype).requires_grad_()
        for name, size in sizes.items()
    }


def selection(batch: int = 2, queries: int = 4, keys: int = 6, top_k: int = 3) -> Tensor:
    """Return keys that each causal row may attend to, as the indexer does: (batch, queries, 1, top_k)."""
    docs = Documents("BSND", [(queries, keys)] * batch, True, torch.float64, torch.Generator().manual_seed(1))
    return docs.lay_out(docs.select(top_k, 1, docs.visible()), -1)


@pytest.mark.parametrize("top_k", [6, 11])
@pytest.mark.parametrize("from_indexer", [True, False])
def test_all_keys_selected_equals_dense_causal_attention(top_k: int, from_indexer: bool) -> None:
    inputs = example(queries=6)
    if from_indexer:
        indices = selection(queries=6, top_k=top_k)
    else:  # every row selects all keys; the operator applies the causal mask
        indices = F.pad(torch.arange(6, dtype=torch.int32), (0, top_k - 6), value=-1).expand(2, 6, 1, top_k)
    out = attention(torch.ops.npu, inputs, indices)[0]
    q, k = (torch.cat([inputs[name], inputs[f"{name}_rope"]], -1).transpose(1, 2) for name in ("query", "key"))
    v = inputs["value"].transpose(1, 2)
    dense = F.scaled_dot_product_attention(q, k.expand_as(q), v.expand(-1, 4, -1, -1), is_causal=True, scale=0.3)
    dense = dense.transpose(1, 2)
    torch.testing.assert_close(out, dense, rtol=1e-13, atol=1e-13)
    tensors = [inputs[name] for name in NAMES]
    for one, other in zip(*(torch.autograd.grad(y.square().sum(), tensors) for y in (out, dense)), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-13)


def test_one_token() -> None:
    inputs = example(torch.float32, batch=1, queries=1, keys=1)
    out, maximum, total = attention(torch.ops.npu, inputs, torch.tensor([0, -1], dtype=torch.int32).view(1, 1, 1, 2))
    assert torch.equal(out, inputs["value"].expand_as(out)) and torch.equal(total, torch.ones_like(total))
    assert maximum.shape == (1, 1, 1, 4)


def test_one_tensor_as_key_and_value_has_one_gradient() -> None:
    inputs, indices = example(), selection()
    shared = {name: tensor for name, tensor in inputs.items() if name != "value"}
    both = shared | {"value": inputs["key"]}
    expected, actual = (
        torch.autograd.grad(attention(torch.ops.npu, given, indices)[0].sin().sum(), list(shared.values()))
        for given in (shared, both)
    )
    assert all(map(torch.equal, actual, expected))


def test_minus_one_is_never_gathered() -> None:
    """The first and last key, which an index of -1 would read, do not affect rows that did not select them."""
    inputs = {name: tensor.detach() for name, tensor in example(batch=1).items()}
    indices = torch.tensor([[2, -1], [3, 1], [-1, -1], [1, -1]], dtype=torch.int32).view(1, 4, 1, 2)
    results = []
    for poison in (0.0, torch.nan):
        poisoned = {name: tensor.clone() for name, tensor in inputs.items()}
        for name in ("key", "value", "key_rope"):
            poisoned[name][:, [0, -1]] = poison
        leaves = {name: tensor.requires_grad_() for name, tensor in poisoned.items()}
        out, maximum, total = attention(torch.ops.npu, leaves, indices, sparse_mode=0)
        grads = torch.autograd.grad(out.square().sum(), list(leaves.values()))
        results.append((out.detach(), maximum, total, *grads))
    for clean, poisoned_result in zip(*results, strict=True):
        assert torch.equal(clean, poisoned_result)
    out, maximum, total, _, d_key, *_ = results[0]
    assert (out[:, 2] == 0).all() and (maximum[:, :, 2] == -torch.inf).all() and (total[:, :, 2] == 0).all()
    assert (d_key[:, [0, -1]] == 0).all()


def test_gradients_stop_where_torch_npu_has_none() -> None:
    inputs, indices = example(torch.float32), selection()
    out, maximum, total = attention(torch.ops.npu, inputs, indices)
    assert out.requires_grad and not maximum.requires_grad and not total.requires_grad
    out = attention(torch.ops.npu, inputs, indices, return_softmax_lse=False)[0]
    with pytest.raises(
        UsageError, match=r"npu_sparse_flash_attention_grad: softmax_max must be .*return_softmax_lse=True"
    ):
        out.sum().backward()
