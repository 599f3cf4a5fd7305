"""Checks of the section ``[mtp]``."""

from __future__ import annotations

from torchtitan_npu.errors import UsageError
from torchtitan_npu.preflight.check_helpers import takes_section
from torchtitan_npu.preflight.job_context import JobContext


def check_mtp(job: JobContext) -> None:
    if not takes_section(job, "mtp"):
        return
    mtp, parallelism = job.config.mtp, job.config.parallelism
    if mtp.layers == 0:
        return
    for key in ("pipeline_parallel_degree", "tensor_parallel_degree", "context_parallel_degree"):
        if (degree := getattr(parallelism, key)) > 1:
            raise UsageError(
                f"mtp.layers is {mtp.layers}; it must be 0 with parallelism.{key} {degree}: multi-token prediction "
                "supports FSDP, DDP and expert parallelism only"
            )
    if mtp.layers >= job.config.training.seq_len:
        raise UsageError(
            f"mtp.layers is {mtp.layers}; it must be less than training.seq_len, {job.config.training.seq_len}: the "
            "deepest layer would have no token to predict"
        )
