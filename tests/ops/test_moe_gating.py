"""``npu_moe_gating_top_k`` and its gradient: against a float64 oracle, TorchTitan's router and DeepSeek-V3's."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch import Tensor
from torchtitan.models.moe.moe import TokenChoiceTopKRouter
from transformers import DeepseekV3Config
from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3TopkRouter

from tests._helpers.error_budget import assert_within, compute_dtype, rounding_budget, unit_roundoff
from torchtitan_npu.errors import UsageError

gating = torch.ops.npu.npu_moe_gating_top_k
gating_backward = torch.ops.npu.npu_moe_gating_top_k_backward
SOFTMAX, SIGMOID = 0, 1


def scores_of(x: Tensor, norm_type: int) -> Tensor:
    return 1 / (1 + (-x).exp()) if norm_type == SIGMOID else x.exp() / x.exp().sum(-1, keepdim=True)


def weights_of(scores: Tensor, chosen: Tensor, norm_type: int, renorm: int, scale: float, eps: float) -> Tensor:
    """Compute the formula, for PyTorch to differentiate."""
    picked = [row[index] for row, index in zip(scores, chosen, strict=True)]
    if norm_type == SIGMOID or renorm:
        picked = [row / (row.sum() + eps) for row in picked]
    return scale * (torch.stack(picked) if picked else scores[:, :0])


def choice_of(scores: list[float], k: int, groups: int, k_group: int, mode: int) -> tuple[list[int], float]:
    """Return the experts of one token, best first, and the smallest gap between scores that decided an order."""
    size = len(scores) // groups
    merits = []
    for group in range(groups):
        inside = sorted(scores[group * size : (group + 1) * size], reverse=True)
        merits.append(sum(inside[: 2 if mode else 1]))
    best_groups = sorted(range(groups), key=lambda group: -merits[group])[:k_group]
    allowed = [expert for expert in range(len(scores)) if expert // size in best_groups]
    best = sorted(allowed, key=lambda expert: -scores[expert])
    values = sorted(merits), sorted(scores)
    gaps = [b - a for row in values for a, b in itertools.pairwise(row)]
    return best[:k], min(gaps, default=1.0)


@st.composite
def calls(draw: st.DrawFn) -> tuple[Tensor, int, dict[str, Any]]:
    """Draw ``x``, ``k`` and keywords: no, one or several tokens, one or several groups, with and without a bias."""
    groups, size = draw(st.integers(1, 4)), draw(st.integers(2, 4))
    k_group = draw(st.integers(1, groups))
    k = draw(st.integers(1, size * k_group))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**32 - 1)))
    dtype = draw(st.sampled_from([torch.float16, torch.bfloat16, torch.float32, torch.float64]))
    x = torch.randn(groups * size, draw(st.integers(0, 4)), generator=generator).to(dtype).t()  # not contiguous
    bias = torch.randn(groups * size, generator=generator).to(dtype) if draw(st.booleans()) else None
    keywords = {
        "bias": bias,
        "k_group": k_group,
        "group_count": groups,
        "group_select_mode": draw(st.integers(0, 1)),
        "renorm": draw(st.integers(0, 1)),
        "norm_type": draw(st.sampled_from([SOFTMAX, SIGMOID])),
        "routed_scaling_factor": draw(st.sampled_from([1.0, 2.5])),
        "eps": draw(st.sampled_from([1e-20, 0.1])),
        "out_flag": True,
    }
    return x, k, keywords


def check(operator: Any, x: Tensor, k: int, keywords: dict[str, Any]) -> None:
    """Compare ``operator`` and its gradient with the formula in float64."""
    norm_type, bias = keywords["norm_type"], keywords["bias"]
    compute = unit_roundoff(compute_dtype(x.dtype))
    logits = x.detach().double().requires_grad_()
    scores = scores_of(logits, norm_type)
    experts = x.shape[1]
    # roundings: an exponential has its argument's error, a sum its number of terms, plus four other operations
    relative = (experts + 8 + 2 * (float(x.abs().max()) if len(x) else 0)) * compute

    choices = [
        choice_of(row.tolist(), k, keywords["group_count"], keywords["k_group"], keywords["group_select_mode"])
        for row in (scores if bias is None else scores + bias.double())
    ]
    assume(all(gap > 4 * relative for _, gap in choices))  # rounding may decide a near tie either way
    chosen = torch.tensor([experts for experts, _ in choices], dtype=torch.int64, device=x.device).view(len(x), k)

    given_x = x.detach().requires_grad_()
    y, expert_idx, norm = operator(given_x, k, **keywords)
    assert torch.equal(expert_idx, chosen.int()) and y.dtype == x.dtype
    assert norm.dtype == (compute_dtype(x.dtype))
    assert_within("norm", norm, scores.detach(), scores.detach() * relative)
    rest = [keywords[name] for name in ("norm_type", "renorm", "routed_scaling_factor", "eps")]
    expected = weights_of(scores, chosen, *rest).view(len(x), k)
    budget = expected.detach() * (2 * relative + (k + 4) * compute) + rounding_budget(expected.detach(), x.dtype)
    assert_within("y", y, expected.detach(), budget)

    if norm_type == SIGMOID:
        grad_y = torch.randn(y.shape).to(x)
        (grad,) = torch.autograd.grad(y, given_x, grad_y)
        (expected_grad,) = torch.autograd.grad(expected, logits, grad_y.double())
        s, scale = scores.detach(), keywords["routed_scaling_factor"]
        total = s.gather(1, chosen).sum(-1, keepdim=True) + keywords["eps"]
        g = (grad_y.double() * scale).abs()
        terms = (g + (g * s.gather(1, chosen) / total).sum(-1, keepdim=True)) / total
        magnitude = torch.zeros_like(s).scatter_(1, chosen, terms)
        # scores enter five times; 1 - s has the absolute error of s
        budget = s * magnitude * (5 * relative + (2 * k + 10) * compute)
        assert_within("dx", grad, expected_grad, budget + rounding_budget(expected_grad, x.dtype))


@settings(max_examples=150, deadline=None)
@given(calls())
def test_agrees_with_the_oracle(call: tuple[Tensor, int, dict[str, Any]]) -> None:
    check(gating, *call)


def router(**settings: Any) -> TokenChoiceTopKRouter:
    """Return TorchTitan's router with an identity as gate, so that its input is the logits."""
    made = TokenChoiceTopKRouter(**{"dim": 16, "num_experts": 16, "gate_bias": False, "route_scale": 2.5} | settings)
    made.gate.weight.data = torch.eye(16)
    return made


def in_order(weights: Tensor, experts: Tensor) -> tuple[Tensor, Tensor]:
    """Sort by expert, since TorchTitan does not sort its selection."""
    experts, order = experts.long().sort(dim=1)
    return weights.gather(1, order), experts


GROUPS = {"num_expert_groups": 4, "num_limited_groups": 2}, {"group_count": 4, "k_group": 2, "group_select_mode": 1}
NO_GROUPS: Any = {"num_expert_groups": None, "num_limited_groups": None}, {}


@pytest.mark.parametrize("groups", [NO_GROUPS, GROUPS], ids=["all", "node-limited"])
@pytest.mark.parametrize(
    ("score_func", "route_norm", "call"),
    [
        ("sigmoid", True, {"norm_type": SIGMOID}),
        ("softmax", False, {"norm_type": SOFTMAX}),
        ("softmax", True, {"norm_type": SOFTMAX, "renorm": 1}),
    ],
)
def test_agrees_with_torchtitan_s_router(groups: Any, score_func: Any, route_norm: bool, call: dict[str, Any]) -> None:
    torch.manual_seed(0)
    x, bias, grad = torch.randn(64, 16, requires_grad=True), torch.randn(16) * 0.3, torch.randn(64, 4)
    upstream = router(top_k=4, score_func=score_func, route_norm=route_norm, **groups[0])
    expected, experts, _ = upstream(x, bias)
    expected, experts = in_order(expected, experts)
    y, expert_idx, _ = gating(x, 4, bias=bias, routed_scaling_factor=2.5, out_flag=True, **call, **groups[1])
    y, expert_idx = in_order(y, expert_idx)
    assert torch.equal(expert_idx, experts)
    torch.testing.assert_close(y, expected, rtol=2 * (16 + 8) * 2.0**-24, atol=0)
    if score_func == "sigmoid":
        (found,) = torch.autograd.grad(y, x, grad)
        (reference,) = torch.autograd.grad(expected, x, grad)
        # two float32 computations of one gradient, each within 30 roundings of its terms; s (1 - s) <= 1/4
        smallest = float(x.detach().sigmoid().gather(1, experts).sum(1).min())
        terms = 0.25 * 2.5 * 2 * float(grad.abs().max()) / smallest
        torch.testing.assert_close(found, reference, rtol=0, atol=2 * 30 * 2.0**-24 * terms)


def test_agrees_with_deepseek_v3_s_router() -> None:
    torch.manual_seed(0)
    config = DeepseekV3Config(
        hidden_size=16,
        n_routed_experts=16,
        num_experts_per_tok=4,
        n_group=4,
        topk_group=2,
        routed_scaling_factor=2.5,
        norm_topk_prob=True,
    )
    upstream = DeepseekV3TopkRouter(config)
    upstream.weight.data = torch.eye(16)
    upstream.e_score_correction_bias.copy_(torch.randn(16) * 0.3)
    x = torch.randn(64, 16)
    _, weights, experts = upstream(x)
    expected, experts = in_order(weights, experts)
    y, expert_idx, _ = gating(
        x,
        4,
        bias=upstream.e_score_correction_bias,
        k_group=2,
        group_count=4,
        group_select_mode=1,
        norm_type=SIGMOID,
        routed_scaling_factor=2.5,
    )
    y, expert_idx = in_order(y, expert_idx)
    assert torch.equal(expert_idx, experts)
    torch.testing.assert_close(y, expected, rtol=2 * (16 + 8) * 2.0**-24, atol=0)


def test_equal_scores_prefer_the_lower_expert() -> None:
    for group_count, expected in ((1, [0, 1, 2]), (2, [0, 1, 2])):
        assert gating(torch.zeros(1, 8), 3, group_count=group_count)[1].tolist() == [expected]
    assert gating(torch.zeros(1, 8), 8)[1].tolist() == [list(range(8))]


def test_group_score_is_its_best_or_its_two_best() -> None:
    x = torch.tensor([[3.0, -9.0, 2.0, 1.9]])
    for mode, experts in ((0, [0, 1]), (1, [2, 3])):
        _, chosen, _ = gating(x, 2, group_count=2, k_group=1, group_select_mode=mode, norm_type=SIGMOID)
        assert chosen.tolist() == [experts]


def test_a_negative_bias_does_not_select_an_excluded_group() -> None:
    """Excluded groups are minus infinity, not 0: a selected expert may score below 0."""
    bias = torch.tensor([-2.0, -2.0, -3.0, -3.0])
    _, chosen, _ = gating(torch.zeros(1, 4), 2, bias=bias, group_count=2, k_group=1, norm_type=SIGMOID)
    assert chosen.tolist() == [[0, 1]]


def test_a_table_selects_the_experts() -> None:
    table = torch.tensor([[0, 1], [3, 2], [5, 4]], dtype=torch.int32)
    x = torch.randn(2, 6)
    y, chosen, _ = gating(x, 2, input_ids=torch.tensor([2, 1]), tid2eid=table, norm_type=SIGMOID)
    assert chosen.tolist() == [[5, 4], [3, 2]] and chosen.dtype == torch.int32
    picked = x.sigmoid().gather(1, chosen.long())
    assert torch.equal(y, picked / (picked.sum(1, keepdim=True) + 1e-20))


def test_what_torch_npu_cannot_differentiate_is_an_error() -> None:
    x, bias = torch.randn(3, 8, requires_grad=True), torch.randn(8)
    with pytest.raises(RuntimeError, match="bias must not require a gradient"):
        gating(x, 2, bias=bias.requires_grad_())
    with torch.no_grad():
        gating(x, 2, bias=bias)
    with pytest.raises(UsageError, match="out_flag must be True"):
        gating(x, 2, norm_type=SIGMOID)[0].sum().backward()
    with pytest.raises(UsageError, match=r"npu_moe_gating_top_k_backward: norm_type must be 1 \(sigmoid\)"):
        gating(x, 2, out_flag=True)[0].sum().backward()
    y, chosen, norm = gating(x, 2, norm_type=SIGMOID)
    assert y.requires_grad and not chosen.requires_grad and not norm.requires_grad
    assert not norm.any()  # no out_flag
