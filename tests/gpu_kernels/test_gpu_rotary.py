"""The rotary embedding in Triton, against the float64 oracle of the reference's tests."""

from __future__ import annotations

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from torch import Tensor

from tests._helpers.error_budget import assert_within, compute_dtype, rounding_budget, unit_roundoff
from tests._helpers.rotation import partners, rotated, unrotated
from tests.gpu_kernels.kernel_checks import has_strides_of, on
from tests.ops.test_rotary import cases
from torchtitan_npu.ops import OPS

Case = tuple[Tensor, Tensor, Tensor, str, Tensor]


def check(x: Tensor, r1: Tensor, r2: Tensor, mode: str, grad: Tensor) -> None:
    dtype, compute = x.dtype, compute_dtype(x.dtype)
    arguments = {"input": x, "r1": r1, "r2": r2, "rotary_mode": mode}
    y = OPS["npu_rotary_mul"].cuda(**arguments, rotate=None)
    dx, dr1, dr2 = OPS["npu_rotary_mul_backward"].cuda(**arguments, grad=grad)
    assert y.is_contiguous() and all(one.dtype == dtype for one in (y, dx, dr1, dr2))
    for result, like in ((dx, x), (dr1, r1), (dr2, r2)):
        assert has_strides_of(result, like)
    y, dx, dr1, dr2, x, r1, r2, grad = (tensor.cpu() for tensor in (y, dx, dr1, dr2, x, r1, r2, grad))

    cos, sin = r1.to(dtype).double(), r2.to(dtype).double()
    oracle, budget = rotated(x, cos, sin, mode, compute)
    assert_within("y", y, oracle, budget + rounding_budget(oracle, dtype))
    oracle, budget = unrotated(grad, cos, sin, mode, compute)
    assert_within("dx", dx, oracle, budget + rounding_budget(oracle, dtype))
    other, sign = partners(x.shape[-1], mode)
    rotated_pairs = x.double()[..., other] * torch.tensor(sign, dtype=torch.float64)
    for name, result, per_element in (("dr1", dr1, x.double()), ("dr2", dr2, rotated_pairs)):
        terms = grad.double() * per_element
        oracle, size = terms.sum_to_size(r1.shape), terms.abs().sum_to_size(r1.shape)
        count = terms.numel() // max(oracle.numel(), 1)
        budget = size * (count + 1) * unit_roundoff(compute) + rounding_budget(oracle, dtype)
        assert_within(name, result, oracle, budget)


@settings(max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(case=cases())
def test_agrees_with_the_oracle(device: str, case: Case) -> None:
    x, r1, r2, mode, grad = case
    check(on(device, x), on(device, r1), on(device, r2), mode, on(device, grad))


@pytest.mark.parametrize("mode", ["half", "interleave"])
def test_more_heads_than_a_tile(device: str, mode: str) -> None:
    """The rotated part of each head is a strided slice, as in attention, and the last tile is partial."""
    torch.manual_seed(0)
    x = torch.randn(2, 2, 70, 96, device=device).half()[..., 32:]
    r1, r2 = torch.randn(2, 1, 2, 1, 64, device=device)
    check(x, r1, r2, mode, torch.randn(2, 2, 70, 64, device=device).half())
