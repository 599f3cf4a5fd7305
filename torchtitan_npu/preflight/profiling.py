"""Checks of the section ``[profiling]``."""

from __future__ import annotations

from torchtitan_npu import platform
from torchtitan_npu.config.profiling import Profiling
from torchtitan_npu.errors import UsageError
from torchtitan_npu.preflight.check_helpers import check_not_on_cpu
from torchtitan_npu.preflight.job_context import JobContext


def check_profiling(job: JobContext) -> None:
    profiling = job.config.profiling
    for key in ("enable_profiling", "enable_memory_snapshot"):
        check_not_on_cpu({f"profiling.{key}": getattr(profiling, key)})
    for key, default in vars(Profiling()).items():
        if key.startswith("npu_") and getattr(profiling, key) != default:
            if platform.job_backend() != "npu":
                raise UsageError(f"profiling.{key} is for torch_npu's profiler; this job is not for NPUs")
            if not profiling.enable_profiling:
                raise UsageError(f"profiling.{key} needs profiling.enable_profiling = true")
    if not profiling.enable_profiling:
        return
    cycle = profiling.profiler_warmup + profiling.profiler_active
    if profiling.profile_freq < cycle:
        raise UsageError(
            f"profiling.profile_freq is {profiling.profile_freq}; "
            f"it must be at least profiler_warmup + profiler_active, {cycle}"
        )
    for rank in profiling.npu_ranks:
        if not 0 <= rank < job.world_size:
            raise UsageError(f"profiling.npu_ranks: there is no rank {rank}; the job has {job.world_size}")
