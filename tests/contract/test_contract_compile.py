"""Blocks of deepseek_v32 in full size, compiled with the real torch_npu on fake tensors: the traced graphs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import fx, nn

from tests._helpers.pass_graphs import recorded_graphs
from tests.contract.contract_step import RANKS, fake_ranks, job, matching, model_args, train_step
from torchtitan_npu.compile import backend
from torchtitan_npu.planner import AssumedLoad, Calls
from torchtitan_npu.torch_internals.dispatch import OpOverload

MODEL = "deepseek_v32"


@pytest.fixture
def graphs(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[fx.Graph]]:
    """The graphs compiled in the test."""
    for mode in (Calls, AssumedLoad):  # they observe what runs, not what is traced
        monkeypatch.setattr(mode, "ignore_compile_internals", classmethod(lambda cls: True))
    torch.compiler.reset()
    with recorded_graphs() as recorded:
        # Inductor's wrapper makes views of real memory. The graphs run on fake tensors instead.
        monkeypatch.setattr(backend, "compare_results", lambda call: run_graph(recorded[-1]))
        yield recorded


def run_graph(graph: fx.Graph) -> Callable[[list[Any]], Any]:
    module = fx.GraphModule(nn.Module(), graph)
    return lambda inputs: module(*inputs)


def operators(graphs: list[fx.Graph]) -> Counter[str]:
    """Count the operators in the graphs by name."""
    targets = [n.target for graph in graphs for n in graph.nodes if isinstance(n.target, OpOverload)]
    return Counter(op.overloadpacket.__name__ for op in targets)


EXPECTED = {
    "npu_rms_norm": 8,
    "npu_rms_norm_backward": 8,
    "npu_rotary_mul": 8,
    "npu_rotary_mul_backward": 8,
    "npu_moe_token_permute": 1,
    "npu_moe_token_permute_grad_v2": 1,
    "_npu_moe_token_unpermute": 1,
    "npu_moe_token_unpermute_grad_v2": 1,
    "npu_grouped_matmul": 9,
    "npu_swiglu": 1,
    "npu_swiglu_backward": 1,
    "matmul": 21,
    "matmul_backward": 21,
    "bmm": 12,
    "native_layer_norm": 2,
    "silu": 2,
    "npu_moe_gating_top_k": 1,
    "histc": 2,
}
"""Calls in the graphs of a dense layer and of one with all experts."""
EXPERT_OPERATORS = {"npu_moe_token_permute", "npu_grouped_matmul", "npu_swiglu", "_npu_moe_token_unpermute"}


@pytest.mark.filterwarnings("error:npu::_npu_moe_token_unpermute")  # it returns its argument, against its schema
@pytest.mark.slow
def test_a_block_is_traced_without_graph_breaks(graphs: list[fx.Graph]) -> None:
    config = job(MODEL, matching(MODEL), {})
    assert config.npu.bypass_codegen == "inductor"  # the default on the NPU
    with fake_ranks(1):
        eager = train_step(config, model_args(MODEL, config))
        assert not graphs
        config.compile.enable = True
        compiled = train_step(config, model_args(MODEL, config))
    assert compiled.gradients == eager.gradients
    assert len(graphs) == 8  # forward and backward of each layer's pre_attention and post_attention, experts included
    found = operators(graphs)
    assert {name: found[name] for name in EXPECTED} == EXPECTED
    assert not {"view", "t", "transpose", "permute", "unsqueeze"} & found.keys()  # folded
    assert all(graph.find_nodes(op="call_module") == [] for graph in graphs)


def test_tensor_parallel_blocks_are_traced_without_graph_breaks(graphs: list[fx.Graph]) -> None:
    config = job(MODEL, matching(MODEL), {"tp": 4})
    config.compile.enable = True
    with fake_ranks(RANKS):
        step = train_step(config, model_args(MODEL, config))
    assert step.gradients == {name for name, _ in step.model.named_parameters()}
    assert len(graphs) == 8
    found = operators(graphs)
    for name in ("npu_rms_norm", "npu_rotary_mul", *EXPERT_OPERATORS):
        assert found[name] == EXPECTED[name]
    assert found["reduce_scatter_tensor"] and found["all_gather_into_tensor"]
    assert all(graph.find_nodes(op="call_module") == [] for graph in graphs)
