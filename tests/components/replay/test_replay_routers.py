"""Routers that pass their selection through a session: TorchTitan's results, and any experts that a session returns."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounter
from torchtitan.models.moe.moe import TokenChoiceTopKRouter

from torchtitan_npu.components.replay.install import ReplayNpuRouter, ReplayRouter, install_routing_decisions
from torchtitan_npu.components.replay.replayer import count_absent
from torchtitan_npu.converters.base import swap_forward
from torchtitan_npu.converters.gating import NpuRouter

DIM, EXPERTS, TOP_K, TOKENS = 16, 8, 3, 40
SETTINGS: list[dict[str, Any]] = [
    {"score_func": "sigmoid", "route_norm": True, "route_scale": 2.5},
    {"score_func": "sigmoid", "route_norm": True, "num_expert_groups": 4, "num_limited_groups": 2},
    {"score_func": "softmax", "route_norm": True},
    {"score_func": "softmax", "route_norm": False, "gate_bias": True},
]
FUSED = SETTINGS[:2]


class Chosen:
    """A session with these decisions."""

    runs_now = True

    def __init__(self, experts: Tensor) -> None:
        self.experts = experts

    def choose(self, decisions: Any, made: Tensor, query_positions: Tensor | None) -> Tensor:
        return self.experts.clone()


def model_with(router: nn.Module) -> nn.ModuleDict:
    return nn.ModuleDict({"layers": nn.ModuleDict({"5": nn.ModuleDict({"router": router})})})


def routers(settings: dict[str, Any], fused: bool) -> tuple[Any, Any]:
    """Return a router, and a second one with its weights that passes its selection through ``RoutingDecisions``."""
    torch.manual_seed(0)
    defaults = {"num_expert_groups": None, "num_limited_groups": None, "route_scale": 1.0, "gate_bias": False}
    router: Any = TokenChoiceTopKRouter(DIM, EXPERTS, top_k=TOP_K, **defaults | settings)
    if fused:
        router = swap_forward(router, NpuRouter)
    model: Any = model_with(router)
    install_routing_decisions(model, seq_len=TOKENS)
    replaying = model["layers"]["5"]["router"]
    assert isinstance(replaying, ReplayNpuRouter if fused else ReplayRouter)
    assert replaying.decisions.layer == 5 and replaying.gate is router.gate
    return router, replaying


CASES = [(settings, False) for settings in SETTINGS] + [(settings, True) for settings in FUSED]


@pytest.mark.parametrize(("settings", "fused"), CASES, ids=str)
def test_without_a_session_it_is_bit_identical(settings: dict[str, Any], fused: bool) -> None:
    router, replaying = routers(settings, fused)
    x, bias = torch.randn(TOKENS, DIM), torch.randn(EXPERTS) / 10
    expected, actual = router(x, bias), replaying(x, bias)
    assert all(map(torch.equal, actual, expected))
    gradient = torch.randn(TOKENS, TOP_K)
    (expected_grad,) = torch.autograd.grad(expected[0], router.gate.weight, gradient)
    (actual_grad,) = torch.autograd.grad(actual[0], router.gate.weight, gradient)
    assert torch.equal(actual_grad, expected_grad)


@pytest.mark.parametrize(("settings", "fused"), CASES, ids=str)
def test_scores_and_gradients_are_those_of_the_given_experts(settings: dict[str, Any], fused: bool) -> None:
    router, replaying = routers(settings, fused)
    x = torch.randn(TOKENS, DIM)
    experts = torch.rand(TOKENS, EXPERTS).argsort(dim=1)[:, :TOP_K]
    experts[0] = router(x)[1][0].flip(0)  # the router's experts, in another order
    replaying.decisions.session = Chosen(experts)
    scores, used, counts = replaying(x)
    assert torch.equal(used, experts)
    assert torch.equal(counts.long(), torch.bincount(experts.flatten(), minlength=EXPERTS))

    gate = router.gate.weight.detach().double().requires_grad_()
    logits = x.double() @ gate.T
    if router.gate.bias is not None:
        logits = logits + router.gate.bias.detach().double()
    oracle = logits.sigmoid() if settings["score_func"] == "sigmoid" else logits.softmax(dim=1)
    oracle = oracle.gather(1, experts)
    if settings["route_norm"]:
        oracle = oracle / oracle.sum(dim=1, keepdim=True)
    oracle = oracle * settings.get("route_scale", 1.0)
    gradient = torch.randn(TOKENS, TOP_K)
    (expected,) = torch.autograd.grad(oracle, gate, gradient.double())
    (actual,) = torch.autograd.grad(scores, replaying.gate.weight, gradient)
    eps = torch.finfo(torch.float32).eps  # a dozen roundings; logits of about 1 have errors of their dot product
    assert (scores.double() - oracle).abs().max() <= 32 * eps * oracle.abs().max()
    assert (actual.double() - expected).norm() <= 32 * eps * expected.norm()


def test_compiled_routers_of_many_layers_share_their_graphs() -> None:
    layers = [routers(SETTINGS[0], fused=False)[1] for _ in range(12)]  # more than dynamo compiles one function
    graphs = CompileCounter()
    compiled = [torch.compile(layer, backend=graphs, fullgraph=True) for layer in layers]
    experts = [torch.rand(TOKENS, EXPERTS).argsort(dim=1)[:, :TOP_K] for _ in layers]
    for layer, chosen in zip(layers, experts, strict=True):
        layer.decisions.session = Chosen(chosen)
    used = [router(torch.randn(TOKENS, DIM))[1] for router in compiled]
    assert all(map(torch.equal, used, experts))
    assert graphs.frame_count == 1


def test_absent_choices_are_counted_as_sets() -> None:
    made = torch.tensor([[4, 1, 2], [0, 1, -1], [5, 6, 7]])
    recorded = torch.tensor([[2, 4, 1], [1, 3, -1], [0, 9, 7]])
    assert count_absent(recorded, made) == 0 + 1 + 2
    assert count_absent(recorded.int(), made) == 3


def test_a_router_with_its_own_forward_is_an_error() -> None:
    class OwnForward(TokenChoiceTopKRouter):
        def forward(self, *args: Any) -> Any:
            return super().forward(*args)

    router = OwnForward(DIM, EXPERTS, None, None, TOP_K, "sigmoid", True, 1.0, False)
    with pytest.raises(ValueError, match=r"layers\.5\.router: OwnForward has its own forward"):
        install_routing_decisions(model_with(router), TOKENS)
