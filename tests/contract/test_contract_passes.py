"""The pass async_tp with the real torch_npu on fake tensors: blocks with its fused operators."""

from __future__ import annotations

import pytest
import torch
from torch import fx
from torch._dynamo.exc import BackendCompilerFailed

from tests._helpers.pass_graphs import calls
from tests.contract.contract_step import RANKS, Step, fake_ranks, job, model_args, train_step
from tests.contract.test_contract_compile import graphs  # noqa: F401  (a fixture)
from torchtitan_npu.ops import OPS

MODEL = "llama3"
FUSED = (torch.ops.npu.npu_all_gather_base_mm.default, torch.ops.npu.npu_mm_reduce_scatter_base.default)


def train(tp: int, strict: bool = False) -> Step:
    """Run a step with tensor parallel on ``tp`` ranks. With data parallel on the others, weights are bfloat16."""
    config = job(MODEL, (), {"tp": tp})
    config.compile.enable = True
    config.npu.graph_passes, config.npu.strict_limits = ["async_tp"], strict
    with fake_ranks(RANKS):
        return train_step(config, model_args(MODEL, config))


def test_fused_forward_and_backward(graphs: list[fx.Graph]) -> None:  # noqa: F811
    step = train(tp=4)
    # of two layers, forward and then backward; the sum of the gradients of several matmuls has a reduce-scatter alone
    assert [calls(graph) for graph in graphs] == [{"AG+mm": 2, "mm+RS": 2}] * 2 + [{"AG+mm": 2, "RS": 2}] * 2
    called = step.calls.count("npu")
    assert (called["npu_all_gather_base_mm"], called["npu_mm_reduce_scatter_base"]) == (8, 4)
    assert step.gradients == {name for name, _ in step.model.named_parameters()}
    for node in (node for graph in graphs for node in graph.nodes if node.target in FUSED):
        left, right, hcom, ranks = node.args
        left, right = left.meta["val"], right.meta["val"]
        assert isinstance(hcom, str) and ranks == 4 and not node.kwargs
        assert left.is_contiguous() and (right.is_contiguous() or right.t().is_contiguous())
        assert OPS[node.target.overloadpacket.__name__].limit_errors(input=left, x2=right, world_size=ranks) == []


def test_matmuls_outside_of_the_limits_are_not_fused(graphs: list[fx.Graph]) -> None:  # noqa: F811
    """Without data parallel, weights are float32, which the kernels do not support."""
    step = train(tp=RANKS)
    assert [calls(graph) for graph in graphs] == [{"AG": 2, "RS": 2}] * 4
    passes = step.model.graph_passes
    (gather, gathers), (scatter, scatters) = passes.limits["async_tp"].unsupported.items()  # type: ignore[union-attr]
    text = "nothing was changed: {}: input.dtype is float32; the NPU kernel supports float16, bfloat16"
    assert (gather, scatter) == tuple(text.format(operator.overloadpacket.__name__) for operator in FUSED)
    assert (gathers, scatters) == (8, 4)
    with pytest.raises(
        BackendCompilerFailed, match=r"not supported by the NPU kernel: npu_all_gather_base_mm: input.dtype is float32"
    ):
        train(tp=RANKS, strict=True)
