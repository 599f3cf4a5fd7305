"""Checks of TorchTitan's section ``[job]``."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from torchtitan_npu.errors import UsageError

if TYPE_CHECKING:
    from torchtitan_npu.config.preflight import JobContext


def check_dump_folder(job: JobContext) -> None:
    """Raise if a job would write its configuration outside its own folder."""
    folder, name = Path(job.config.job.dump_folder), job.config.job.save_config_file
    if name is None:
        return
    target = (folder / name).resolve()
    if folder.resolve() not in target.parents or target.is_dir():
        raise UsageError(f"job.save_config_file {name!r} must name a file inside job.dump_folder {str(folder)!r}")
