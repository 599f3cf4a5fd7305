"""Permute and unpermute in Triton, against the reference in float64, which has its own tests."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from tests._helpers.error_budget import assert_within, rounding_budget, unit_roundoff
from tests.gpu_kernels.kernel_checks import dtype_on, has_strides_of
from tests.ops.test_moe_permute import any_strides, positions_of, routes
from torchtitan_npu.gpu_kernels import moe_permute as kernels
from torchtitan_npu.ops import OPS


def run(name: str, reference: bool = False, **arguments: Any) -> Any:
    """Run the GPU kernel or, with ``reference``, the reference in float64."""
    if not reference:
        return OPS[name].cuda(**arguments)
    for key, value in arguments.items():
        if isinstance(value, Tensor) and value.is_floating_point():
            arguments[key] = value.double()
        elif isinstance(value, torch.dtype):
            arguments[key] = torch.float64
    return OPS[name].reference(**arguments)


def check(
    device: str,
    indices: Tensor,
    hidden: int,
    rows: int | None,
    dtype: torch.dtype,
    probs_dtype: torch.dtype,
    kind: str = "contiguous",
) -> None:
    """Check all operators on tokens of ``dtype`` with experts ``indices`` (tokens, top_k), for ``rows`` rows."""
    tokens, top_k = indices.shape

    def random(*shape: int, dtype: torch.dtype = dtype) -> Tensor:
        return any_strides(torch.randn(shape).to(device, dtype), kind)

    x, probs, grad = random(tokens, hidden), random(tokens, top_k, dtype=probs_dtype), random(tokens, hidden)
    indices = indices.to(device)
    permute = {"tokens": x, "indices": indices, "num_out_tokens": rows, "padded_mode": False}
    permuted, positions = run("npu_moe_token_permute", **permute)
    expected, expected_positions = run("npu_moe_token_permute", True, **permute)
    assert torch.equal(permuted.double(), expected) and permuted.is_contiguous() and permuted.dtype == dtype
    assert torch.equal(positions, expected_positions) and positions.dtype == torch.int32

    u = unit_roundoff(torch.float64 if torch.float64 in (dtype, probs_dtype) else torch.float32)
    given_rows = random(*permuted.shape)
    back = {"sorted_indices": positions, "padded_mode": False}
    sums = {"num_topK": top_k, "tokens_size_0": tokens, "tokens_dtype": dtype, "grad_permuted_tokens": given_rows}
    whole = run("npu_moe_token_permute_grad_v2", True, **sums, **back)
    magnitude = run("npu_moe_token_permute_grad_v2", True, **sums | {"grad_permuted_tokens": given_rows.abs()}, **back)
    budget = magnitude * top_k * u + rounding_budget(whole, dtype)
    assert_within("d tokens", run("npu_moe_token_permute_grad_v2", **sums, **back), whole, budget)

    weigh = {"permuted_tokens": given_rows, "probs": probs, "restore_shape": None, **back}
    whole = run("npu_moe_token_unpermute", True, **weigh)
    magnitude = run(
        "npu_moe_token_unpermute", True, **weigh | {"permuted_tokens": given_rows.abs(), "probs": probs.abs()}
    )
    actual, copy = run("_npu_moe_token_unpermute", **weigh)
    assert_within("unpermuted", actual, whole, magnitude * (top_k + 1) * u + rounding_budget(whole, dtype))
    assert torch.equal(copy, given_rows) and torch.equal(actual, run("npu_moe_token_unpermute", **weigh))

    sizes = {"permuted_tokens_size_0": len(given_rows), "permuted_tokens_dtype": dtype}
    gradient = {"grad_unpermuted_tokens": grad, **sizes, **weigh}
    d_rows, d_probs = run("npu_moe_token_unpermute_grad_v2", **gradient)
    whole, whole_probs = run("npu_moe_token_unpermute_grad_v2", True, **gradient)
    absolute = {"permuted_tokens": given_rows.abs(), "grad_unpermuted_tokens": grad.abs()}
    magnitude = run("npu_moe_token_unpermute_grad_v2", True, **gradient | absolute)[1]
    assert d_rows.dtype == dtype and d_rows.is_contiguous()
    assert d_probs.dtype == probs_dtype and has_strides_of(d_probs, probs)
    assert_within("d rows", d_rows, whole, whole.abs() * u + rounding_budget(whole, dtype))
    budget = magnitude * (hidden + 1) * u + rounding_budget(whole_probs, probs_dtype)
    assert_within("d probs", d_probs, whole_probs, budget)


@settings(max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(route=routes(), float32_probs=st.booleans())
def test_agrees_with_the_reference_in_float64(device: str, route: tuple[Any, ...], float32_probs: bool) -> None:
    tokens, top_k, hidden, indices, rows, dtype, kind, seed = route
    torch.manual_seed(seed)
    experts = torch.tensor(indices, dtype=[torch.int32, torch.int64][seed % 2]).view(tokens, top_k)
    dtype = dtype_on(device, dtype)
    check(device, experts, hidden, rows, dtype, torch.float32 if float32_probs else dtype, kind)


@pytest.mark.parametrize(("top_k", "hidden"), [(8, 1100), (11, 8200)])
def test_many_experts_and_wide_rows(device: str, top_k: int, hidden: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Top-k of the unrolling, and one that is no multiple; rows of several blocks; slots of several programs."""
    monkeypatch.setattr(kernels, "SLOTS", 4)
    torch.manual_seed(0)
    check(device, torch.rand(2, 16).topk(top_k).indices, hidden, None, dtype_on(device, torch.bfloat16), torch.float32)


@pytest.mark.parametrize(("tokens", "top_k", "hidden"), [(3, 2, 0), (0, 2, 5), (3, 0, 5)])
def test_nothing_to_copy(device: str, tokens: int, top_k: int, hidden: int) -> None:
    """No features, no tokens, no experts. In deterministic mode torch fills unwritten memory with NaN."""
    torch.use_deterministic_algorithms(True)
    check(device, torch.zeros(tokens, top_k, dtype=torch.int64), hidden, None, torch.float16, torch.float32)


def test_without_probs(device: str) -> None:
    """Each token has one slot: rows in the order of the tokens, and the gradient."""
    positions = torch.tensor(positions_of([3, 1, 1, 0, 2]), dtype=torch.int32, device=device)
    rows = torch.randn(4, 9, device=device).half()  # the last slot was dropped
    out = run("npu_moe_token_unpermute", permuted_tokens=rows, sorted_indices=positions, probs=None)
    expected = torch.cat((rows, rows.new_zeros(1, 9)))[positions.long()]
    assert torch.equal(out, expected)
    sizes = {"permuted_tokens_size_0": 4, "permuted_tokens_dtype": torch.float32}
    gradient = {"grad_unpermuted_tokens": expected, "sorted_indices": positions, **sizes}
    grad, none = run("npu_moe_token_unpermute_grad_v2", probs=None, permuted_tokens=None, **gradient)
    assert torch.equal(grad, rows.float()) and none is None
