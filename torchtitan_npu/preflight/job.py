"""Check a job before anything starts. Every error is one line that names the key to change."""

from __future__ import annotations

from collections.abc import Callable

from torchtitan_npu.config.job_config import JobConfig
from torchtitan_npu.config.value_table import check_values
from torchtitan_npu.preflight import compile, data, files, model, model_sections, parallelism, pipeline, titan_sections
from torchtitan_npu.preflight.job_context import JobContext


def check_job(config: JobConfig, world_size: int) -> JobContext:
    """Raise :class:`UsageError` for the first reason why ``config`` cannot run on ``world_size`` ranks."""
    check_values(config)
    job = JobContext(config, world_size)
    for check in CHECKS:
        check(job)
    return job


CHECKS: tuple[Callable[[JobContext], None], ...] = (
    titan_sections.check_unsupported_sections,
    model.check_model,
    parallelism.check_world_size,
    titan_sections.check_optimizer,
    titan_sections.check_lr_scheduler,
    data.check_training,
    data.check_data,
    compile.check_npu,
    compile.check_compile,
    compile.check_device_graphs,
    files.check_dump_folder,
    titan_sections.check_checkpoint,
    titan_sections.check_profiling,
    titan_sections.check_comm,
    model.check_attention,
    model.check_converters,
    model_sections.check_mtp,
    model_sections.check_mxfp8,
    model.check_model_options,
    model_sections.check_replay,
    # the following build the model on the meta device
    titan_sections.check_activation_checkpoint,
    compile.check_device_graph_model,
    parallelism.check_model_divides,
    pipeline.check_pipeline,
    parallelism.check_context_parallel,
    model_sections.check_dsa,
    model_sections.check_replay_layers,
    model.check_converter_targets,
)
"""In this order: a check may rely on what the checks before it have established."""


START_CHECKS: tuple[Callable[[JobContext], None], ...] = (
    files.check_folders,
    titan_sections.check_metrics,
    model.check_tokenizer,
    data.check_dataset_files,
    model_sections.check_replay_files,
)
"""Checks of files and packages on this machine, which a dry run does not need."""


def check_start(job: JobContext) -> None:
    """Raise :class:`UsageError` for the first reason why a job that has passed :func:`check_job` cannot run here."""
    for check in START_CHECKS:
        check(job)
