"""Checks of a job's options against DeepSeek-V3.2, before the start."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torchtitan.config import JobConfig

from torchtitan_npu.errors import UsageError

if TYPE_CHECKING:
    from torchtitan_npu.models.deepseek_v32.args import DeepSeekV32ModelArgs


def check_parallelism(args: DeepSeekV32ModelArgs, job_config: JobConfig) -> None:
    for key in ("tensor_parallel_degree", "context_parallel_degree"):
        if getattr(job_config.parallelism, key) > 1 and not (args.absorb or args.warmup):
            raise UsageError(f"parallelism.{key} must be 1 for a flavor with absorb=False: it needs latent keys")
