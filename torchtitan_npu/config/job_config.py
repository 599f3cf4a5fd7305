"""TorchTitan's JobConfig with the sections, keys and defaults of this package."""

# no `from __future__ import annotations`: TorchTitan and tyro read the field types
from dataclasses import dataclass, field, fields

from torchtitan.config import JobConfig as TitanJobConfig
from torchtitan.config.job_config import Debug as TitanDebug

from torchtitan_npu import platform
from torchtitan_npu.config.sections import Data, Dsa, Mtp, Mxfp8, Npu, Replay
from torchtitan_npu.config.titan_sections import Checkpoint, Comm, Optimizer, Parallelism, Profiling, Training


@dataclass
class Debug(TitanDebug):
    deterministic: bool = field(default_factory=lambda: platform.job_backend() == "cpu")
    """Use deterministic algorithms where possible; they may be slower. Default: true on the CPU."""


@dataclass
class JobConfig(TitanJobConfig):
    training: Training = field(default_factory=Training)
    optimizer: Optimizer = field(default_factory=Optimizer)
    debug: Debug = field(default_factory=Debug)
    parallelism: Parallelism = field(default_factory=Parallelism)
    checkpoint: Checkpoint = field(default_factory=Checkpoint)
    comm: Comm = field(default_factory=Comm)
    profiling: Profiling = field(default_factory=Profiling)
    npu: Npu = field(default_factory=Npu)
    data: Data = field(default_factory=Data)
    dsa: Dsa = field(default_factory=Dsa)
    mtp: Mtp = field(default_factory=Mtp)
    mxfp8: Mxfp8 = field(default_factory=Mxfp8)
    replay: Replay = field(default_factory=Replay)


def with_all_sections(config: TitanJobConfig) -> JobConfig:
    """Return ``config`` with this package's sections: with their defaults if TorchTitan's own entry has parsed it."""
    if isinstance(config, JobConfig):
        return config
    names = {field.name for field in fields(JobConfig)}
    return JobConfig(**{name: section for name, section in vars(config).items() if name in names})


def compiles_blocks(config: TitanJobConfig) -> bool:
    """Return whether this package compiles the model's blocks. TorchTitan takes neither a backend object nor a pass."""
    npu = with_all_sections(config).npu
    return config.compile.enable and (npu.bypass_codegen != "off" or bool(npu.graph_passes))
