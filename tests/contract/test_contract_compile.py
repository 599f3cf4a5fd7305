"""Blocks of deepseek_v32 in full size, compiled with the real torch_npu on fake tensors: the traced graphs."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import fx

from tests._helpers.contract_step import RANKS, fake_ranks, job, matching, model_args, train_step
from tests._helpers.pass_graphs import recorded_graphs
from torchtitan_npu.planner import AssumedLoad, Calls
from torchtitan_npu.torch_internals.dispatch import OpOverload

MODEL = "deepseek_v32"
ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def graphs(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[tuple[fx.GraphModule, Any]]]:
    """The graphs compiled in the test."""
    for mode in (Calls, AssumedLoad):  # they observe what runs, not what is traced
        monkeypatch.setattr(mode, "ignore_compile_internals", classmethod(lambda cls: True))
    torch.compiler.reset()
    with recorded_graphs() as recorded:
        yield recorded


def operators(graphs: list[tuple[fx.GraphModule, Any]]) -> Counter[str]:
    """Count the operators in the graphs by name."""
    targets = [n.target for module, _ in graphs for n in module.graph.nodes if isinstance(n.target, OpOverload)]
    return Counter(op.overloadpacket.__name__ for op in targets)


def documented() -> Counter[str]:
    """Read the table of operator counts in docs/results/compile.md."""
    _, _, section = (ROOT / "docs/results/compile.md").read_text().partition("## The graphs on an NPU")
    found: Counter[str] = Counter()
    for names, numbers in re.findall(r"^\|(.*`)\s*\|([\d, ]+)\|$", section, re.MULTILINE):
        found.update(dict(zip(re.findall(r"`([^`]+)`", names), map(int, numbers.split(",")), strict=True)))
    return found


EXPERT_OPERATORS = {"npu_moe_token_permute", "npu_grouped_matmul", "npu_swiglu", "_npu_moe_token_unpermute"}


@pytest.mark.filterwarnings("error:npu::_npu_moe_token_unpermute")  # it returns its argument, against its schema
@pytest.mark.slow
def test_a_block_is_traced_without_graph_breaks(graphs: list[tuple[fx.GraphModule, Any]]) -> None:
    config = job(MODEL, matching(MODEL), {})
    assert config.npu.bypass_codegen  # the default on the NPU
    with fake_ranks(1):
        eager = train_step(config, model_args(MODEL, config))
        assert not graphs
        config.compile.enable = True
        compiled = train_step(config, model_args(MODEL, config))
    assert compiled.gradients == eager.gradients
    assert len(graphs) == 8  # forward and backward of each layer's prolog and epilog, experts included
    assert operators(graphs) == documented()
    assert all(module.graph.find_nodes(op="call_module") == [] for module, _ in graphs)


def test_tensor_parallel_blocks_are_traced_without_graph_breaks(graphs: list[tuple[fx.GraphModule, Any]]) -> None:
    config = job(MODEL, matching(MODEL), {"tp": 4})
    config.compile.enable = True
    with fake_ranks(RANKS):
        step = train_step(config, model_args(MODEL, config))
    assert step.gradients == {name for name, _ in step.model.named_parameters()}
    assert len(graphs) == 8
    found = operators(graphs)
    for name in ("npu_rms_norm", "npu_rotary_mul", *EXPERT_OPERATORS):
        assert found[name] == documented()[name] > 0
    assert found["reduce_scatter_tensor"] and found["all_gather_into_tensor"]
    assert all(module.graph.find_nodes(op="call_module") == [] for module, _ in graphs)
