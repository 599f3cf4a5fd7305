"""RMS normalisation in Triton, against the float64 oracle of the reference's tests."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from tests._helpers.error_budget import assert_within, rounding_budget
from tests.gpu_kernels.kernel_checks import has_strides_of, on
from tests.ops.test_npu_rms_norm import Oracle, cases
from torchtitan_npu.gpu_kernels import rms_norm as kernels
from torchtitan_npu.gpu_kernels.launch import in_strides_of
from torchtitan_npu.ops import OPS

Case = tuple[Tensor, Tensor, float, Tensor]


def check(case: Case, device: str) -> None:
    """Check forward, backward and the fused sum: dtypes, strides and values."""
    x, gamma, epsilon, dy = (on(device, part) if isinstance(part, Tensor) else part for part in case)
    compute = torch.float64 if x.dtype == torch.float64 else torch.float32
    oracle = Oracle(x, gamma, epsilon, dy, compute)
    y, rstd = OPS["npu_rms_norm"].cuda(input=x, gamma=gamma, epsilon=epsilon)
    assert (y.dtype, rstd.dtype) == (x.dtype, compute) and has_strides_of(y, x)
    assert_within("y", y, oracle.y, oracle.y_budget + rounding_budget(oracle.y, y.dtype))
    assert_within("rstd", rstd, oracle.rstd, oracle.rstd_budget)

    dx, dgamma = OPS["npu_rms_norm_backward"].cuda(dy=dy, input=x, gamma=gamma, rstd=rstd)
    assert (dx.dtype, dgamma.dtype) == (x.dtype, compute) and has_strides_of(dx, x) and has_strides_of(dgamma, gamma)
    assert_within("dx", dx, oracle.dx, oracle.dx_budget + rounding_budget(oracle.dx, x.dtype))
    assert_within("dgamma", dgamma, oracle.dgamma, oracle.dgamma_budget)

    y, rstd, total = OPS["npu_add_rms_norm"].cuda(x1=x, x2=dy, gamma=gamma, epsilon=epsilon)
    assert torch.equal(total, x + dy) and has_strides_of(total, x)
    of_sum = Oracle(total, gamma, epsilon, dy, compute)
    assert_within("y of the sum", y, of_sum.y, of_sum.y_budget + rounding_budget(of_sum.y, y.dtype))
    assert_within("rstd of the sum", rstd, of_sum.rstd, of_sum.rstd_budget)


@settings(max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(case=cases())
def test_agrees_with_the_oracle(device: str, case: Case) -> None:
    check(case, device)


@pytest.mark.parametrize(
    ("rows", "width"),
    [
        (70, 100),  # several rows per tile, several iterations per program, a partial last tile
        (9, 4096),  # one row per tile, a full block
        (5, 5000),
        (2, 16385),  # too wide for the kernel, so the reference runs
    ],
)
def test_wide_and_many_rows(device: str, rows: int, width: int) -> None:
    torch.manual_seed(0)
    x, dy = torch.randn(2, rows, width).to(torch.float16)
    check((x, torch.randn(width, dtype=torch.float16), 1e-5, dy), device)


def test_the_gradient_of_gamma_over_many_programs(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """More programs than a tile of the kernel that sums over them."""
    torch.manual_seed(0)
    (x, dy), gamma = torch.randn(2, 10, 5, device=device), torch.randn(5, device=device)
    oracle = Oracle(x, gamma, 1e-5, dy)
    monkeypatch.setattr(kernels, "SUM", {"ROWS": 4, "BLOCK": 8, "num_warps": 1})
    config = {"ROWS": 1, "BLOCK": 8, "STAGES": 1, "num_warps": 1, "per_multiprocessor": 10}
    _, dgamma = kernels.npu_rms_norm_backward(dy, x, gamma, oracle.rstd.float(), **config)
    assert_within("dgamma", dgamma, oracle.dgamma, oracle.dgamma_budget)


def test_a_slice_is_copied_once(device: str) -> None:
    """A slice of a projection, as latent keys have it. The result is contiguous, as empty_like's is."""
    torch.manual_seed(0)
    x, gamma = torch.randn(2, 3, 24, device=device)[..., :16], torch.randn(16, device=device)
    with LaidOut() as forward:
        y, rstd = OPS["npu_rms_norm"].cuda(input=x, gamma=gamma, epsilon=1e-5)
    with LaidOut() as backward:
        OPS["npu_rms_norm_backward"].cuda(dy=torch.randn_like(y), input=x, gamma=gamma, rstd=rstd)
    assert forward.count == backward.count == 1
    assert in_strides_of(x, y) is y and has_strides_of(y, x)


class LaidOut(TorchDispatchMode):
    """Count the copies of strided tensors."""

    count = 0

    def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += op is torch.ops.aten.clone.default and not args[0].is_contiguous()
        return op(*args, **(kwargs or {}))
