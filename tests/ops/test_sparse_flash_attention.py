"""``npu_sparse_flash_attention`` and its gradient: against a float64 oracle; shapes, checks, limits, sharding."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from tests._helpers.op_cases.sparse_attention import CASES
from tests._helpers.sparse_attention_check import assert_agrees, attention
from tests._helpers.sparse_oracle import Documents, documents
from torchtitan_npu.errors import UsageError
from torchtitan_npu.ops import OPS
from torchtitan_npu.ops.sparse_flash_attention import selected_keys

npu_sparse_flash_attention = torch.ops.npu.npu_sparse_flash_attention
npu_sparse_flash_attention_grad = torch.ops.npu.npu_sparse_flash_attention_grad

NAMES = ("query", "key", "value", "query_rope", "key_rope")


@settings(max_examples=100, deadline=None)
@given(documents(), st.sampled_from([(1, 1), (4, 1), (6, 2)]), st.sampled_from([1, 3, 9]), st.booleans(), st.booleans())
def test_agrees_with_the_oracle(
    docs: Documents, heads: tuple[int, int], top_k: int, with_rope: bool, with_value: bool
) -> None:
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


def test_packed_documents_are_the_rows_of_a_batch() -> None:
    inputs, indices = example(), selection()
    whole = attention(torch.ops.npu, inputs, indices)
    ends = {
        f"actual_seq_lengths_{of}": torch.arange(1, 3, dtype=torch.int32) * inputs[name].shape[1]
        for of, name in (("query", "query"), ("kv", "key"))
    }
    packed_inputs = {name: tensor.flatten(0, 1) for name, tensor in inputs.items()}
    packed = attention(torch.ops.npu, packed_inputs, indices.flatten(0, 1), layout_query="TND", layout_kv="TND", **ends)
    assert torch.equal(whole[0].flatten(0, 1), packed[0])
    for one, other in zip(whole[1:], packed[1:], strict=True):  # (B, 1, S, N) and (1, T, N)
        assert torch.equal(one[:, 0].flatten(0, 1), other[0])
    tensors = list(inputs.values())
    for one, other in zip(*(torch.autograd.grad(y[0].square().sum(), tensors) for y in (whole, packed)), strict=True):
        assert torch.equal(one, other)


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


def test_chunks_do_not_matter(monkeypatch: pytest.MonkeyPatch) -> None:
    inputs, indices = example(), selection()
    results = []
    for elements in (1, 200, 2**25):
        monkeypatch.setattr(selected_keys, "CHUNK_ELEMENTS", elements)
        outputs = attention(torch.ops.npu, inputs, indices)
        results.append((*outputs, *torch.autograd.grad(outputs[0].square().sum(), list(inputs.values()))))
    for result in results[:2]:
        for one, other in zip(result, results[2], strict=True):
            torch.testing.assert_close(one, other, rtol=1e-13, atol=1e-13)  # some hundred roundings in float64


def test_gradients_stop_where_torch_npu_has_none() -> None:
    inputs, indices = example(torch.float32), selection()
    out, maximum, total = attention(torch.ops.npu, inputs, indices)
    assert out.requires_grad and not maximum.requires_grad and not total.requires_grad
    out = attention(torch.ops.npu, inputs, indices, return_softmax_lse=False)[0]
    with pytest.raises(
        UsageError, match=r"npu_sparse_flash_attention_grad: softmax_max must be .*return_softmax_lse=True"
    ):
        out.sum().backward()


@pytest.mark.parametrize("case", [c for c in CASES if c.rejected_by and "sparse_flash" in c.op], ids=str)
def test_names_the_bad_argument(case: Any) -> None:
    for device in ("cpu", "meta"):  # the fake kernel checks too
        args, kwargs = case.arguments(device)
        with pytest.raises(UsageError, match=f"{case.op}: .* must"):
            getattr(torch.ops.npu, case.op)(*args, **kwargs)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"sinks": torch.ones(4)}, "sinks must be None"),
        ({"block_table": torch.ones(2, 1, dtype=torch.int32)}, "block_table must be None"),
        ({"pre_tokens": 7}, r"pre_tokens must be 2\*\*63 - 1, not 7"),
        ({"query_rope": torch.ones(2, 4, 3, 2)}, r"query_rope must have the shape of query, \(2, 4, 4, '...'\)"),
        ({"key_rope": torch.ones(2, 6, 1, 3)}, "key_rope must have the head size of query_rope, 2, not 3"),
        ({"actual_seq_lengths_kv": torch.tensor([6, 6])}, "actual_seq_lengths_kv must be torch.int32 of one dimension"),
        (
            {"actual_seq_lengths_kv": torch.tensor([6], dtype=torch.int32)},
            "actual_seq_lengths_kv must have one length for each row of the batch, 2, not 1",
        ),
    ],
)
def test_names_other_bad_arguments(change: dict[str, Any], message: str) -> None:
    inputs = {name: tensor.detach() for name, tensor in example(torch.float32).items()}
    with pytest.raises(UsageError, match=f"npu_sparse_flash_attention: {message}"):
        attention(torch.ops.npu, inputs, selection(), **change)


def test_limits_bind_only_the_npu() -> None:
    inputs = {name: tensor.detach() for name, tensor in example(torch.float32, heads=3).items()}
    attention(torch.ops.npu, inputs, selection())
    arguments = inputs | {"sparse_indices": selection()}
    sizes = [
        "query.dtype is float32; the NPU kernel supports float16, bfloat16",
        "the number of heads of query is 3; the NPU kernel supports 1, 2, 4, 8, 16, 32, 64, 128",
        "the head size of query is 4; the NPU kernel supports 512",
        "the head size of query_rope is 2; the NPU kernel supports None, 64",
    ]
    top_k = "top-k is 3; the NPU kernel supports 1024, 2048, 3072, 4096, 5120, 6144, 7168, 8192"
    for op, refused in (("npu_sparse_flash_attention", sizes), ("npu_sparse_flash_attention_grad", [*sizes, top_k])):
        assert OPS[op].limit_errors(**arguments) == [f"{op}: {text}" for text in refused]
    query = torch.ones(1, 2, 16, 512, dtype=torch.bfloat16)
    indices = torch.zeros(1, 2, 1, 2048, dtype=torch.int32)
    arguments = {"query": query, "key": query[:, :, :1].contiguous(), "value": None, "sparse_indices": indices}
    arguments |= {"query_rope": None, "key_rope": None}
    assert OPS["npu_sparse_flash_attention"].limit_errors(**arguments) == []
    assert OPS["npu_sparse_flash_attention_grad"].limit_errors(**arguments) == []
    both = torch.ones(1, 2, 16, 576, dtype=torch.bfloat16)  # a half of a projection is a strided view
    key, key_rope = both[:, :, :1].split([512, 64], -1)
    views = {"query_rope": both[..., 512:], "key": key, "value": key, "key_rope": key_rope}
    assert OPS["npu_sparse_flash_attention"].limit_errors(**arguments | views) == [
        f"npu_sparse_flash_attention: {name}'s memory is not contiguous; the NPU kernel supports contiguous"
        for name in ("key", "value", "query_rope", "key_rope")
    ]
