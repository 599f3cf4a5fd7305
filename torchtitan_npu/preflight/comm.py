"""Checks of the section ``[comm]``."""

from __future__ import annotations

from torchtitan_npu import platform
from torchtitan_npu.config.comm import hccl_buffers
from torchtitan_npu.errors import UsageError
from torchtitan_npu.preflight.job_context import JobContext


def check_comm(job: JobContext) -> None:
    comm = job.config.comm
    if hccl_buffers(comm) and platform.job_backend() != "npu":
        raise UsageError(f"comm.hccl_buffers is for HCCL; this job runs on {platform.job_backend()}")
