"""Check a job before anything starts. Every error is one line that names the key to change."""

from __future__ import annotations

from collections.abc import Callable

from torchtitan_npu.config.job_config import JobConfig
from torchtitan_npu.config.value_table import check_values
from torchtitan_npu.preflight.checkpoint import check_checkpoint
from torchtitan_npu.preflight.compile import check_compile, check_device_graph_model, check_device_graphs, check_npu
from torchtitan_npu.preflight.data import check_data, check_dataset_files, check_training
from torchtitan_npu.preflight.files import check_dump_folder, check_folders
from torchtitan_npu.preflight.job_context import JobContext
from torchtitan_npu.preflight.model import (
    check_attention,
    check_converter_targets,
    check_converters,
    check_model,
    check_model_options,
    check_tokenizer,
)
from torchtitan_npu.preflight.model_sections import (
    check_dsa,
    check_mtp,
    check_mxfp8,
    check_replay,
    check_replay_files,
    check_replay_layers,
)
from torchtitan_npu.preflight.optimizer import check_optimizer
from torchtitan_npu.preflight.parallelism import check_context_parallel, check_model_divides, check_world_size
from torchtitan_npu.preflight.pipeline import check_pipeline
from torchtitan_npu.preflight.titan_sections import (
    check_activation_checkpoint,
    check_comm,
    check_lr_scheduler,
    check_metrics,
    check_profiling,
    check_unsupported_sections,
)


def check_job(config: JobConfig, world_size: int) -> JobContext:
    """Raise :class:`UsageError` for the first reason why ``config`` cannot run on ``world_size`` ranks."""
    check_values(config)
    job = JobContext(config, world_size)
    for check in CHECKS:
        check(job)
    return job


CHECKS: tuple[Callable[[JobContext], None], ...] = (
    check_unsupported_sections,
    check_model,
    check_world_size,
    check_optimizer,
    check_lr_scheduler,
    check_training,
    check_data,
    check_npu,
    check_compile,
    check_device_graphs,
    check_dump_folder,
    check_checkpoint,
    check_profiling,
    check_comm,
    check_attention,
    check_converters,
    check_mtp,
    check_mxfp8,
    check_model_options,
    check_replay,
    # the following build the model on the meta device
    check_activation_checkpoint,
    check_device_graph_model,
    check_model_divides,
    check_pipeline,
    check_context_parallel,
    check_dsa,
    check_replay_layers,
    check_converter_targets,
)
"""In this order: a check may rely on what the checks before it have established."""


START_CHECKS: tuple[Callable[[JobContext], None], ...] = (
    check_folders,
    check_metrics,
    check_tokenizer,
    check_dataset_files,
    check_replay_files,
)
"""Checks of files and packages on this machine, which a dry run does not need."""


def check_start(job: JobContext) -> None:
    """Raise :class:`UsageError` for the first reason why a job that has passed :func:`check_job` cannot run here."""
    for check in START_CHECKS:
        check(job)
