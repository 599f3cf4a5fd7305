"""Section ``[profiling]``: TorchTitan's keys, and those of torch_npu's profiler."""

# no `from __future__ import annotations`: TorchTitan and tyro read the field types
from dataclasses import dataclass, field
from typing import Literal

from torchtitan.config.job_config import Profiling as TitanProfiling

from torchtitan_npu.config.allowed import PATH, Allowed, ListOf, Number

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
