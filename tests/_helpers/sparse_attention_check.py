"""Check sparse attention and its gradients on random documents against the float64 oracle."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tests._helpers.error_budget import assert_within, rounding_budget, unit_roundoff
from tests._helpers.sparse_oracle import Attention, Documents, dense_mask, leaf
from torchtitan_npu.gpu_kernels.sparse_flash_attention.triton_grad import contribution_dtype

OF_KEY = {"query": False, "key": True, "value": True, "query_rope": False, "key_rope": True}


def attention(
    npu: Any, inputs: dict[str, Tensor], indices: Tensor, scale: float = 0.3, **options: Any
) -> tuple[Tensor, Tensor, Tensor]:
    ropes = {name: inputs.get(name) for name in ("query_rope", "key_rope")}
    options = {"attention_mode": 2, "return_softmax_lse": True} | ropes | options
    return npu.npu_sparse_flash_attention(
        inputs["query"], inputs["key"], inputs.get("value"), indices, scale, **options
    )


def assert_agrees(
    npu: Any,
    docs: Documents,
    heads: tuple[int, int],
    top_k: int,
    with_rope: bool,
    with_value: bool,
    device: str = "cpu",
    rounds: bool = False,
    size: int = 4,
    rope: int = 2,
    scale: float = 0.3,
) -> None:
    """Check one call. ``npu`` is the namespace of the operator, ``heads`` those of query and key.

    ``size`` and ``rope`` are the numbers of features. With ``rounds``, the kernel rounds the softmax and its gradient
    to the inputs' dtype.
    """
    query_heads, key_heads = heads
    sizes = {"query": (query_heads, size), "key": (key_heads, size)}
    if with_value:
        sizes["value"] = (key_heads, size)
    if with_rope:
        sizes |= {"query_rope": (query_heads, rope), "key_rope": (key_heads, rope)}
    parts = {name: docs.random(OF_KEY[name], *size) for name, size in sizes.items()}
    # any keys of the document: the operator masks those beyond the causal boundary
    indices = docs.select(top_k, key_heads, (torch.ones_like(visible) for visible in docs.visible()))
    inputs = {name: leaf(docs.lay_out(part).to(device)) for name, part in parts.items()}
    lengths = docs.lengths("actual_seq_lengths_query", "actual_seq_lengths_kv")
    lengths = {name: tensor.to(device) for name, tensor in lengths.items()}
    options = {"layout_query": docs.layout, "layout_kv": docs.layout, "sparse_mode": docs.sparse_mode}
    out, maximum, total = attention(npu, inputs, docs.lay_out(indices, 0).to(device), scale, **options, **lengths)

    statistics = (*inputs["query"].shape[:-3], key_heads, inputs["query"].shape[-3], query_heads // key_heads)
    assert out.dtype == docs.dtype and maximum.dtype == total.dtype == docs.compute
    assert maximum.shape == total.shape == statistics
    # padding is NaN, so a result that read it would be NaN
    assert (docs.padding(out, False) == 0).all()
    d_out = torch.randn(out.shape, generator=docs.generator).to(docs.dtype)
    out.backward(docs.arrange(d_out.to(device)))

    results = (out.detach().cpu(), *(t.transpose(-2, -3).cpu() for t in (maximum, total)), d_out)
    by_row = [docs.split(t, False) for t in results]
    grads = {name: docs.split(tensor.grad.cpu(), OF_KEY[name]) for name, tensor in inputs.items()}
    # an exponential is rounded, scaled to its row's maximum, and rounded again
    rounded = 2 * unit_roundoff(docs.dtype) if rounds else 0.0
    in_order = rounds and torch.are_deterministic_algorithms_enabled()
    added = unit_roundoff(contribution_dtype(docs.dtype)) if in_order else 0.0
    for document, visible in enumerate(docs.visible()):
        part = {name: tensors[document] for name, tensors in parts.items()}
        q, k = (
            torch.cat([part[name], part[f"{name}_rope"]], -1) if with_rope else part[name] for name in ("query", "key")
        )
        v = part.get("value", part["key"])
        oracle = Attention(q, k, dense_mask(indices[document], visible), scale, docs.u, rounded, added)
        got, highest, sums, dy = (tensors[document] for tensors in by_row)
        value, budget = oracle.output(v)
        assert_within("out", got, value, budget + rounding_budget(value, docs.dtype))
        assert_within("sum", sums, oracle.sum, oracle.sum_error)
        seen = oracle.any.expand_as(highest)
        assert_within("max", highest[seen], oracle.max[seen], oracle.max_error[seen])
        assert (highest[~seen] == -torch.inf).all()

        expected = oracle.gradients(v, got, dy)
        if with_rope:
            for name in ("query", "key"):
                for parts_of, suffix in zip(
                    zip(*(t.split([size, rope], -1) for t in expected[name]), strict=True), ("", "_rope"), strict=True
                ):
                    expected[f"{name}{suffix}"] = parts_of
        if not with_value:
            expected["key"] = tuple(sum(t) for t in zip(expected["key"], expected.pop("value"), strict=True))
        for name, (value, budget) in expected.items():
            got = grads[name][document]
            assert_within(f"gradient of {name}", got, value, budget + rounding_budget(value, docs.dtype))
    for name, tensor in inputs.items():
        assert (docs.padding(tensor.grad, OF_KEY[name]) == 0).all()
