"""MoE gating and its gradient in Triton, against the float64 oracle of the reference's tests."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from torch import Tensor

from tests.gpu_kernels.kernel_checks import on
from tests.ops.test_moe_gating import SIGMOID, calls, check
from torchtitan_npu.ops import OPS

DEEPSEEK = {"k": 8, "group_count": 8, "k_group": 4, "group_select_mode": 1, "routed_scaling_factor": 2.5}


@settings(max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(call=calls())
def test_agrees_with_the_oracle(gpu: Any, device: str, call: tuple[Tensor, int, dict[str, Any]]) -> None:
    x, k, keywords = call
    bias = keywords["bias"]
    keywords = keywords | {"norm_type": SIGMOID, "bias": None if bias is None else on(device, bias)}
    check(gpu.npu_moe_gating_top_k, on(device, x), k, keywords)


def forward(x: Tensor, k: int, **keywords: Any) -> tuple[Tensor, Tensor, Tensor]:
    op = OPS["npu_moe_gating_top_k"]
    return op.cuda(**op.complete(x=x, k=k, norm_type=SIGMOID, out_flag=True, **keywords))


def test_sizes_of_deepseek_v3(device: str) -> None:
    """256 experts, and a number of tokens that is no multiple of those in a program."""
    torch.manual_seed(0)
    x, bias = torch.randn(13, 256, device=device), torch.randn(256, device=device) * 0.1
    found, expected = forward(x, bias=bias, **DEEPSEEK), forward(x.double(), bias=bias.double(), **DEEPSEEK)
    assert torch.equal(found[1], expected[1])
    torch.testing.assert_close(found[0].double(), expected[0], rtol=2.0**-20, atol=0)
    grad = torch.randn(13, 8, device=device)
    backward = OPS["npu_moe_gating_top_k_backward"]
    call = {"expertIdx": found[1], "norm_type": SIGMOID, "routed_scaling_factor": 2.5}
    dx = backward.cuda(**backward.complete(x_norm=found[2], grad_y=grad, **call))
    exact = backward.cuda(**backward.complete(x_norm=found[2].double(), grad_y=grad.double(), **call))
    torch.testing.assert_close(dx.double(), exact, rtol=0, atol=2.0**-20 * float(exact.abs().max()))


@pytest.mark.parametrize(("groups", "k_group"), [(1, 1), (4, 2), (3, 2)])
def test_equal_scores_prefer_the_lower_expert(device: str, groups: int, k_group: int) -> None:
    """Many equal scores, 0, 1/2 or 1 without rounding: the order is that of the reference, which sorts stably."""
    torch.manual_seed(0)
    x = 200 * torch.randint(-1, 2, (50, 12), device=device).half()
    bias = torch.randint(-1, 2, (12,), device=device).half()
    for mode in (0, 1):
        keywords = {"bias": bias, "group_count": groups, "k_group": k_group, "group_select_mode": mode}
        op = OPS["npu_moe_gating_top_k"]
        expected = op.reference(**op.complete(x=x, k=4, norm_type=SIGMOID, **keywords))[1]
        assert torch.equal(forward(x, 4, **keywords)[1], expected)


def test_a_nan_is_seen(device: str) -> None:
    """It is selected, as by the reference, and the weights of its token are NaN. Other tokens are not affected."""
    x = torch.zeros(2, 8, device=device)
    x[0, 5] = torch.nan
    y, experts, scores = forward(x, 2, group_count=2, k_group=1)
    assert experts.tolist() == [[5, 4], [0, 1]]
    assert y[0].isnan().all() and y[1].tolist() == [0.5, 0.5]
    assert scores.isnan().nonzero().tolist() == [[0, 5]]


def test_far_logits(device: str) -> None:
    x = torch.tensor([[-1e30, -200.0, 200.0, 1e30]], device=device)
    y, experts, scores = forward(x, 4)
    assert scores.tolist() == [[0.0, 0.0, 1.0, 1.0]]
    assert experts.tolist() == [[2, 3, 0, 1]] and y.tolist() == [[0.5, 0.5, 0.0, 0.0]]


def test_an_expert_twice_and_one_that_does_not_exist(device: str) -> None:
    """Gradients of an expert are added, and a number out of range is ignored."""
    op = OPS["npu_moe_gating_top_k_backward"]
    scores = torch.full((1, 4), 0.5, device=device)
    grad = torch.tensor([[4.0, 2.0, 1.0]], device=device)

    def run(*experts: int) -> list[float]:
        indices = torch.tensor([experts], device=device, dtype=torch.int32)
        return op.cuda(**op.complete(x_norm=scores, grad_y=grad, expertIdx=indices, norm_type=SIGMOID))[0].tolist()

    indices = torch.tensor([[1, 3, 1]], device=device).int()
    exact = op.reference(
        **op.complete(x_norm=scores.double(), grad_y=grad.double(), expertIdx=indices, norm_type=SIGMOID)
    )
    # up to 8 roundings of terms of the size of (4 + 7 / 3) / 1.5 · 0.25, two of them for expert 1
    budget = 8 * 2.0**-24 * 2 * (4 + 7 / 3) / 1.5 * 0.25
    assert run(1, 3, 1) == pytest.approx(exact[0].tolist(), rel=0, abs=budget)
    assert run(1, 9, 0)[2:] == [0.0, 0.0] and run(1, -1, 0)[2:] == [0.0, 0.0]
