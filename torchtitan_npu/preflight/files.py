"""Checks of the folders to which a job writes, and of the checkpoint that it loads."""

from __future__ import annotations

import os
from pathlib import Path

from torch import Tensor

from torchtitan_npu.components.checkpoint.folder import DamagedCheckpoint, saved_checkpoints
from torchtitan_npu.components.checkpoint.source import (
    CheckpointSource,
    find_source,
    initial_load_key,
    stored_shapes,
    unused_weights,
)
from torchtitan_npu.errors import UsageError, file_error
from torchtitan_npu.preflight.job_context import JobContext


def check_dump_folder(job: JobContext) -> None:
    """Raise if the job would write its configuration outside its dump folder."""
    folder, name = Path(job.config.job.dump_folder), job.config.job.save_config_file
    if name is None:
        return
    target = (folder / name).resolve()
    if folder.resolve() not in target.parents or target.is_dir():
        raise UsageError(f"job.save_config_file {name!r} must name a file inside job.dump_folder {str(folder)!r}")


def check_folders(job: JobContext) -> None:
    """Raise if the job cannot write to its folders."""
    config = job.config
    folder = Path(config.job.dump_folder)
    check_writable("job.dump_folder", folder)
    parts = {
        "checkpoint.folder": config.checkpoint.folder if config.checkpoint.enable else None,
        "metrics.save_tb_folder": config.metrics.save_tb_folder if config.metrics.enable_tensorboard else None,
        "profiling.save_traces_folder": (
            config.profiling.save_traces_folder if config.profiling.enable_profiling else None
        ),
        "profiling.save_memory_snapshot_folder": (
            config.profiling.save_memory_snapshot_folder if config.profiling.enable_memory_snapshot else None
        ),
        "comm.save_traces_folder": config.comm.save_traces_folder if config.comm.trace_buf_size > 0 else None,
    }
    for key, part in parts.items():
        if part is not None:
            check_writable(key, folder / part)
    if config.job.save_config_file is not None:
        check_writable("job.save_config_file", (folder / config.job.save_config_file).parent)


def check_writable(key: str, folder: Path) -> None:
    """Raise unless ``folder``, or the nearest folder above it that exists, can be written."""
    for found in (folder, *folder.absolute().parents):
        if found.exists():
            break
        if found.is_symlink():
            raise UsageError(f"{key} {str(folder)!r}: {str(found)!r} is a link to nothing")
    if not found.is_dir():
        raise UsageError(f"{key} {str(folder)!r}: {str(found)!r} is a file, not a folder")
    if not os.access(found, os.W_OK | os.X_OK):
        raise UsageError(f"{key} {str(folder)!r}: {str(found)!r} is not writable")


STATES = ("optimizer.", "lr_scheduler.", "train_state.", "dataloader.")
"""Beginnings of names in a checkpoint that are not the model's."""


def check_checkpoint_files(job: JobContext) -> None:
    """Raise :class:`UsageError` if the job cannot load what it asks for."""
    config, checkpoint = job.config, job.config.checkpoint
    if not checkpoint.enable or checkpoint.create_seed_checkpoint:
        return
    folder = Path(config.job.dump_folder) / checkpoint.folder
    steps, assets = config.training.steps, config.model.hf_assets_path
    key = "checkpoint.folder"
    try:
        saved = saved_checkpoints(folder)
        key = key if saved else initial_load_key(checkpoint)
        source = find_source(checkpoint, saved, folder, steps, checkpoint.load_step, assets)
    except OSError as error:
        raise UsageError(f"{key}: {file_error(error)}") from error
    if source is not None and not source.is_finished:
        check_source(job, source, key)


def check_source(job: JobContext, source: CheckpointSource, key: str) -> None:
    """Raise :class:`UsageError` if ``source``, which ``key`` names, is not of the job's model or is incomplete."""
    checkpoint = job.config.checkpoint
    try:
        stored = stored_shapes(source.path)
    except (DamagedCheckpoint, OSError) as error:
        if source.saved:  # the load reports it, together with the checkpoint to fall back to
            return
        reason = file_error(error) if isinstance(error, OSError) else error
        raise UsageError(f"{key}: {reason}") from error
    expected, model = _expected(job, source), f"{job.config.model.name} {job.config.model.flavor}"
    for name, tensor in expected.items():
        if name not in stored:
            if job.ties_weights and name in ("output.weight", "lm_head.weight"):
                continue
            raise UsageError(f"{source.path} has no {name}: it is not of {model}")
        shape = stored[name]
        if checkpoint.initial_load_in_hf_quantized and name.endswith("_blocks"):
            *rows, groups, size = shape  # MXFP4: two numbers in a byte
            shape = (*rows, groups * size * 2)
        if shape != tuple(tensor.shape):
            raise UsageError(
                f"{name} is {shape} in {source.path} and {tuple(tensor.shape)} in {model}: "
                "the checkpoint is of another model"
            )
    if source.in_hugging_face_format:
        unused = unused_weights(stored, expected, job.ties_weights)
    else:
        unused = sorted(name for name in stored if name not in expected and not name.startswith(STATES))
    if unused:
        more = f" and {len(unused) - 1} more tensors" if len(unused) > 1 else ""
        raise UsageError(f"{source.path} has {unused[0]}{more} that {model} lacks: it is of another model")


def _expected(job: JobContext, source: CheckpointSource) -> dict[str, Tensor]:
    """Return the model's tensors on the meta device, by their names in the format of ``source``."""
    tensors = job.model.state_dict()
    if not source.in_hugging_face_format:
        return tensors
    adapter = job.train_spec.state_dict_adapter
    if adapter is None:
        model = f"{job.config.model.name} {job.config.model.flavor}"
        raise UsageError(f"checkpoint.initial_load_in_hf: {model} has no state-dict adapter for Hugging Face's format")
    return adapter(job.model_args, None).to_hf(tensors)
