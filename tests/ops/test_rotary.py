"""``npu_rotary_mul`` and its backward: against a float64 oracle and Hugging Face."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

from tests._helpers.error_budget import assert_within, compute_dtype, rounding_budget, unit_roundoff
from tests._helpers.rotation import cos_sin, partners, rotated, unrotated

npu = torch.ops.npu
MODES = ["half", "interleave"]
DTYPES = [torch.float16, torch.bfloat16, torch.float32, torch.float64]


LAYOUTS: dict[str, Callable[[Tensor], Tensor]] = {
    "contiguous": lambda t: t,
    "transposed": lambda t: t.transpose(1, 2).contiguous().transpose(1, 2),
    "strided": lambda t: torch.stack([t, t], dim=-1)[..., 0],
}


@st.composite
def cases(draw: st.DrawFn) -> tuple[Tensor, Tensor, Tensor, str, Tensor]:
    """Draw ``(input, r1, r2, rotary_mode, grad)``: batch, sequence and heads empty or broadcast; any strides."""
    leading = draw(st.tuples(*[st.integers(0, 4)] * 3))
    size = 2 * draw(st.integers(1, 5))
    angles = [1 if draw(st.booleans()) else whole for whole in leading]
    dtype = draw(st.sampled_from(DTYPES))
    r_dtype = draw(st.sampled_from([dtype, torch.float32]))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**32 - 1)))

    def make(shape: list[int], dtype: torch.dtype) -> Tensor:
        values = torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)
        return LAYOUTS[draw(st.sampled_from(sorted(LAYOUTS)))](values)

    r1, r2 = make([*angles, size], r_dtype), make([*angles, size], r_dtype)
    return make([*leading, size], dtype), r1, r2, draw(st.sampled_from(MODES)), make([*leading, size], dtype)


@settings(max_examples=120, deadline=None)
@given(cases())
def test_agrees_with_the_oracle(case: tuple[Tensor, Tensor, Tensor, str, Tensor]) -> None:
    x, r1, r2, mode, grad = case
    dtype, compute = x.dtype, compute_dtype(x.dtype)
    cos, sin = r1.to(dtype).double(), r2.to(dtype).double()  # torch_npu rounds them first
    inputs = [tensor.detach().requires_grad_() for tensor in (x, r1, r2)]

    y = npu.npu_rotary_mul(*inputs, mode)
    oracle, budget = rotated(x, cos, sin, mode, compute)
    assert y.dtype == dtype and y.is_contiguous()
    assert_within("y", y, oracle, budget + rounding_budget(oracle, dtype))

    y.backward(grad)
    direct = npu.npu_rotary_mul_backward(grad, x, r1, r2, mode)
    assert all(tensor.dtype == dtype for tensor in direct)
    oracle, budget = unrotated(grad, cos, sin, mode, compute)
    assert_within("dx", inputs[0].grad, oracle, budget + rounding_budget(oracle, dtype))
    other, sign = partners(x.shape[-1], mode)
    rotated_pairs = x.double()[..., other] * torch.tensor(sign, dtype=torch.float64)
    summed = [dim for dim in range(3) if r1.shape[dim] == 1]
    for name, r, result, per_element in (
        ("r1", inputs[1], direct[1], x.double()),
        ("r2", inputs[2], direct[2], rotated_pairs),
    ):
        terms = grad.double() * per_element
        oracle = terms.sum(summed, keepdim=True) if summed else terms
        count = terms.numel() // max(oracle.numel(), 1)
        # one rounding for each product and each partial sum
        total = terms.abs().sum(summed, keepdim=True) if summed else terms.abs()
        budget = total * (count + 1) * unit_roundoff(compute) + rounding_budget(oracle, dtype)
        assert_within(f"d{name}", result, oracle, budget)
        # autograd casts it to the dtype of r1
        assert r.grad is not None and r.grad.dtype == r.dtype
        assert torch.equal(r.grad, result.to(r.dtype))


def example(mode: str = "half", dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor, Tensor]:
    """Return ``(x, cos, sin)`` in BSND, (2, 5, 3, 8) and (2, 5, 1, 8), with different positions in each batch row."""
    torch.manual_seed(0)
    x = torch.randn(2, 5, 3, 8, dtype=dtype)
    angles = cos_sin(torch.tensor([[0, 1, 2, 3, 4], [7, 3, 9, 0, 1]]), 4, dtype)
    both = [t.repeat_interleave(2, -1) if mode == "interleave" else t.repeat(1, 1, 2) for t in angles]
    return x, both[0].unsqueeze(2), both[1].unsqueeze(2)


def test_agrees_with_hugging_face() -> None:
    """Llama computes the same products and sums in float32, so the results are bit-identical."""
    x, cos, sin = example()
    query, _ = apply_rotary_pos_emb(x, x, cos.squeeze(2), sin.squeeze(2), unsqueeze_dim=2)
    assert torch.equal(npu.npu_rotary_mul(x, cos, sin), query)


@pytest.mark.parametrize("mode", MODES)
def test_a_matrix_replaces_the_mode(mode: str) -> None:
    x, cos, sin = example(mode)
    other, sign = partners(8, mode)
    matrix = torch.zeros(8, 8)
    for channel in range(8):
        matrix[other[channel], channel] = sign[channel]
    assert torch.equal(npu.npu_rotary_mul(x, cos, sin, mode, matrix), npu.npu_rotary_mul(x, cos, sin, mode))
    matrix = torch.randn(8, 8, dtype=torch.float64)
    y = npu.npu_rotary_mul(x.double(), cos.double(), sin.double(), mode, matrix)
    # 8 products and their sum in another order, then three more roundings
    size = x.abs().double() @ matrix.abs() + x.abs()
    assert_within("y", y, x * cos.double() + (x.double() @ matrix) * sin, size * 2 * 20 * unit_roundoff(torch.float64))
