"""``npu_add_rms_norm``: the sum of two tensors and its RMS normalisation, without a gradient, as in torch_npu."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from test_npu_rms_norm import Oracle, cases
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.distributed.tensor.debug import CommDebugMode

from tests._helpers.error_budget import assert_within, rounding_budget
from tests._helpers.multirank import run_on_ranks
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


@settings(max_examples=25, deadline=None)
@given(cases(), st.booleans())
def test_shapes_and_strides_are_what_the_fake_kernel_says(
    case: tuple[Tensor, Tensor, float, Tensor], swap: bool
) -> None:
    x1, gamma, epsilon, x2 = case
    if swap:  # the results have the strides of x1
        x1, x2 = x2, x1
    real = npu_add_rms_norm(x1, x2, gamma, epsilon)
    with FakeTensorMode() as mode:
        fake = npu_add_rms_norm(*(mode.from_tensor(tensor) for tensor in (x1, x2, gamma)), epsilon)
    for r, f in zip(real, fake, strict=True):
        assert (r.shape, r.dtype) == (f.shape, f.dtype)
        for size, real_stride, fake_stride in zip(r.shape, r.stride(), f.stride(), strict=True):
            assert size == 1 or not r.numel() or real_stride == fake_stride


def example() -> tuple[Tensor, Tensor, Tensor]:
    torch.manual_seed(0)
    return torch.randn(2, 5, 8), torch.randn(2, 5, 8), torch.randn(8)


def test_opcheck() -> None:
    x1, x2, gamma = example()
    torch.library.opcheck(npu_add_rms_norm.default, (x1, x2, gamma), {"epsilon": 1e-5})
    torch.library.opcheck(npu_add_rms_norm.default, (x1.transpose(0, 1), x2.transpose(0, 1).contiguous(), gamma))


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


def distributed() -> list[list[Tensor]]:
    mesh = init_device_mesh("cpu", (2,))
    x1, x2, gamma = example()
    gamma = distribute_tensor(gamma, mesh, [Replicate()])
    results = []
    for dim in range(3):
        tensors = [distribute_tensor(tensor, mesh, [Shard(dim)]) for tensor in (x1, x2)]
        with CommDebugMode() as comm:
            outputs = npu_add_rms_norm(*tensors, gamma)
        sharded = dim < 2  # the normalised dimension is gathered
        assert (comm.get_total_counts() == 0) == sharded
        assert all(output.placements == ((Shard(dim),) if sharded else (Replicate(),)) for output in outputs)
        results.append([output.full_tensor() for output in outputs])
    return results


def test_sharded_equals_unsharded() -> None:
    expected = npu_add_rms_norm(*example())
    for results in run_on_ranks(2, distributed):
        for outputs in results:
            assert all(torch.equal(a, b) for a, b in zip(outputs, expected, strict=True))
