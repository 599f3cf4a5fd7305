"""A block of deepseek_v32 in full size, compiled for the NPU: what is captured, against the real torch_npu."""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path

import pytest
import torch
from torch import fx
from torch._ops import OpOverload

from tests._helpers.contract_step import RANKS, fake_ranks, job, matching, model_args, train_step
from torchtitan_npu.compile import interpreter
from torchtitan_npu.planner import Calls, StatedLoad

MODEL = "deepseek_v32"
ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def graphs(monkeypatch: pytest.MonkeyPatch) -> list[fx.GraphModule]:
    """Every graph that is compiled in the test."""
    captured: list[fx.GraphModule] = []
    write = interpreter.write

    def keep(graph_module: fx.GraphModule) -> torch._C.Graph:
        captured.append(graph_module)
        return write(graph_module)

    monkeypatch.setattr(interpreter, "write", keep)
    for mode in (Calls, StatedLoad):  # they look at what runs, not at what is captured
        monkeypatch.setattr(mode, "ignore_compile_internals", classmethod(lambda cls: True))
    torch._dynamo.reset()
    return captured


def operators(graphs: list[fx.GraphModule]) -> Counter[str]:
    """How often each is in the graphs, by its name; ``view.dtype`` is another operator than ``view``."""
    targets = [n.target for graph in graphs for n in graph.graph.nodes if isinstance(n.target, OpOverload)]
    return Counter("view.dtype" if op is torch.ops.aten.view.dtype else op._opname for op in targets)


def documented() -> Counter[str]:
    """The table in docs/results/compile.md: rows of names, and of as many numbers."""
    _, _, section = (ROOT / "docs/results/compile.md").read_text().partition("## The graphs on an NPU")
    found: Counter[str] = Counter()
    for names, numbers in re.findall(r"^\|(.*`)\s*\|([\d, ]+)\|$", section, re.MULTILINE):
        found.update(dict(zip(re.findall(r"`([^`]+)`", names), map(int, numbers.split(",")), strict=True)))
    return found


OF_EXPERTS = {"npu_moe_token_permute", "npu_grouped_matmul", "npu_swiglu", "_npu_moe_token_unpermute"}


@pytest.mark.filterwarnings("error:npu::_npu_moe_token_unpermute")  # which returns its argument
def test_a_block_is_captured_whole(graphs: list[fx.GraphModule]) -> None:
    config = job(MODEL, matching(MODEL), {})
    assert config.npu.bypass_codegen  # the default on the NPU
    with fake_ranks(1):
        eager = train_step(config, model_args(MODEL, config))
        assert not graphs
        config.compile.enable = True
        compiled = train_step(config, model_args(MODEL, config))
    assert compiled.gradients == eager.gradients
    assert len(graphs) == 8  # forward and backward of each layer's prolog and epilog, experts and all
    assert operators(graphs) == documented()
    assert all(graph.graph.find_nodes(op="call_module") == [] for graph in graphs)


def test_tensor_parallel_blocks_are_captured_whole(graphs: list[fx.GraphModule]) -> None:
    """With DTensor weights the same."""
    config = job(MODEL, matching(MODEL), {"tp": 4})
    config.compile.enable = True
    with fake_ranks(RANKS):
        step = train_step(config, model_args(MODEL, config))
    assert step.gradients == {name for name, _ in step.model.named_parameters()}
    assert len(graphs) == 8
    found = operators(graphs)
    for name in ("npu_rms_norm", "npu_rotary_mul", *OF_EXPERTS):
        assert found[name] == documented()[name] > 0
    assert found["reduce_scatter_tensor"] and found["all_gather_into_tensor"]
    assert all(graph.graph.find_nodes(op="call_module") == [] for graph in graphs)
