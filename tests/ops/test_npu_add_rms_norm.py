"""``npu_add_rms_norm``: the sum of two tensors and its RMS normalisation, without a gradient, as in torch_npu."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from test_npu_rms_norm import Oracle, cases
from torch import Tensor

from tests._helpers.error_budget import assert_within, rounding_budget
from torchtitan_npu.errors import UsageError
from torchtitan_npu.ops import OPS

npu_add_rms_norm = torch.ops.npu.npu_add_rms_norm


@settings(max_examples=100, deadline=None)
@given(cases())
def test_agrees_with_the_oracle(case: tuple[Tensor, Tensor, float, Tensor]) -> None:
    """The sum is rounded once, and the rounded sum is normalised."""
    x1, gamma, epsilon, x2 = case
    y, rstd, x = npu_add_rms_norm(x1, x2, gamma, epsilon)
    assert (x.dtype, y.dtype) == (x1.dtype, x1.dtype)
    total = x1.double() + x2.double()
    assert_within("x", x, total, rounding_budget(total, x.dtype))
    compute = torch.float64 if x.dtype == torch.float64 else torch.float32
    oracle = Oracle(x, gamma, epsilon, x, compute)
    assert_within("y", y, oracle.y, oracle.y_budget + rounding_budget(oracle.y, y.dtype))
    assert_within("rstd", rstd, oracle.rstd, oracle.rstd_budget)
    assert torch.equal(x, x1 + x2)


def example() -> tuple[Tensor, Tensor, Tensor]:
    torch.manual_seed(0)
    return torch.randn(2, 5, 8), torch.randn(2, 5, 8), torch.randn(8)


@pytest.mark.parametrize("output", range(3))
@pytest.mark.parametrize("needs_gradient", range(3))
def test_raises_in_backward(output: int, needs_gradient: int) -> None:
    """As in torch_npu, every output requires a gradient if an input does, and the backward raises."""
    tensors = example()
    tensors[needs_gradient].requires_grad_()
    result = npu_add_rms_norm(*tensors)[output]
    assert result.requires_grad
    with pytest.raises(RuntimeError, match="derivative for npu::npu_add_rms_norm is not implemented"):
        result.sum().backward()
    with torch.no_grad():
        assert not npu_add_rms_norm(*tensors)[output].requires_grad


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"gamma": torch.ones(7)}, r"gamma must have the trailing shape of x1 \(2, 5, 8\), not \(7,\)"),
        ({"gamma": torch.ones(8).half()}, "gamma must have the dtype of x1"),
        ({"x1": torch.ones(2, 5, 8, dtype=torch.int64)}, "x1 must be float16, bfloat16 or float32"),
        ({"x2": torch.ones(5, 8)}, r"x2 must have the shape and dtype of x1, \(2, 5, 8\) .*, not \(5, 8\)"),
        ({"x2": torch.ones(2, 5, 8).half()}, "x2 must have the shape and dtype of x1"),
    ],
)
def test_names_the_bad_argument(change: dict[str, Any], message: str) -> None:
    good = {"x1": torch.ones(2, 5, 8), "x2": torch.ones(2, 5, 8), "gamma": torch.ones(8)}
    npu_add_rms_norm(**good)
    with pytest.raises(UsageError, match=f"npu_add_rms_norm: {message}"):
        npu_add_rms_norm(**good | change)
    with pytest.raises(UsageError, match=message):  # the fake kernel checks too
        npu_add_rms_norm(**{name: tensor.to("meta") for name, tensor in (good | change).items()})


def test_limits_bind_only_the_npu() -> None:
    x1, x2, gamma = (tensor.double() for tensor in example())
    assert OPS["npu_add_rms_norm"].limit_errors(x1=x1, x2=x2, gamma=gamma, epsilon=1e-6) == [
        "npu_add_rms_norm: x1.dtype is float64; the NPU kernel supports float16, bfloat16, float32"
    ]
