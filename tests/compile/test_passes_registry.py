"""``[npu] graph_passes``: names, order, and what is said about what was changed."""

from __future__ import annotations

import logging

import pytest
import torch
from torch import Tensor, fx

import torchtitan_npu.ops  # noqa: F401
from tests.compile.pass_graphs import compiled
from torchtitan_npu.compile.passes import PASSES, GraphPasses
from torchtitan_npu.errors import UsageError


@pytest.fixture
def said(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> pytest.LogCaptureFixture:
    from torchtitan.tools.logging import logger

    monkeypatch.setattr(logger, "propagate", True)
    caplog.set_level(logging.INFO)
    return caplog


def test_an_unknown_name_is_refused() -> None:
    with pytest.raises(UsageError, match=r"npu.graph_passes: no pass 'sequence_paralel'; did you mean 'sequence_par"):
        GraphPasses(["sequence_paralel"])


def test_passes_run_in_their_own_order() -> None:
    assert list(GraphPasses(["add_rms_norm", "no_ops"]).passes) == ["no_ops", "add_rms_norm"]
    assert list(GraphPasses([*PASSES][::-1]).passes) == list(PASSES)


def test_what_was_changed_is_said_each_time_and_nothing_once(said: pytest.LogCaptureFixture) -> None:
    def function(x: Tensor) -> Tensor:
        return torch.ops.aten.view(x.sin(), [4, 6]).cos()

    passes = GraphPasses(["no_ops", "add_rms_norm"])
    graphs: list[fx.Graph] = []
    with torch.no_grad():
        for _ in range(2):
            compiled(function, passes, graphs)(torch.ones(4, 6))
    messages = [record.getMessage() for record in said.records if "Graph pass" in record.getMessage()]
    changed = "Graph pass no_ops: 1 places changed"
    assert messages == [changed, "Graph pass add_rms_norm found nothing to change in a graph; it says so once", changed]


def test_the_threshold_reaches_its_pass() -> None:
    passes = GraphPasses(["sequence_parallel"], sp_min_tokens=7)
    assert passes.passes["sequence_parallel"].keywords == {"min_tokens": 7}  # type: ignore[attr-defined]


def test_inductor_takes_them_too() -> None:
    """On its post-grad graph. Kernels are not generated, to save the time."""
    changed: list[int] = []
    passes = GraphPasses(["add_rms_norm"])

    def run(graph: fx.Graph) -> None:
        changed.append(passes(graph))

    def function(x: Tensor, y: Tensor, gamma: Tensor) -> Tensor:
        return torch.ops.npu.npu_rms_norm(x + y, gamma, 1e-5)[0]

    options = {**torch._inductor.list_mode_options("lite"), "use_post_grad_passes": True}
    inputs = torch.randn(2, 8), torch.randn(2, 8), torch.rand(8)
    with torch.no_grad():
        result = torch.compile(function, options={**options, "post_grad_custom_post_pass": run})(*inputs)
    assert changed == [1] and torch.equal(result, function(*inputs))
