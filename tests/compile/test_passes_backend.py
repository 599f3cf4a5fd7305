"""Passes in the backend that bypasses code generation, by way of torch.compile, on two ranks."""

from __future__ import annotations

from collections import Counter
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor, fx

from tests.compile.pass_graphs import calls
from tests.compile.test_passes_sequence_parallel import HIDDEN, NORMS, TOKENS, dense, inputs
from tests.multirank import run_on_ranks
from torchtitan_npu.compile.backend import bypassing
from torchtitan_npu.compile.passes import PASSES, GraphPasses


def train(names: list[str]) -> tuple[list[Tensor], list[Tensor], list[Counter[str]]]:
    """Gradients of two layers in eager mode and compiled, and the collectives of the compiled forward and backward."""
    model = partial(dense, norm=NORMS["npu"])
    passes = GraphPasses(names, sp_min_tokens=TOKENS)
    seen: list[Counter[str]] = []

    def look(graph_module: fx.GraphModule) -> None:
        seen.append(calls(graph_module.graph))

    backend = bypassing([passes], [passes, look])
    gradients = []
    for function in (model, torch.compile(model, backend=backend, fullgraph=True)):
        x, w = inputs(dist.get_rank(), torch.float64)
        function(x, w).square().sum().backward()
        gradients.append([leaf.grad for leaf in (x, *w.values()) if leaf.grad is not None])
    return gradients[0], gradients[1], seen


def run(names: list[str]) -> list[list[Counter[str]]]:
    """By rank, the collectives of the forward and of the backward graph, whose gradients are eager's."""
    collectives = []
    for eager, compiled, seen in run_on_ranks(2, train, names):
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
