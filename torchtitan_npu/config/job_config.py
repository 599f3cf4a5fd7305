"""TorchTitan's JobConfig with the sections, keys and defaults of this package."""

# no `from __future__ import annotations`: TorchTitan and tyro read the field types
from dataclasses import dataclass, field

from torchtitan.config import JobConfig as TitanJobConfig
from torchtitan.config.job_config import Debug as TitanDebug

from torchtitan_npu import platform
from torchtitan_npu.config.data import Data
from torchtitan_npu.config.model_sections import Dsa, Mtp, Mxfp8, Replay
from torchtitan_npu.config.npu import Npu
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


def npu_options(job_config: TitanJobConfig) -> Npu:
    """Return the job's ``[npu]`` section, or its defaults for a config that TorchTitan's own entry has parsed."""
    return getattr(job_config, "npu", None) or Npu()


def compiles_blocks(job_config: TitanJobConfig) -> bool:
    """Return whether this package compiles the model's blocks. TorchTitan takes neither a backend object nor a pass."""
    npu = npu_options(job_config)
    return job_config.compile.enable and (npu.bypass_codegen != "off" or bool(npu.graph_passes))


def data_options(job_config: TitanJobConfig) -> Data:
    """Return the job's ``[data]`` section, or its defaults."""
    return getattr(job_config, "data", None) or Data()


def dsa_options(job_config: TitanJobConfig) -> Dsa:
    """Return the job's ``[dsa]`` section, or its defaults."""
    return getattr(job_config, "dsa", None) or Dsa()


def mtp_options(job_config: TitanJobConfig) -> Mtp:
    """Return the job's ``[mtp]`` section, or its defaults."""
    return getattr(job_config, "mtp", None) or Mtp()


def mxfp8_options(job_config: TitanJobConfig) -> Mxfp8:
    """Return the job's ``[mxfp8]`` section, or its defaults."""
    return getattr(job_config, "mxfp8", None) or Mxfp8()


def replay_options(job_config: TitanJobConfig) -> Replay:
    """Return the job's ``[replay]`` section, or its defaults."""
    return getattr(job_config, "replay", None) or Replay()
