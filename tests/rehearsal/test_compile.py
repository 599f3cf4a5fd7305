"""A block of deepseek_v32 in full size, compiled for the NPU: what is captured, against the real torch_npu."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
from torch import fx
from torch._ops import OpOverload

from tests.rehearsal.step import fake_ranks, job, matching, model_args, train_step
from torchtitan_npu.compile import interpreter
from torchtitan_npu.rehearsal import Calls, StatedLoad

MODEL = "deepseek_v32"


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
    return Counter(str(n.target) for graph in graphs for n in graph.graph.nodes if isinstance(n.target, OpOverload))


def test_a_block_is_captured_whole(graphs: list[fx.GraphModule]) -> None:
    config = job(MODEL, matching(MODEL), {})
    assert config.npu.bypass_codegen  # the default on the NPU
    with fake_ranks(1):
        eager = train_step(config, model_args(MODEL, config))
        assert not graphs
        config.compile.enable = True
        compiled = train_step(config, model_args(MODEL, config))
    assert compiled.gradients == eager.gradients
    found = operators(graphs)
    print(*sorted(found.items()), sep="\n")
    assert found["npu.npu_rms_norm.default"] and found["npu.npu_rotary_mul.default"]
    assert all(graph.graph.find_nodes(op="call_module") == [] for graph in graphs)
