"""The pass async_tp on an NPU: tensor-parallel blocks with torch_npu's fused operators, on fake tensors."""

from __future__ import annotations

import pytest
import torch
from torch import fx
from torch._dynamo.exc import BackendCompilerFailed

from tests._helpers.contract_step import RANKS, Step, fake_ranks, job, model_args, train_step
from tests._helpers.pass_graphs import calls
from tests.contract.test_contract_compile import graphs  # noqa: F401  (a fixture)
from torchtitan_npu.ops import OPS

MODEL = "llama3"
FUSED = (torch.ops.npu.npu_all_gather_base_mm.default, torch.ops.npu.npu_mm_reduce_scatter_base.default)


def train(tp: int, strict: bool = False) -> Step:
    """A step on ``tp`` ranks; those left are shards of data parallel, whose weights are bfloat16."""
    config = job(MODEL, (), {"tp": tp})
    config.compile.enable = True
    config.npu.graph_passes, config.npu.strict_limits = ["async_tp"], strict
    with fake_ranks(RANKS):
        return train_step(config, model_args(MODEL, config))


def test_fused_forward_and_backward(graphs: list[fx.GraphModule]) -> None:  # noqa: F811
    step = train(tp=4)
    # of each layer; the sums of the gradients of several products are scattered by themselves
    assert [calls(graph.graph) for graph in graphs] == [{"AG+mm": 2, "mm+RS": 2}, {"AG+mm": 2, "RS": 2}] * 2
    called = step.calls.count("npu")
    assert (called["npu_all_gather_base_mm"], called["npu_mm_reduce_scatter_base"]) == (8, 4)
    assert step.gradients == {name for name, _ in step.model.named_parameters()}
    for node in (node for graph in graphs for node in graph.graph.nodes if node.target in FUSED):
        left, right, hcom, ranks = node.args
        left, right = left.meta["val"], right.meta["val"]
        assert isinstance(hcom, str) and ranks == 4 and not node.kwargs
        assert left.is_contiguous() and (right.is_contiguous() or right.t().is_contiguous())
        assert OPS[node.target._opname].refusals(input=left, x2=right, world_size=ranks) == []


def test_what_the_kernels_refuse_is_left(graphs: list[fx.GraphModule]) -> None:  # noqa: F811
    """Without data parallel, weights are float32."""
    step = train(tp=RANKS)
    assert [calls(graph.graph) for graph in graphs] == [{"AG": 2, "RS": 2}, {"AG": 2, "RS": 2}] * 2
    passes = step.model.graph_passes
    (gather, gathers), (scatter, scatters) = passes.limits["async_tp"].refused.items()  # type: ignore[union-attr]
    text = "nothing was changed: {}: input.dtype is float32, and an NPU takes float16, bfloat16"
    assert (gather, scatter) == tuple(text.format(operator._opname) for operator in FUSED)
    assert (gathers, scatters) == (8, 4)
    with pytest.raises(
        BackendCompilerFailed, match=r"an NPU would refuse npu_all_gather_base_mm: input.dtype is float32"
    ):
        train(tp=RANKS, strict=True)
