"""Checks of TorchTitan's section ``[checkpoint]``."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torchtitan_npu.config.check_helpers import check_not_on_cpu
from torchtitan_npu.errors import UsageError

if TYPE_CHECKING:
    from torchtitan_npu.config.preflight import JobContext


def check_checkpoint(job: JobContext) -> None:
    checkpoint = job.config.checkpoint
    pinned = checkpoint.async_mode == "async_with_pinned_mem"
    check_not_on_cpu({'checkpoint.async_mode = "async_with_pinned_mem"': pinned})
    if not checkpoint.create_seed_checkpoint:
        return
    if job.world_size != 1:
        raise UsageError(f"checkpoint.create_seed_checkpoint needs one rank, not {job.world_size}")
    if not checkpoint.enable:
        raise UsageError("checkpoint.create_seed_checkpoint needs checkpoint.enable = true")
