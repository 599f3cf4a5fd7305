"""Section ``[profiling]``: TorchTitan's keys, and those of torch_npu's profiler."""

# no `from __future__ import annotations`: TorchTitan and tyro read the field types
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

from torchtitan.config.job_config import Profiling as TitanProfiling

from torchtitan_npu import platform
from torchtitan_npu.config.allowed import PATH, Allowed, ListOf, Number
from torchtitan_npu.config.check_helpers import check_not_on_cpu
from torchtitan_npu.errors import UsageError

if TYPE_CHECKING:
    from torchtitan_npu.config.preflight import JobContext

ALLOWED: dict[str, Allowed] = {
    "save_traces_folder": PATH,
    "profile_freq": Number(1),
    "profiler_active": Number(1),
    "profiler_warmup": Number(0),
    "save_memory_snapshot_folder": PATH,
    "npu_ranks": ListOf(Number(0)),
    "npu_cycles": Number(0),
}


@dataclass
class Profiling(TitanProfiling):
    npu_level: Literal["level0", "level1", "level2"] = "level0"
    """
    What torch_npu's profiler collects on the device. `"level0"`: operators and collectives. `"level1"`: also CANN's
    calls, and the use of each core's pipelines. `"level2"`: also the runtime's calls and the AI CPU.
    """

    npu_ranks: list[int] = field(default_factory=lambda: [0])
    """Ranks to profile on NPUs. Empty: all."""

    npu_cycles: int = 0
    """Profile only this many times, every `profile_freq` steps; 0: to the end of the job. On NPUs."""

    npu_memory: bool = False
    """Record each allocation of a profiled step in the trace. On NPUs."""

    npu_stack: bool = False
    """Record the Python stack of each operator. On NPUs."""


def check_profiling(job: "JobContext") -> None:
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
