"""SwiGLU in Triton, against the float64 oracle of the reference's tests."""

from __future__ import annotations

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from torch import Tensor

from tests._helpers.error_budget import assert_within, rounding_budget
from tests.gpu_kernels.kernel_checks import has_strides_of, on
from tests.ops.test_swiglu import Oracle, cases
from torchtitan_npu.ops import OPS


def check(x: Tensor, dim: int, g: Tensor) -> None:
    oracle = Oracle(x, dim, g, torch.float64 if x.dtype == torch.float64 else torch.float32)
    y = OPS["npu_swiglu"].cuda(input=x, dim=dim)
    assert y.dtype == x.dtype and y.is_contiguous()
    # a GPU's exponential has an error of two units in the last place, the budget counts one: double the budget
    assert_within("y", y, oracle.y, 2 * oracle.y_budget + rounding_budget(oracle.y, x.dtype))
    dx = OPS["npu_swiglu_backward"].cuda(grad_output=g, input=x, dim=dim)
    assert dx.dtype == x.dtype and has_strides_of(dx, x)
    assert_within("dx", dx, oracle.dx, 2 * oracle.dx_budget + rounding_budget(oracle.dx, x.dtype))


@settings(max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(case=cases())
def test_agrees_with_the_oracle(device: str, case: tuple[Tensor, int, Tensor]) -> None:
    x, dim, g = case
    check(on(device, x), dim, on(device, g))


@pytest.mark.parametrize("width", [1024, 1500])
def test_rows_of_several_blocks(device: str, width: int) -> None:
    torch.manual_seed(0)
    check(torch.randn(3, 2 * width, device=device).half(), -1, torch.randn(3, width, device=device).half())


def test_large_inputs(device: str) -> None:
    """A fully closed or open gate gives no NaN from an overflowing exponential."""
    for dtype, far in ((torch.float32, 1e30), (torch.float16, 6e4)):
        x = torch.tensor([[-far, -200.0, 0.0, 200.0, far, 1.0, 1.0, 1.0, 1.0, 1.0]], device=device, dtype=dtype)
        y = OPS["npu_swiglu"].cuda(input=x, dim=-1)
        assert y[0, :3].tolist() == [0.0, 0.0, 0.0] and torch.equal(y[0, 3:], x[0, 3:5])
        dx = OPS["npu_swiglu_backward"].cuda(grad_output=torch.ones_like(y), input=x, dim=-1)
        assert dx[0, :5].tolist() == [0.0, 0.0, 0.5, 1.0, 1.0]
