"""``npu_rotary_mul`` and its backward: values, gradients, checks, limits and sharding."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

from tests._helpers.error_budget import assert_within, rounding_budget, unit_roundoff
from tests._helpers.rotation import cos_sin, neighbours_apart, partners, rotated, unrotated
from torchtitan_npu.errors import UsageError
from torchtitan_npu.ops import OPS

npu = torch.ops.npu
MODES = ["half", "interleave"]
DTYPES = [torch.float16, torch.bfloat16, torch.float32, torch.float64]


def compute_dtype(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32


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


@pytest.mark.parametrize("mode", MODES)
def test_rotation_keeps_norms_and_the_negative_angle_inverts_it(mode: str) -> None:
    x, cos, sin = example(mode, torch.float64)
    y = npu.npu_rotary_mul(x, cos, sin, mode)
    # the squares of cos and sin sum to 1 within two roundings
    torch.testing.assert_close(y.norm(dim=-1), x.norm(dim=-1), rtol=20 * unit_roundoff(torch.float64), atol=0)
    assert (y - x).abs().max() > 0.1
    # two rotations, each of three roundings of numbers no larger than a pair's norm
    atol = 6 * unit_roundoff(torch.float64) * x.norm(dim=-1).max().item()
    torch.testing.assert_close(npu.npu_rotary_mul(y, cos, -sin, mode), x, rtol=0, atol=atol)


def test_modes_are_permutations_of_each_other() -> None:
    x, cos, sin = example("interleave")
    order = neighbours_apart(8)
    apart = npu.npu_rotary_mul(x[..., order], cos[..., order], sin[..., order], "half")
    assert torch.equal(apart, npu.npu_rotary_mul(x, cos, sin, "interleave")[..., order])
    assert not torch.equal(npu.npu_rotary_mul(x, cos, sin, "half"), npu.npu_rotary_mul(x, cos, sin, "interleave"))


@pytest.mark.parametrize("mode", MODES)
def test_each_batch_row_has_its_own_positions(mode: str) -> None:
    x, cos, sin = example(mode)
    whole = npu.npu_rotary_mul(x, cos, sin, mode)
    for row in range(2):
        alone = npu.npu_rotary_mul(x[row : row + 1], cos[row : row + 1], sin[row : row + 1], mode)
        assert torch.equal(whole[row : row + 1], alone)
    assert not torch.equal(whole[1:], npu.npu_rotary_mul(x[1:], cos[:1], sin[:1], mode))


@pytest.mark.parametrize("layout", ["BSND", "BNSD", "SBND"])
def test_layouts_agree(layout: str) -> None:
    x, cos, sin = example()
    order = ["BSND".index(letter) for letter in layout]
    y = npu.npu_rotary_mul(*(tensor.permute(order) for tensor in (x, cos, sin)))
    assert torch.equal(y, npu.npu_rotary_mul(x, cos, sin).permute(order))


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


ONES = torch.ones
BAD: dict[str, list[tuple[dict[str, Any], str]]] = {
    "npu_rotary_mul": [
        ({"rotary_mode": "interleaved"}, "rotary_mode must be half or interleave, not 'interleaved'"),
        ({"rotary_mode": "quarter"}, "rotary_mode must be half or interleave"),
        ({"r1": ONES(1, 4, 1, 8)}, r"r1 must have the shape of input \(2, 5, 3, 8\), or 1 .*, not \(1, 4, 1, 8\)"),
        ({"r2": ONES(1, 5, 1, 4)}, "r2 must have the shape of input"),
        ({"r1": ONES(5, 8)}, "r1 must have the shape of input"),
        ({"r2": ONES(2, 5, 1, 8)}, r"r2 must have the shape of r1 \(1, 5, 1, 8\), not \(2, 5, 1, 8\)"),
        ({"input": ONES(5, 3, 8)}, r"input must have 4 dimensions \(BNSD, BSND or SBND\), not 3"),
        ({"input": ONES(2, 5, 3, 7)}, "input must have an even last dimension, not 7"),
        ({"input": ONES(2, 5, 3, 8, dtype=torch.int32)}, "input must be float16, bfloat16 or float32"),
        ({"rotate": ONES(8, 4)}, r"rotate must have the shape \(8, 8\)"),
    ],
    "npu_rotary_mul_backward": [
        ({"grad": ONES(2, 5, 1, 8)}, r"grad must have the shape and dtype of input, \(2, 5, 3, 8\)"),
        ({"grad": ONES(2, 5, 3, 8, dtype=torch.bfloat16)}, "grad must have the shape and dtype of input"),
        ({"rotary_mode": "other"}, "rotary_mode must be half or interleave, not 'other'"),
    ],
}
GOOD: dict[str, dict[str, Any]] = {
    "npu_rotary_mul": {"input": ONES(2, 5, 3, 8), "r1": ONES(1, 5, 1, 8), "r2": ONES(1, 5, 1, 8)},
}
GOOD["npu_rotary_mul_backward"] = GOOD["npu_rotary_mul"] | {"grad": ONES(2, 5, 3, 8)}


@pytest.mark.parametrize(
    ("name", "change", "message"), [(name, *case) for name, cases in BAD.items() for case in cases]
)
def test_names_the_bad_argument(name: str, change: dict[str, Any], message: str) -> None:
    getattr(npu, name)(**GOOD[name])
    with pytest.raises(UsageError, match=f"{name}: {message}"):
        getattr(npu, name)(**GOOD[name] | change)
    on_meta = {k: v.to("meta") if isinstance(v, Tensor) else v for k, v in (GOOD[name] | change).items()}
    with pytest.raises(UsageError, match=message):  # the fake kernel checks too
        getattr(npu, name)(**on_meta)


def limit_errors(x: tuple[int, ...], r: tuple[int, ...], mode: str = "half", *, grad: bool = False) -> list[str]:
    r1 = torch.empty(r, dtype=torch.bfloat16, device="meta", requires_grad=grad)
    x_ = torch.empty(x, dtype=torch.bfloat16, device="meta")
    return OPS["npu_rotary_mul"].limit_errors(input=x_, r1=r1, r2=r1, rotary_mode=mode, rotate=None)


def test_limits() -> None:
    assert limit_errors((2, 4096, 32, 128), (1, 4096, 1, 128)) == []
    assert limit_errors((2, 4096, 32, 128), (2, 4096, 1, 128)) == []
    assert limit_errors((2, 32, 4096, 128), (1, 1, 4096, 128), "interleave") == []
    assert limit_errors((1, 4096, 32, 128), (1, 4096, 1, 128), "interleave") == []  # one batch row: BS1D is 1S1D
    (message,) = limit_errors((2, 4096, 32, 128), (2, 4096, 1, 128), "interleave")
    assert "the layout of r1 and r2 is interleave: (2, 4096, 1, 128); the NPU kernel supports half: 11SD" in message
    (message,) = limit_errors((2, 32, 4096, 128), (1, 32, 4096, 128))
    assert "the layout of r1 and r2 is half: (1, 32, 4096, 128)" in message
    (message,) = limit_errors((2, 4096, 32, 896), (1, 4096, 1, 896))
    assert message == "npu_rotary_mul: the last dimension of input is 896; the NPU kernel supports 0 to 895"
    (message,) = limit_errors((64, 4096, 32, 128), (1, 4096, 1, 128), "interleave")
    assert "(their product in mode interleave) is 2048; the NPU kernel supports 0 to 999" in message
    (message,) = limit_errors((1000, 4096, 1, 128), (1, 4096, 1, 128))
    assert "the larger of B and N (their product in mode interleave) is 1000" in message
    (message,) = limit_errors((64, 4096, 32, 128), (1, 4096, 1, 128), grad=True)
    assert message == "npu_rotary_mul: B * N with gradients for r1 and r2 is 2048; the NPU kernel supports 0 to 1024"
