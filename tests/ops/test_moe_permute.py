"""``npu_moe_token_permute``, ``npu_moe_token_unpermute`` and their gradients: against the definitions, in float64."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor

from tests._helpers.error_budget import assert_within, compute_dtype, rounding_budget, unit_roundoff
from torchtitan_npu.ops import moe_permute as function
from torchtitan_npu.planner import Calls

permute = torch.ops.npu.npu_moe_token_permute
unpermute = torch.ops.npu.npu_moe_token_unpermute
DTYPES = [torch.float16, torch.bfloat16, torch.float32, torch.float64]


def positions_of(indices: list[int]) -> list[int]:
    """Return ``sorted_indices`` by its definition: the position of each slot after a stable sort by expert."""
    order = sorted(range(len(indices)), key=lambda slot: indices[slot])  # Python's sort is stable
    return [order.index(slot) for slot in range(len(indices))]


def permutation_matrix(positions: Tensor, rows: int) -> Tensor:
    """Return the permutation matrix (slots, rows) in float64; dropped slots have no row."""
    return (positions.unsqueeze(1) == torch.arange(rows)).double()


def any_strides(tensor: Tensor, kind: str) -> Tensor:
    if kind == "transposed":
        return tensor.t().contiguous().t()
    return torch.stack([tensor, tensor], dim=-1)[..., 0] if kind == "strided" else tensor


@st.composite
def routes(draw: st.DrawFn) -> tuple[int, int, int, list[int], int | None, torch.dtype, str, int]:
    """Draw tokens, top-k, hidden size, the expert of each slot, num_out_tokens, dtype, strides and seed."""
    tokens, top_k = draw(st.integers(0, 5)), draw(st.integers(1, 4))
    slots = tokens * top_k
    experts = draw(st.sampled_from([1, 3, 8]))  # 1: all tokens to one expert; 8: experts without tokens
    indices = draw(st.lists(st.integers(0, experts - 1), min_size=slots, max_size=slots))
    num_out_tokens = draw(st.one_of(st.none(), st.integers(-slots, slots + 2)))
    kind = draw(st.sampled_from(["contiguous", "transposed", "strided"]))
    return (
        tokens,
        top_k,
        draw(st.integers(1, 6)),
        indices,
        num_out_tokens,
        draw(st.sampled_from(DTYPES)),
        kind,
        draw(st.integers(0, 2**32 - 1)),
    )


@settings(max_examples=100, deadline=None)
@given(routes())
@example((1, 1, 1, [0], None, torch.float32, "contiguous", 0))
def test_permute_agrees_with_its_definition(route: tuple[Any, ...]) -> None:
    count, top_k, hidden, indices, num_out_tokens, dtype, kind, seed = route
    generator = torch.Generator().manual_seed(seed)
    tokens = any_strides(torch.randn(count, hidden, generator=generator).to(dtype), kind)
    experts = torch.tensor(indices, dtype=[torch.int32, torch.int64][seed % 2]).view(count, top_k)
    permuted, positions = permute(tokens, experts.t().contiguous().t(), num_out_tokens)

    assert positions.tolist() == positions_of(indices) and positions.dtype == torch.int32
    rows = range(count * top_k)[: num_out_tokens or None]
    assert permuted.shape == (len(rows), hidden) and permuted.dtype == dtype
    for slot, position in enumerate(positions.tolist()):
        if position in rows:
            assert torch.equal(permuted[position], tokens[slot // top_k])
    if top_k == 1:
        again = permute(tokens, experts.flatten(), num_out_tokens)
        assert torch.equal(again[0], permuted) and torch.equal(again[1], positions)
        if len(rows) == count:
            assert torch.equal(unpermute(permuted, positions), tokens)


@settings(max_examples=100, deadline=None)
@given(routes(), st.booleans())
def test_unpermute_and_all_gradients_agree_with_the_oracle(route: tuple[Any, ...], with_probs: bool) -> None:
    count, top_k, hidden, indices, num_out_tokens, dtype, kind, seed = route
    top_k = top_k if with_probs else 1
    indices = indices[: count * top_k]
    num_out_tokens = None if num_out_tokens is None else max(num_out_tokens, -len(indices))
    generator = torch.Generator().manual_seed(seed)
    positions = torch.tensor(positions_of(indices), dtype=torch.int32)
    rows = len(range(len(indices))[: num_out_tokens or None])

    def random(*shape: int) -> Tensor:
        return any_strides(torch.randn(shape, generator=generator).to(dtype), kind)

    permuted, grad, grad_rows = random(rows, hidden), random(count, hidden), random(rows, hidden)
    probs = random(count, top_k) if with_probs else None
    compute = unit_roundoff(compute_dtype(dtype))

    # the formula in float64, differentiated by PyTorch
    matrix = permutation_matrix(positions, rows)
    weights = torch.ones(count, top_k) if probs is None else probs
    p, w, t = (x.detach().double().requires_grad_() for x in (permuted, weights, grad))
    expected = torch.einsum("tk,tkr,rh->th", w, matrix.view(count, top_k, rows), p)
    expected_p, expected_w = torch.autograd.grad(expected, (p, w), grad.double())
    copied = torch.einsum("tkr,th->rh", matrix.view(count, top_k, rows), t)
    (expected_t,) = torch.autograd.grad(copied, t, grad_rows.double())

    inputs = [permuted.detach().requires_grad_()] + ([] if probs is None else [probs.detach().requires_grad_()])
    actual = unpermute(inputs[0], positions, *inputs[1:])
    grads = torch.autograd.grad(actual, inputs, grad)
    assert [actual.dtype, *(g.dtype for g in grads)] == [dtype] * (1 + len(grads))

    size = torch.einsum("tk,tkr,rh->th", w.abs(), matrix.view(count, top_k, rows), p.abs())
    assert_within("unpermuted", actual, expected, size * (top_k + 1) * compute + rounding_budget(expected, dtype))
    assert_within("d permuted", grads[0], expected_p, rounding_budget(expected_p, dtype) * 2)
    if with_probs:
        size = torch.einsum("tkr,rh,th->tk", matrix.view(count, top_k, rows), p.abs(), grad.double().abs())
        budget = size * (hidden + 1) * compute + rounding_budget(expected_w, dtype)
        assert_within("d probs", grads[1], expected_w, budget)

    tokens = random(count, hidden).detach().requires_grad_()
    again, same_positions = permute(tokens, torch.tensor(indices, dtype=torch.int64).view(count, top_k), num_out_tokens)
    assert torch.equal(same_positions, positions)
    (grad_tokens,) = torch.autograd.grad(again, tokens, grad_rows)
    size = torch.einsum("tkr,rh->th", matrix.view(count, top_k, rows), grad_rows.double().abs())
    assert_within("d tokens", grad_tokens, expected_t, size * top_k * compute + rounding_budget(expected_t, dtype))


def call(dtype: torch.dtype = torch.float32, num_out_tokens: int | None = None) -> dict[str, Any]:
    """Return a call of each operator on four tokens with two experts each; one expert has no tokens."""
    torch.manual_seed(0)
    tokens, indices = torch.randn(4, 6, dtype=dtype), torch.tensor([[0, 3], [3, 1], [1, 0], [3, 0]])
    permuted, positions = permute(tokens, indices, num_out_tokens)
    probs, grad = torch.rand(4, 2, dtype=dtype), torch.randn(4, 6, dtype=dtype)
    rows = len(permuted)
    return {
        "npu_moe_token_permute": (tokens, indices, num_out_tokens),
        "npu_moe_token_permute_grad_v2": (permuted, positions, 4, dtype, 2),
        "npu_moe_token_unpermute": (permuted, positions, probs),
        "_npu_moe_token_unpermute": (permuted, positions, probs),
        "npu_moe_token_unpermute_grad_v2": (grad, positions, rows, dtype, probs, False, None, permuted),
    }


def test_the_documented_example() -> None:
    tokens = torch.tensor([[1, 1], [2, 2], [3, 3], [4, 4]], dtype=torch.float16)
    permuted, positions = permute(tokens, torch.tensor([[0, 1], [1, 0], [0, 2], [2, 0]]))
    assert permuted[:, 0].tolist() == [1, 2, 3, 4, 1, 2, 3, 4]
    assert positions.tolist() == [0, 4, 5, 1, 2, 6, 7, 3]
    assert torch.equal(unpermute(permuted, positions, torch.full((4, 2), 0.5, dtype=torch.float16)), tokens)


def test_float32_probs_weight_bfloat16_tokens_in_float32() -> None:
    permuted, positions = torch.tensor([[1.0], [-1.0]], dtype=torch.bfloat16), torch.tensor([0, 1], dtype=torch.int32)
    probs = torch.tensor([[1 + 2.0**-10, 1.0]], requires_grad=True)  # in bfloat16 the two would be equal
    out = unpermute(permuted, positions, probs)
    assert out.item() == 2.0**-10 and out.dtype == torch.bfloat16
    out.sum().backward()
    assert probs.grad.tolist() == [[1.0, -1.0]] and probs.grad.dtype == torch.float32


def test_opcheck_without_probs() -> None:
    permuted, positions, _ = call()["npu_moe_token_unpermute"]
    torch.library.opcheck(unpermute.default, (permuted.requires_grad_(), positions))
    arguments = (torch.ones(8, 6), positions, 8, torch.float32)
    torch.library.opcheck(torch.ops.npu.npu_moe_token_unpermute_grad_v2.default, arguments)


def test_autograd_calls_the_operators_that_torch_npu_calls() -> None:
    tokens, indices, _ = call()["npu_moe_token_permute"]
    probs = torch.rand(4, 2, requires_grad=True)
    with Calls() as calls:
        permuted, positions = permute(tokens.requires_grad_(), indices)
        unpermute(permuted, positions, probs).sum().backward()
    names = ("npu_moe_token_permute", "_npu_moe_token_unpermute")
    names += ("npu_moe_token_unpermute_grad_v2", "npu_moe_token_permute_grad_v2")
    assert calls.count("npu") == dict.fromkeys(names, 1)
    assert tokens.grad is not None and probs.grad is not None and not positions.requires_grad
    with torch.inference_mode():
        assert torch.equal(
            unpermute(permuted, positions, probs), unpermute(permuted.detach(), positions, probs.detach())
        )


def test_gradients_of_the_function() -> None:
    """The function calls the gradient operator itself, in float64 here: with scores, and without."""
    generator = torch.Generator().manual_seed(0)
    rows = torch.randn(6, 4, dtype=torch.float64, generator=generator, requires_grad=True)
    scores = torch.rand(3, 2, dtype=torch.float64, generator=generator, requires_grad=True)
    positions = torch.randperm(6, generator=generator).int()
    assert torch.autograd.gradcheck(
        lambda *x: function.weighted_unpermute(x[0], positions, x[1], x[0].dtype), (rows, scores)
    )
    assert torch.autograd.gradcheck(lambda x: function.unpermute(x, positions), (rows,))
    torch.testing.assert_close(function.unpermute(rows, positions), rows[positions])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_the_function_returns_gradients_in_the_dtypes_of_its_arguments(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    rows = torch.randn(6, 4, generator=generator).bfloat16().requires_grad_()
    scores, positions = torch.rand(3, 2, generator=generator, requires_grad=True), torch.randperm(6).int()
    out = function.weighted_unpermute(rows, positions, scores, dtype)
    assert out.dtype == dtype
    assert [grad.dtype for grad in torch.autograd.grad(out.sum(), (rows, scores))] == [torch.bfloat16, torch.float32]
    (only_scores,) = torch.autograd.grad(
        function.weighted_unpermute(rows.detach(), positions, scores, dtype).sum(), (scores,)
    )
    assert only_scores.dtype == torch.float32
