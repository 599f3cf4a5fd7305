"""Configuration errors of compiled jobs, and log lines while compiling."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from functorch.compile import make_boxed_func
from torch._dynamo.backends.common import aot_autograd

import torchtitan_npu
from torchtitan_npu.compile.backend import make_backend
from torchtitan_npu.components import metrics
from torchtitan_npu.config.job_config import JobConfig
from torchtitan_npu.errors import UsageError
from torchtitan_npu.preflight.job import check_job
from torchtitan_npu.preflight.pipeline import check_schedule
from torchtitan_npu.train import usage_error

torchtitan_npu.register()
CSV = "parallelism.pipeline_parallel_schedule_csv"
BYPASSED = {"compile.enable": True, "npu.bypass_codegen": "inductor"}
PASSES = {"compile.enable": True, "npu.bypass_codegen": "off", "npu.graph_passes": ["no_ops"]}
"""Blocks compiled by Inductor, which generates code."""


def pipeline(schedule: str) -> dict[str, Any]:
    return {
        "parallelism.pipeline_parallel_degree": 2,
        "parallelism.pipeline_parallel_schedule": schedule,
        "training.local_batch_size": 4,
        "activation_checkpoint.mode": "none",
    }


def job(options: dict[str, Any]) -> JobConfig:
    config = JobConfig()
    config.training.dataset, config.training.seq_len = "tiny_corpus", 64
    for key, value in options.items():
        section, _, name = key.partition(".")
        assert hasattr(getattr(config, section), name)
        setattr(getattr(config, section), name, value)
    return config


def check(options: dict[str, Any]) -> None:
    config = job(options)
    check_job(config, world_size=config.parallelism.pipeline_parallel_degree)


@pytest.mark.parametrize("schedule", ["InterleavedZeroBubble", "ZBVZeroBubble", "DualPipeV"])
def test_schedules_that_split_the_backward_pass(schedule: str) -> None:
    """They compute gradients of inputs and of weights separately, but a compiled region computes both at once."""
    check_schedule(job(pipeline(schedule)), layers=6)
    for compiled in (BYPASSED, {"compile.enable": True, "compile.backend": "aot_eager"}):
        with pytest.raises(UsageError, match=f"compile.enable must be false with .*_schedule {schedule}"):
            check_schedule(job({**compiled, **pipeline(schedule)}), layers=6)


@pytest.mark.parametrize("second_rank", ["1F0,1I0,1W0,1F1,1B1", "1F0,(1F1;1B0)OVERLAP_F_B,,1I1,1W1"])
def test_a_csv_schedule_that_splits_the_backward_pass(tmp_path: Path, second_rank: str) -> None:
    """The file takes precedence over the named schedule."""
    file = tmp_path / "schedule.csv"
    file.write_text(f"0F0,0F1,0B0,0B1\n{second_rank}\n")
    options = {**pipeline("1F1B"), "training.local_batch_size": 2, CSV: str(file)}
    check_schedule(job(options), layers=6)
    with pytest.raises(UsageError, match=r"compile.enable must be false with .*_schedule_csv .*schedule.csv, which"):
        check_schedule(job({**BYPASSED, **options}), layers=6)
    with pytest.raises(UsageError, match=r'checkpoint.mode must be "none" with .*_schedule_csv .*schedule.csv, which'):
        check_schedule(job({**options, "activation_checkpoint.mode": "full"}), layers=6)
    file.write_text("0F0,0F1,0B0,0B1\n1F0,1B0,1F1,1B1\n")
    check_schedule(job({**BYPASSED, **options, "parallelism.pipeline_parallel_schedule": "ZBVZeroBubble"}), layers=6)
    file.write_text("0F0,0X0\n")
    with pytest.raises(UsageError, match=r"_schedule_csv .*schedule.csv: invalid action '0X0'"):
        check_schedule(job(options), layers=6)


def test_a_good_job_passes() -> None:
    check({**BYPASSED, **pipeline("Interleaved1F1B")})
    check({**BYPASSED, "npu.graph_passes": ["async_tp", "sequence_parallel"], "npu.sp_min_tokens": 1})


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"npu.graph_passes": ["asynctp"]},
            r"npu.graph_passes: no pass 'asynctp'; did you mean 'async_tp'\?; there are",
        ),
        ({"npu.sp_min_tokens": 0}, "npu.sp_min_tokens is 0; it must be at least 1"),
        ({"compile.enable": False, "npu.graph_passes": ["no_ops"]}, "npu.graph_passes needs compile.enable = true"),
        ({"npu.sp_min_tokens": 1}, 'npu.sp_min_tokens is for the pass "sequence_parallel", which npu.graph_passes'),
        ({"npu.sp_whole_inputs": True, "npu.graph_passes": ["no_ops"]}, "npu.sp_whole_inputs is for the pass"),
        ({"npu.moe_combine_dtype": "scores"}, "npu.moe_combine_dtype is for the converter npu_permute, which"),
    ],
)
def test_errors(options: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        check({**BYPASSED, **options})


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"compile.backend": "eager"}, "compile.backend 'eager' needs {remedy}"),
        (
            {"parallelism.enable_async_tensor_parallel": True},
            "{key} cannot be combined with parallelism.enable_async_t",
        ),
        ({"activation_checkpoint.mode": "memory_budget"}, "{key} cannot be combined with activation_checkpoint.mode"),
        (
            {"model.name": "llama3", "model.flavor": "debugmodel_flex_attn"},
            "{key} cannot be combined with flex attention",
        ),
        ({"compile.components": ["loss"]}, r"{key} cannot be combined with compile.components \['loss'\] without"),
        (pipeline("ZBVZeroBubble"), "compile.enable must be false with .*_schedule ZBVZeroBubble"),
    ],
)
@pytest.mark.parametrize(
    ("job_options", "key", "remedy"),
    [
        (BYPASSED, "npu.bypass_codegen", "npu.bypass_codegen = .off"),
        (PASSES, "npu.graph_passes", r"npu.graph_passes = \[\]: graph passes run in Inductor"),
    ],
)
def test_errors_of_compiled_blocks(
    job_options: dict[str, Any], key: str, remedy: str, options: dict[str, Any], message: str
) -> None:
    check(job_options)
    with pytest.raises(UsageError, match=message.format(key=key, remedy=remedy)):
        check({**job_options, **options})


def refuse(graph_module: torch.fx.GraphModule) -> None:
    raise UsageError("planted.key: the planted value is wrong")


@pytest.mark.parametrize("needs_gradient", [True, False])  # the error comes from the partition or from Inductor
def test_an_error_of_the_compile_backend_is_found(needs_gradient: bool) -> None:
    torch.compiler.reset()
    compiled = torch.compile(lambda x: x.sin(), backend=make_backend([refuse]), fullgraph=True)
    with pytest.raises(RuntimeError, match="planted") as raised:
        compiled(torch.ones(2, requires_grad=needs_gradient))
    stage = RuntimeError("[Stage 0] failed to run forward")
    stage.__cause__ = raised.value
    for failure in (raised.value, stage):
        assert str(usage_error(failure)) == "planted.key: the planted value is wrong"
    assert usage_error(RuntimeError("another")) is None


def test_progress_lines(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    """One line at the first graph, then one per interval. Torch compiles a backward graph when it is first needed."""
    now = [100.0]

    def compiler(graph: torch.fx.GraphModule, _: Any) -> Any:
        now[0] += 2.0
        return make_boxed_func(graph)

    monkeypatch.setattr(metrics.time, "monotonic", lambda: now[0])
    monkeypatch.setattr(metrics.logger, "propagate", True)
    caplog.set_level(logging.INFO)
    torch.compiler.reset()
    x = torch.ones(2, requires_grad=True)
    lazy = aot_autograd(fw_compiler=compiler)
    with metrics.log_compile_progress():
        for function in (torch.sin, torch.cos):
            torch.compile(function, backend=lazy)(x).sum().backward()
    torch.compile(torch.tan, backend=lazy)(x)
    lines = [record.getMessage() for record in caplog.records if record.name == metrics.logger.name]
    assert [line.partition(";")[0] for line in lines] == [
        "Compiling: 1 graph so far, 2.0 s",
        "Compiling: 4 graphs so far, 8.0 s",
    ]
