"""Checks of TorchTitan's section ``[profiling]``."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torchtitan_npu.config.check_helpers import check_not_on_cpu

if TYPE_CHECKING:
    from torchtitan_npu.config.preflight import JobContext


def check_profiling(job: JobContext) -> None:
    for key in ("enable_profiling", "enable_memory_snapshot"):
        check_not_on_cpu({f"profiling.{key}": getattr(job.config.profiling, key)})
