"""``npu_fusion_attention`` and its gradient: against a float64 oracle and ``F.scaled_dot_product_attention``."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor
from torch.utils._python_dispatch import TorchDispatchMode

from tests._helpers import attention_oracle
from tests._helpers.error_budget import assert_within, compute_dtype, rounding_budget
from tests._helpers.multirank import run_on_ranks
from torchtitan_npu.errors import UsageError
from torchtitan_npu.ops.fusion_attention import reference

npu_fusion_attention = torch.ops.npu.npu_fusion_attention
npu_fusion_attention_grad = torch.ops.npu.npu_fusion_attention_grad
CAUSAL = torch.ones(2048, 2048, dtype=torch.bool).triu(1)


@dataclass
class Call:
    """A call, the gradient of its output, and the keys that each document's queries attend to."""

    query: Tensor
    key: Tensor
    value: Tensor
    dy: Tensor
    heads: int
    key_heads: int
    layout: str
    keywords: dict[str, Any]
    visible: list[Tensor]

    def tensors(self) -> tuple[Tensor, Tensor, Tensor]:
        return self.query, self.key, self.value

    def run(self, *tensors: Tensor) -> tuple[Any, ...]:
        return npu_fusion_attention(*(tensors or self.tensors()), self.heads, self.layout, **self.keywords)

    def split(self, tensor: Tensor, what: str) -> list[Tensor]:
        """Split a tensor of queries or of keys by documents."""
        heads, ends = (self.heads, "actual_seq_qlen") if what == "queries" else (self.key_heads, "actual_seq_kvlen")
        return attention_oracle.documents(tensor, self.layout, heads, self.keywords.get(ends))

    def statistics(self, packed: Tensor) -> list[Tensor]:
        ends = self.keywords.get("actual_seq_qlen")
        return attention_oracle.statistics(packed, self.layout, self.keywords.get("softmax_layout", ""), ends)


STRIDES = {
    "contiguous": lambda t: t,
    "transposed": lambda t: t.transpose(0, 1).contiguous().transpose(0, 1),
    "strided": lambda t: torch.stack([t, t], dim=-1)[..., 0],
}


def lay_out(rows: Tensor, layout: str) -> Tensor:
    """Return (B, S, N, D) in another layout."""
    if layout == "BNSD":
        return rows.transpose(1, 2).contiguous()
    if layout == "BSH":
        return rows.flatten(2)
    if layout == "SBH":
        return rows.transpose(0, 1).flatten(2)
    return rows[0] if layout == "TND" else rows


def make_call(
    layout: str = "BSND",
    queries: list[int] | int = 6,
    keys: list[int] | int = 5,
    batch: int = 2,
    key_heads: int = 2,
    group: int = 2,
    size: int = 8,
    value_size: int = 8,
    dtype: torch.dtype = torch.float32,
    sparse_mode: int = 0,
    mask: str = "none",
    strides: str = "contiguous",
    softmax_layout: str = "",
    seed: int = 0,
) -> Call:
    """Return a call. In TND, ``queries`` and ``keys`` are document lengths. ``mask`` is none or a layout (SS, B1SS)."""
    generator = torch.Generator().manual_seed(seed)
    lengths = [(queries, keys)] * batch if isinstance(queries, int) else list(zip(queries, keys, strict=True))  # type: ignore[arg-type]
    packed = layout == "TND"
    sums = tuple(sum(pair[i] for pair in lengths) for i in range(2)) if packed else (queries, keys)
    heads = key_heads * group

    def make(length: int, n: int, d: int) -> Tensor:
        rows = torch.randn(1 if packed else batch, length, n, d, generator=generator, dtype=torch.float64).to(dtype)
        return STRIDES[strides](lay_out(rows, layout))

    keywords: dict[str, Any] = {"scale": 1 / math.sqrt(size), "sparse_mode": sparse_mode}
    if packed:
        ends = torch.tensor(lengths).cumsum(0)
        keywords |= {"actual_seq_qlen": ends[:, 0].tolist(), "actual_seq_kvlen": ends[:, 1].tolist()}
        keywords["softmax_layout"] = softmax_layout
    visible = [torch.ones(1, *pair, dtype=torch.bool) for pair in lengths]
    if sparse_mode in (2, 3):
        keywords["atten_mask"] = CAUSAL
        visible = [one.tril(k - q if sparse_mode == 3 else 0) for one, (q, k) in zip(visible, lengths, strict=True)]
    elif mask != "none":
        shape = [max(pair[i] for pair in lengths) for i in range(2)] if packed else [queries, keys]
        leading = {"SS": [], "11SS": [1, 1], "B1SS": [batch, 1], "BNSS": [batch, heads]}[mask]
        hidden = torch.rand(*leading, *shape, generator=generator) < 0.4
        keywords["atten_mask"] = hidden
        if mask == "SS":
            visible = [~hidden[None, :q, :k] for q, k in lengths]
        else:
            visible = [~hidden[i if hidden.shape[0] > 1 else 0] for i in range(batch)]
    tensors = make(sums[0], heads, size), make(sums[1], key_heads, size), make(sums[1], key_heads, value_size)
    return Call(*tensors, make(sums[0], heads, value_size), heads, key_heads, layout, keywords, visible)


@st.composite
def calls(draw: st.DrawFn) -> Call:
    layout = draw(st.sampled_from(["BSND", "BNSD", "TND", "TND", "BSH", "SBH"]))
    packed = layout == "TND"
    batch = draw(st.integers(1, 3) if packed else st.integers(0, 2))
    lengths = st.lists(st.integers(0, 6), min_size=batch, max_size=batch) if packed else st.integers(1, 7)
    sparse_mode = draw(st.sampled_from([0, 1, 2, 3]))
    masks = ["SS"] if packed or not batch else ["SS", "11SS", "B1SS", "BNSS"]
    size = draw(st.integers(1, 6))
    return make_call(
        layout=layout,
        queries=draw(lengths),
        keys=draw(lengths),
        batch=batch,
        key_heads=draw(st.integers(1, 2)),
        group=draw(st.integers(1, 3)),
        size=size,
        value_size=draw(st.integers(1, size)),
        dtype=draw(st.sampled_from([torch.float16, torch.bfloat16, torch.float32, torch.float64])),
        sparse_mode=sparse_mode,
        mask=draw(st.sampled_from(masks if sparse_mode == 1 else ["none", *masks])),
        strides=draw(st.sampled_from(sorted(STRIDES))),
        softmax_layout=draw(st.sampled_from(["", "TND"])),
        seed=draw(st.integers(0, 2**32 - 1)),
    )


def check(call: Call) -> None:
    """Check outputs, statistics and gradients of one call."""
    dtype, precision = call.query.dtype, compute_dtype(call.query.dtype)
    leaves = [tensor.detach().requires_grad_() for tensor in call.tensors()]
    output, softmax_max, softmax_sum, softmax_out, *dropout = call.run(*leaves)
    assert (output.dtype, softmax_max.dtype, softmax_out.shape, dropout) == (dtype, precision, (0,), [0, 0, 0])
    output.backward(call.dy)

    queries = [call.split(tensor, "queries") for tensor in (call.query, call.dy, output.detach(), leaves[0].grad)]
    keys = [call.split(tensor, "keys") for tensor in (call.key, call.value, leaves[1].grad, leaves[2].grad)]
    softmax = call.statistics(softmax_max.detach()), call.statistics(softmax_sum.detach())
    scale = call.keywords["scale"]
    for (q, dy, o, dq), (k, v, dk, dv), (m, l), visible in zip(  # noqa: E741
        zip(*queries, strict=True), zip(*keys, strict=True), zip(*softmax, strict=True), call.visible, strict=True
    ):
        oracle = attention_oracle.forward(q, k, v, visible, scale, precision)
        assert_within("o", o, oracle.o, oracle.o_budget + rounding_budget(oracle.o, dtype))
        blind = ~visible.any(-1).expand(m.shape)
        assert (m[blind] == torch.finfo(precision).min).all() and (l[blind] == 0).all()
        assert_within("m", m[~blind], oracle.m[~blind], oracle.m_budget[~blind])
        assert_within("l", l[~blind], oracle.l[~blind], oracle.l_budget[~blind])

        grads = attention_oracle.backward(q, k, v, visible, scale, dy, o, m, l, precision)
        for name, actual, expected, budget in zip("qkv", (dq, dk, dv), grads.grads, grads.budgets, strict=True):
            assert_within(f"d{name}", actual, expected, budget + rounding_budget(expected, dtype))


@settings(max_examples=120, deadline=None)
@given(calls(), st.sampled_from([1, 17, 1 << 24]))
def test_agrees_with_the_oracle(call: Call, scores_at_a_time: int) -> None:
    with patch.object(reference, "SCORES_AT_A_TIME", scores_at_a_time):
        check(call)


A_THOUSAND_ROUNDINGS = 2e-13
"""A float64 tolerance for two orders of the same short sums, far below the error of a wrong formula."""


@pytest.mark.parametrize("sparse_mode", [0, 2, 3])
def test_agrees_with_torch(sparse_mode: int) -> None:
    """In half precision torch rounds the probabilities, so compare in float32, and the gradients in float64."""
    for dtype in (torch.float32, torch.float64):
        call = make_call("BNSD", 7, 9, dtype=dtype, sparse_mode=sparse_mode, size=16, value_size=16)
        leaves = [tensor.requires_grad_() for tensor in call.tensors()]
        found, scale = call.run()[0], call.keywords["scale"]
        expected = F.scaled_dot_product_attention(*leaves, attn_mask=call.visible[0][0], scale=scale, enable_gqa=True)
        for i, visible in enumerate(call.visible):
            oracle = attention_oracle.forward(*(t[i].detach() for t in leaves), visible, scale, dtype)
            # both round within the same budget, so they differ by at most twice the budget
            assert_within("o", found[i], expected[i].double(), 2 * (oracle.o_budget + rounding_budget(oracle.o, dtype)))
    for one, other in zip(*(torch.autograd.grad(o, leaves, call.dy) for o in (found, expected)), strict=True):
        torch.testing.assert_close(one, other, rtol=A_THOUSAND_ROUNDINGS, atol=A_THOUSAND_ROUNDINGS)


def test_gradients_where_torch_npu_has_them() -> None:
    """As in torch_npu, every tensor output requires a gradient; that of a statistic is zero."""
    call = make_call()
    leaves = [tensor.requires_grad_() for tensor in call.tensors()]
    outputs = call.run()
    assert all(output.requires_grad for output in outputs[:4])
    assert not any(grad.any() for grad in torch.autograd.grad(outputs[1].sum(), leaves))


def test_holds_a_bounded_number_of_scores() -> None:
    largest = 0

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            nonlocal largest
            result = func(*args, **(kwargs or {}))
            if isinstance(result, Tensor) and result.dtype != torch.bool:
                largest = max(largest, result.numel())
            return result

    call = make_call("BSND", 64, 64, batch=1, size=4, value_size=4)
    keywords = {"actual_seq_qlen": None, "actual_seq_kvlen": None, "softmax_layout": "", "pre_tockens": 99}
    keywords |= {"next_tockens": 99, "atten_mask": torch.zeros(64, 64, dtype=torch.bool), "sparse_mode": 0}
    with Watch(), patch.object(reference, "SCORES_AT_A_TIME", 2048):
        o, m, l, *_ = reference.npu_fusion_attention(*call.tensors(), 4, "BSND", 1.0, **keywords)  # noqa: E741
        reference.npu_fusion_attention_grad(*call.tensors(), call.dy, 4, "BSND", m, l, o, 1.0, **keywords)
    assert largest == 2048  # of 4 × 64 × 64


def test_a_band_that_the_mask_implies_changes_nothing() -> None:
    call = make_call(dtype=torch.bfloat16)
    call.keywords["atten_mask"] = torch.ones(6, 5, dtype=torch.bool).triu(1)
    whole = call.run()[0]
    call.keywords |= {"next_tockens": 0, "pre_tockens": 6}
    assert torch.equal(call.run()[0], whole)


def uneven_heads_on_a_rank() -> str:
    mesh = init_device_mesh("cpu", (2,))
    call = make_call(key_heads=3, group=4)
    tensors = [distribute_tensor(tensor, mesh, [Shard(2)]) for tensor in call.tensors()]
    with pytest.raises(UsageError) as error:
        call.run(*tensors)
    return str(error.value)


def test_uneven_key_heads_are_an_error() -> None:
    """Three key heads on two ranks would be matched with the wrong query heads."""
    for message in run_on_ranks(2, uneven_heads_on_a_rank):
        assert message == "npu_fusion_attention: the 3 heads of key must divide evenly among the ranks"
