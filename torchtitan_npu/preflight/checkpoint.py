"""Checks of the section ``[checkpoint]``."""

from __future__ import annotations

import torch

from torchtitan_npu import platform
from torchtitan_npu.config.titan_sections import Checkpoint
from torchtitan_npu.errors import UsageError
from torchtitan_npu.preflight.job_context import JobContext


def check_checkpoint(job: JobContext) -> None:
    checkpoint = job.config.checkpoint
    if checkpoint.async_mode == "async_with_pinned_mem":
        _check_pinned_memory()
    if checkpoint.create_seed_checkpoint and job.world_size != 1:
        raise UsageError(f"checkpoint.create_seed_checkpoint needs one rank, not {job.world_size}")
    _check_requests(checkpoint)


def _check_pinned_memory() -> None:
    mode = 'checkpoint.async_mode = "async_with_pinned_mem"'
    if platform.job_backend() != "cuda":
        raise UsageError(f'{mode} needs a GPU: torch pins the memory of a checkpoint only with CUDA; use "async"')
    if torch.__version__ < "2.13":  # it closes the object that TorchTitan uses for all saves
        raise UsageError(f'{mode} needs torch 2.13: with torch {torch.__version__} the second save fails; use "async"')


def _check_requests(checkpoint: Checkpoint) -> None:
    """Raise for keys that would have no effect, or would fail only at the end of the job."""
    if not checkpoint.enable:
        requests = {
            "checkpoint.create_seed_checkpoint": checkpoint.create_seed_checkpoint,
            "checkpoint.initial_load_path": checkpoint.initial_load_path,
            "checkpoint.initial_load_in_hf": checkpoint.initial_load_in_hf,
            "checkpoint.load_step": checkpoint.load_step != -1,
        }
        for key, is_set in requests.items():
            if is_set:
                raise UsageError(f"{key} needs checkpoint.enable = true; nothing is loaded or saved without it")
    if checkpoint.initial_load_in_hf_quantized and not checkpoint.initial_load_in_hf:
        raise UsageError("checkpoint.initial_load_in_hf_quantized needs checkpoint.initial_load_in_hf = true")
    if checkpoint.initial_load_in_hf and not checkpoint.initial_load_model_only:
        raise UsageError("checkpoint.initial_load_in_hf loads only the model: set initial_load_model_only = true")
    if checkpoint.last_save_in_hf and not checkpoint.last_save_model_only:
        raise UsageError("checkpoint.last_save_in_hf saves only the model: set last_save_model_only = true")
