"""``[npu] graph_passes``: names, order, and the report on what was changed."""

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

BROKEN_LIMIT = "npu_add_rms_norm: x1.dtype is float64; the NPU kernel supports float16, bfloat16, float32"


@pytest.fixture
def log(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> pytest.LogCaptureFixture:
    from torchtitan.tools.logging import logger

    monkeypatch.setattr(logger, "propagate", True)
    caplog.set_level(logging.INFO)
    return caplog


def test_passes_run_in_a_fixed_order() -> None:
    assert list(GraphPasses(["add_rms_norm", "no_ops"]).passes) == ["no_ops", "add_rms_norm"]
    assert list(GraphPasses([*PASSES][::-1]).passes) == list(PASSES)


def compiled_part(names: list[str], *functions: Callable[[Tensor], Tensor], **options: bool) -> nn.Module:
    """Return a model part whose passes have run on the graphs of ``functions``."""
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


def messages(log: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in log.records if "Graph pass" in record.getMessage()]


def test_one_report_on_all_graphs(log: pytest.LogCaptureFixture) -> None:
    """A pass that changed one graph of one model part is not reported as having found nothing."""
    names = ["no_ops", "async_tp", "sequence_parallel"]
    part, other = compiled_part(names, torch.sin, with_no_op, with_no_op, torch.cos), nn.Module()
    other.graph_passes = part.graph_passes  # pipeline stages have the same object
    assert messages(log) == []
    report([part, other, nn.Module()])
    assert messages(log) == [
        "Graph pass no_ops: 2 places changed, in 4 graphs",
        "Graph pass sequence_parallel: found nothing to change, in 4 graphs; "
        "set npu.sp_whole_inputs if the inputs of a block are the same on all ranks",
        "Graph pass async_tp: found nothing to change, in 4 graphs",
    ]


def double(x: Tensor) -> Tensor:
    return add_and_norm(x.double())


LATER = {
    torch.cos: ["Graph pass add_rms_norm: found nothing to change, in 1 graph without gradients compiled later"],
    add_and_norm: ["Graph pass add_rms_norm: 1 place changed, in 1 graph without gradients compiled later"],
    double: [
        "Graph pass add_rms_norm: 1 place changed, in 1 graph without gradients compiled later",
        f"Graph pass add_rms_norm: in 1 place not supported by the NPU kernel: {BROKEN_LIMIT}",
    ],
}


@pytest.mark.parametrize("function", LATER)
def test_graphs_compiled_after_the_report(function: Callable[[Tensor], Tensor], log: pytest.LogCaptureFixture) -> None:
    """Validation is compiled when it first runs. Until then, inference-only passes have nothing to report."""
    part = compiled_part(["no_ops", "add_rms_norm"])
    compiled(torch.sin, part.graph_passes, [])(torch.ones(4, 6, requires_grad=True))  # type: ignore[arg-type]
    report([part])
    assert messages(log) == [
        "Graph pass no_ops: found nothing to change, in 1 graph",
        "Graph pass add_rms_norm: waits for graphs without gradients, compiled when first needed",
    ]
    lines = LATER[function]
    for expected in (lines, [line for line in lines if "nothing" not in line]):  # logged once
        log.clear()
        with torch.no_grad():
            compiled(function, part.graph_passes, [])(torch.ones(4, 6))  # type: ignore[arg-type]
        report([part])
        report([part])
        assert messages(log) == expected


def test_npu_limits(log: pytest.LogCaptureFixture) -> None:
    """On other backends the pass runs and reports the limit; with strict_limits it is an error."""
    report([compiled_part(["add_rms_norm"], double)])
    assert messages(log) == [
        "Graph pass add_rms_norm: 1 place changed, in 1 graph without gradients",
        f"Graph pass add_rms_norm: in 1 place not supported by the NPU kernel: {BROKEN_LIMIT}",
    ]
    with pytest.raises(UsageError, match=f"npu.graph_passes: not supported by the NPU kernel: {BROKEN_LIMIT}"):
        compiled_part(["add_rms_norm"], double, strict_limits=True)


def test_the_threshold_reaches_its_pass() -> None:
    passes = GraphPasses(["sequence_parallel"], sp_min_tokens=7)
    assert passes.passes["sequence_parallel"].keywords == {"min_tokens": 7, "replicated_inputs": False}  # type: ignore[attr-defined]
