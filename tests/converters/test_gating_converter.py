"""``npu_gating``: a router on the fused operator has the same choices, results, gradients and token counts."""

from __future__ import annotations

import copy
import logging
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torchtitan.config.job_config import ActivationCheckpoint
from torchtitan.distributed import ParallelDims
from torchtitan.distributed.activation_checkpoint import apply_ac
from torchtitan.models.moe.moe import TokenChoiceTopKRouter

from tests._helpers.converted_models import (
    LAYOUT,
    assert_as_exact,
    assert_no_further,
    build,
    build_on_meta,
    convert,
    job,
    model_args,
    step,
)
from tests._helpers.moe_layers import ROUNDINGS, build_moe, call, call_exact, in_dtype, tokens
from torchtitan_npu.chips import CHIPS
from torchtitan_npu.config.sections import Npu
from torchtitan_npu.converters import CONVERTERS
from torchtitan_npu.converters.gating import GatingConverter, NpuRouter
from torchtitan_npu.emulator.limits import documented_limits
from torchtitan_npu.errors import UsageError
from torchtitan_npu.planner import Calls

NORMALISED: dict[str, Any] = {"score_func": "sigmoid", "route_norm": True, "score_before_experts": False}
GROUPED: dict[str, Any] = {"num_experts": 12, "num_expert_groups": 4, "num_limited_groups": 2, "route_scale": 2.5}


@pytest.mark.parametrize("converters", [("npu_gating",), ("npu_permute", "npu_gmm", "npu_gating")], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    "args",
    [
        {},
        {"top_k": 4},
        {"top_k": 1, "score_before_experts": True},  # llama4's router, normalised
        GROUPED,
        {**GROUPED, "load_balance_coeff": None},  # no expert bias
        {"gate_bias": True},
    ],
    ids=str,
)
def test_computes_the_same(args: dict[str, Any], dtype: torch.dtype, converters: tuple[str, ...]) -> None:
    plain = in_dtype(build_moe(**NORMALISED | args), dtype)
    converted = convert(copy.deepcopy(plain), *converters)
    x = tokens(3, 7, dtype=dtype)
    exact, theirs, ours = call_exact(plain, x), call(plain, x), call(converted, x)
    assert exact.keys() == theirs.keys() == ours.keys()
    for name in exact:
        assert_no_further(name, ours[name], theirs[name], exact[name], ROUNDINGS)
    plain[0].tokens_per_expert.zero_(), converted[0].tokens_per_expert.zero_()
    plain(x), converted(x)
    assert torch.equal(converted[0].tokens_per_expert, plain[0].tokens_per_expert)


def routers(**args: Any) -> tuple[TokenChoiceTopKRouter, TokenChoiceTopKRouter]:
    plain = build_moe(**NORMALISED | args)
    return plain[0].router, convert(copy.deepcopy(plain), "npu_gating")[0].router


def test_the_router_has_torchtitans_dtypes_and_counts() -> None:
    for dtype in (torch.float32, torch.bfloat16, torch.float64):
        theirs, ours = (router.to(dtype)(tokens(9, dtype=dtype)) for router in routers(**GROUPED))
        assert [t.dtype for t in ours] == [t.dtype for t in theirs]
        assert torch.equal(ours[1].sort(1).values, theirs[1].sort(1).values) and torch.equal(ours[2], theirs[2])


def test_the_bias_selects_and_does_not_weight() -> None:
    theirs, ours = routers(num_experts=8)
    bias = torch.zeros(8)
    bias[5], bias[2] = 4.0, 3.0
    scores, experts, counts = ours(tokens(6), bias)
    assert experts.tolist() == [[5, 2]] * 6 and counts.tolist() == [0, 0, 6, 0, 0, 6, 0, 0]
    order = theirs(tokens(6), bias)[1].argsort(descending=True)
    torch.testing.assert_close(scores, theirs(tokens(6), bias)[0].gather(1, order), rtol=1e-6, atol=0)


def test_equal_scores_prefer_the_lower_expert() -> None:
    """torch.topk promises no order, so TorchTitan's choice among equals differs by device."""
    _, ours = routers(**GROUPED)
    with torch.no_grad():
        ours.gate.weight.zero_()
    assert ours(tokens(3))[1].tolist() == [[0, 1]] * 3


def test_trains_the_same() -> None:
    """deepseek_v3 with the router of its 671B flavor and a balancing bias, with and without full checkpointing."""
    moe_args = model_args("deepseek_v3").moe_args
    moe_args.num_experts, moe_args.num_expert_groups, moe_args.num_limited_groups = 16, 4, 2
    moe_args.score_func, moe_args.route_norm, moe_args.route_scale = "sigmoid", True, 2.5
    smaller = {"n_layers": 2, "dim": 64, "inter_dim": 64, "moe_inter_dim": 32, "n_heads": 4, "moe_args": moe_args}

    def build_biased(*converters: str, dtype: torch.dtype = torch.float32) -> nn.Module:
        model = build("deepseek_v3", *converters, dtype=dtype, **smaller)
        for name, buffer in model.named_buffers():
            if name.endswith("expert_bias"):
                buffer.copy_(torch.empty(16).uniform_(-0.1, 0.1, generator=torch.Generator().manual_seed(3)))
        return model

    plain, converted, recomputed = build_biased(), build_biased("npu_gating"), build_biased("npu_gating")
    assert converted.state_dict().keys() == plain.state_dict().keys()
    unbiased, oracle = step(build("deepseek_v3", **smaller)), step(build_biased(dtype=torch.float64))
    theirs, ours = step(plain), step(converted)
    assert theirs.loss != unbiased.loss  # the bias changes the choice of experts
    assert_as_exact(ours, theirs, oracle)

    apply_ac(recomputed, ActivationCheckpoint(mode="full"))
    again = step(recomputed)
    assert torch.equal(again.loss, ours.loss)
    assert all(torch.equal(again.grads[name], ours.grads[name]) for name in ours.grads)


def test_compiles_without_a_break() -> None:
    _, router = routers(**GROUPED)
    x, bias = tokens(7), torch.zeros(12)
    compiled = torch.compile(router, fullgraph=True, backend="aot_eager")
    results = []
    for run in (router, compiled):
        scores, experts, counts = run(x, bias)
        results.append([scores, experts, counts, *torch.autograd.grad(scores.square().sum(), router.gate.weight)])
    assert all(torch.equal(*pair) for pair in zip(*results, strict=True))


def test_calls_the_operator_once() -> None:
    with Calls() as calls:
        call(convert(build_moe(**NORMALISED, **GROUPED), "npu_gating"), tokens(2, 5))
    assert calls.count("npu") == {"npu_moe_gating_top_k": 1, "npu_moe_gating_top_k_backward": 1}
    assert not {"topk", "sigmoid", "sigmoid_backward", "scatter_add"} & calls.count("aten").keys()


@pytest.mark.parametrize(
    ("args", "reason"),
    [
        ({"score_func": "softmax"}, 'score_func is "softmax", and the operator has a gradient for "sigmoid" only'),
        ({"route_norm": False}, "route_norm is not set, and the operator normalises the scores"),
        (
            {"_debug_force_load_balance": True},
            "debug.moe_force_load_balance is set, and the operator selects the experts by score",
        ),
        ({"num_expert_groups": 4}, "num_expert_groups is 4, and num_limited_groups is not set"),
        (
            {"num_expert_groups": 3, "num_limited_groups": 2},
            "num_experts is 8, which is not divisible by num_expert_groups, 3",
        ),
    ],
    ids=str,
)
def test_other_routers_are_refused(args: dict[str, Any], reason: str) -> None:
    model = build_moe(**NORMALISED | args)
    with pytest.raises(UsageError) as error:
        convert(model, "npu_gating")
    advice = "remove npu_gating from model.converters"
    assert str(error.value) == f"model.converters: npu_gating cannot replace 0.router: {reason}; {advice}"
    assert type(model[0].router) is TokenChoiceTopKRouter


def test_forced_load_balance_is_an_error_of_the_job() -> None:
    config = job(("npu_gating",))
    config.debug.moe_force_load_balance = True
    with pytest.raises(UsageError) as error:
        CONVERTERS["npu_gating"](config, ParallelDims(**LAYOUT)).check_job()
    assert str(error.value) == (
        "model.converters: debug.moe_force_load_balance is set: unset it, or remove npu_gating from model.converters"
    )


def test_chips_are_those_with_a_documented_gradient() -> None:
    rows = [row for row in documented_limits() if row["op"] == "npu_moe_gating_top_k_backward"]
    series, chip_error = GatingConverter.chip_series, GatingConverter.chip_error
    assert all(tuple(row["chips"]) == series for row in rows) and rows
    assert {chip.series for name, chip in CHIPS.items() if chip_error(name) is None} == set(series)
    reason = (
        "CANN documents the gradient of npu_moe_gating_top_k for the series 910B and 910_93 only, and the series of"
    )
    assert chip_error("Ascend910A") == f"{reason} Ascend910A is 910"
    assert chip_error("Ascend1000") == f"{reason} Ascend1000 is unknown"


@pytest.mark.parametrize(
    ("model", "reason"),
    [("deepseek_v3", "softmax"), ("llama4", "route_norm"), ("gpt_oss", "softmax"), ("llama3", "found no TorchTitan")],
)
def test_debug_models_outside_the_contract(model: str, reason: str) -> None:
    """deepseek_v3's small flavors and gpt_oss have softmax, llama4 weights that are not normalised."""
    with pytest.raises(UsageError, match=reason):
        build_on_meta(model, "npu_gating")


def test_a_router_with_another_forward_stays_and_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    class Router(TokenChoiceTopKRouter):
        def forward(self, x: Tensor, expert_bias: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor]:
            return super().forward(x, expert_bias)

    model = nn.ModuleList([build_moe(**NORMALISED), build_moe(**NORMALISED)])
    model[1][0].router.__class__ = Router
    with caplog.at_level(logging.INFO):
        convert(model, "npu_gating")
    assert type(model[0][0].router) is NpuRouter and type(model[1][0].router) is Router
    assert "npu_gating: not converted: 1.0.router: Router has its own forward" in caplog.messages
    assert "npu_gating: 1 TokenChoiceTopKRouter in 0 -> npu_moe_gating_top_k" in caplog.messages


def test_groups_of_two_experts_exceed_a_limit() -> None:
    config: Any = job(("npu_gating",))
    config.npu = Npu(strict_limits=True)
    model: nn.Module = build_moe(**NORMALISED, num_experts=8, num_expert_groups=4, num_limited_groups=2)
    with pytest.raises(UsageError, match=r"0\.router: npu_moe_gating_top_k: the number of experts in a group is 2"):
        CONVERTERS["npu_gating"](config, ParallelDims(**LAYOUT)).convert(model)
