"""TorchTitan's JobConfig with our options, and defaults that suit the home a job runs in."""

# no `from __future__ import annotations`: TorchTitan and tyro read the field types
from dataclasses import dataclass, field
from typing import Literal

from torchtitan.config import JobConfig as TitanJobConfig
from torchtitan.config.job_config import Debug as TitanDebug
from torchtitan.config.job_config import Training as TitanTraining

from torchtitan_npu import platform


@dataclass
class Npu:
    """Options of torchtitan_npu that belong to none of TorchTitan's sections."""

    strict_limits: bool = False
    """
    A size or dtype that an NPU's kernels would refuse is an error in every home. Otherwise it is one on an NPU, and a
    line in the log elsewhere.
    """

    layout_independent_data: bool = True
    """
    Every layout trains on the same batches, and a run resumes at another data-parallel degree. Each rank then reads
    and tokenizes the whole stream; set it to false to let TorchTitan split the stream when that becomes the bottleneck.
    """


@dataclass
class Training(TitanTraining):
    mixed_precision_param: Literal["bfloat16", "float32"] = field(
        default_factory=lambda: "float32" if platform.home() == "cpu" else "bfloat16"
    )
    """
    torch dtype to use for parameters when applying mixed precision via fully_shard or torch.autocast.
    float32 on the CPU, which has no fast bfloat16 matrix product.
    """


@dataclass
class Debug(TitanDebug):
    deterministic: bool = field(default_factory=lambda: platform.home() == "cpu")
    """Use deterministic algorithms wherever possible, may be slower. On by default on the CPU."""


@dataclass
class JobConfig(TitanJobConfig):
    training: Training = field(default_factory=Training)
    debug: Debug = field(default_factory=Debug)
    npu: Npu = field(default_factory=Npu)


def npu_options(job_config: TitanJobConfig) -> Npu:
    """The job's ``[npu]`` section; its defaults for a job that TorchTitan's own entry has read, which has none."""
    return getattr(job_config, "npu", None) or Npu()
