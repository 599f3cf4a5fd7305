"""Passes in the backend that bypasses code generation, by way of torch.compile, on two ranks."""

from __future__ import annotations

from collections import Counter
from functools import partial
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor, fx

from tests.compile.pass_graphs import calls
from tests.compile.test_passes_sequence_parallel import HIDDEN, MODELS, NORMS, TOKENS, inputs
from tests.multirank import run_on_ranks
from torchtitan_npu.compile import interpreter
from torchtitan_npu.compile.backend import bypassing
from torchtitan_npu.compile.passes import PASSES, GraphPasses


def train(names: list[str], name: str) -> tuple[list[Tensor], list[Tensor], list[Counter[str]]]:
    """Gradients of a model in eager mode and compiled, and the collectives of the compiled forward and backward."""
    model = partial(MODELS[name], norm=NORMS["npu"])
    passes = GraphPasses(names, sp_min_tokens=TOKENS)
    seen: list[Counter[str]] = []

    def look(graph_module: fx.GraphModule) -> Any:
        seen.append(calls(graph_module.graph))
        return write(graph_module)

    gradients = []
    write = interpreter.write
    with patch.object(interpreter, "write", look):
        for function in (model, torch.compile(model, backend=bypassing([passes]), fullgraph=True)):
            x, w = inputs(dist.get_rank(), torch.float64)
            function(x, w).square().sum().backward()
            gradients.append([leaf.grad for leaf in (x, *w.values()) if leaf.grad is not None])
    return gradients[0], gradients[1], seen


def run(names: list[str], model: str = "dense") -> list[list[Counter[str]]]:
    """By rank, the collectives of the forward and of the backward graph, whose gradients are eager's."""
    collectives = []
    for eager, compiled, seen in run_on_ranks(2, train, names, model):
        bound = 1.1e-16 * TOKENS * HIDDEN * 20  # as in test_passes_sequence_parallel
        for one, other in zip(compiled, eager, strict=True):
            torch.testing.assert_close(one, other, rtol=bound, atol=bound * float(other.abs().max()))
        collectives.append(seen)
    return collectives


def test_two_layers_in_training() -> None:
    for seen in run([name for name in PASSES if name != "async_tp"]):
        assert seen == [{"RS": 2, "AG": 2}, {"RS": 3, "AG": 3, "AR": 3}]


def test_what_sequence_parallel_splits_async_tp_fuses() -> None:
    for forward, backward in run(list(PASSES)):
        assert forward == {"AG+mm": 2, "mm+RS": 2}
        assert (backward["AG"] + backward["AG+mm"], backward["RS"] + backward["mm+RS"], backward["AR"]) == (3, 3, 3)
        assert backward["AG+mm"] and backward["mm+RS"]


def test_what_a_rank_saves_of_its_own_is_not_cut() -> None:
    """Of a backward graph by itself one could not tell it from what all ranks have."""
    for forward, backward in run(["sequence_parallel"], "own_addend"):
        # the other norm's gradient is cut, and its gamma's summed
        assert forward == {"AR": 1} and backward == {"AR": 1 + 1, "RS": 1, "AG": 1}
