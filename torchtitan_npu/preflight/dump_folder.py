"""Checks of TorchTitan's section ``[job]``, and of the folders to which a job writes."""

from __future__ import annotations

import os
from pathlib import Path

from torchtitan_npu.config.allowed import LINE, MODULE, PATH, Allowed
from torchtitan_npu.errors import UsageError
from torchtitan_npu.preflight.job_context import JobContext

ALLOWED: dict[str, Allowed] = {
    "config_file": PATH,
    "dump_folder": PATH,
    "description": LINE,
    "save_config_file": LINE,
    "custom_config_module": MODULE,
}


def check_dump_folder(job: JobContext) -> None:
    """Raise if the job would write its configuration outside its own folder."""
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
