"""``[npu] graph_passes``: names, order, and what is said about what was changed."""

from __future__ import annotations

import logging
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import torchtitan_npu.ops  # noqa: F401
from tests._helpers.pass_graphs import compiled
from torchtitan_npu.compile.passes import PASSES, GraphPasses, report
from torchtitan_npu.errors import UsageError

REFUSAL = "npu_add_rms_norm: x1.dtype is float64, and an NPU takes float16, bfloat16, float32"


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


def compiled_part(names: list[str], *functions: Callable[[Tensor], Tensor], **options: bool) -> nn.Module:
    """A part of a model whose passes have run on the graphs of ``functions``."""
    part = nn.Module()
    part.graph_passes = GraphPasses(names, **options)  # type: ignore[assignment, arg-type]
    with torch.no_grad():
        for function in functions:
            compiled(function, part.graph_passes, [])(torch.ones(4, 6))  # type: ignore[arg-type]
    return part


def with_no_op(x: Tensor) -> Tensor:
    return torch.ops.aten.view(x.sin(), [4, 6]).cos()


def add_and_norm(x: Tensor) -> Tensor:
    return torch.ops.npu.npu_rms_norm(x + x.sin(), torch.ones(6, dtype=x.dtype), 1e-5)[0]


def messages(said: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in said.records if "Graph pass" in record.getMessage()]


def test_one_report_on_all_graphs(said: pytest.LogCaptureFixture) -> None:
    """What matches in one graph, of one part of the model, has matched: no other says that it did not."""
    names = ["no_ops", "async_tp", "sequence_parallel"]
    part, other = compiled_part(names, torch.sin, with_no_op, with_no_op, torch.cos), nn.Module()
    other.graph_passes = part.graph_passes  # as the stages of a pipeline share theirs
    assert messages(said) == []
    report([part, other, nn.Module()])
    assert messages(said) == [
        "Graph pass no_ops: 2 places changed, in 4 graphs",
        "Graph pass sequence_parallel: found nothing to change, in 4 graphs; of inputs it knows only by "
        "npu.sp_whole_inputs that they are the same on all ranks",
        "Graph pass async_tp: found nothing to change, in 4 graphs",
    ]


def double(x: Tensor) -> Tensor:
    return add_and_norm(x.double())


LATER = {
    torch.cos: ["Graph pass add_rms_norm: found nothing to change, in 1 graph without gradients compiled later"],
    add_and_norm: ["Graph pass add_rms_norm: 1 place changed, in 1 graph without gradients compiled later"],
    double: [
        "Graph pass add_rms_norm: 1 place changed, in 1 graph without gradients compiled later",
        f"Graph pass add_rms_norm: in 1 place an NPU would refuse {REFUSAL}",
    ],
}


@pytest.mark.parametrize("function", LATER)
def test_graphs_that_are_compiled_after_the_report(
    function: Callable[[Tensor], Tensor], said: pytest.LogCaptureFixture
) -> None:
    """Validation is compiled when the job comes to it. Before, nothing is known of a pass that acts only there."""
    part = compiled_part(["no_ops", "add_rms_norm"])
    compiled(torch.sin, part.graph_passes, [])(torch.ones(4, 6, requires_grad=True))  # type: ignore[arg-type]
    report([part])
    assert messages(said) == [
        "Graph pass no_ops: found nothing to change, in 1 graph",
        "Graph pass add_rms_norm: waits for graphs without gradients, compiled when first needed",
    ]
    lines = LATER[function]
    for expected in (lines, [line for line in lines if "nothing" not in line]):  # that is said once
        said.clear()
        with torch.no_grad():
            compiled(function, part.graph_passes, [])(torch.ones(4, 6))  # type: ignore[arg-type]
        report([part])
        report([part])
        assert messages(said) == expected


def test_what_an_npu_would_refuse(said: pytest.LogCaptureFixture) -> None:
    """Elsewhere it is done, and said; with strict_limits it is an error."""
    report([compiled_part(["add_rms_norm"], double)])
    assert messages(said) == [
        "Graph pass add_rms_norm: 1 place changed, in 1 graph without gradients",
        f"Graph pass add_rms_norm: in 1 place an NPU would refuse {REFUSAL}",
    ]
    with pytest.raises(UsageError, match=f"npu.graph_passes: an NPU would refuse {REFUSAL}"):
        compiled_part(["add_rms_norm"], double, strict_limits=True)


def test_the_threshold_reaches_its_pass() -> None:
    passes = GraphPasses(["sequence_parallel"], sp_min_tokens=7)
    assert passes.passes["sequence_parallel"].keywords == {"min_tokens": 7, "whole_inputs": False}  # type: ignore[attr-defined]
