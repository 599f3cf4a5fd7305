"""Checks of TorchTitan's section ``[lr_scheduler]``."""

from __future__ import annotations

from torchtitan_npu.config.allowed import Allowed, Number
from torchtitan_npu.errors import UsageError
from torchtitan_npu.preflight.job_context import JobContext

ALLOWED: dict[str, Allowed] = {
    "warmup_steps": Number(0),
    "total_steps": Number(1),
    "decay_ratio": Number(0, 1),
    "min_lr_factor": Number(0, 1),
}


def check_lr_scheduler(job: JobContext) -> None:
    """Raise if the schedule ends before the job: TorchTitan's learning rate would then be negative, or rise again."""
    total, steps = job.config.lr_scheduler.total_steps, job.config.training.steps
    after = "rise again" if job.config.lr_scheduler.decay_type == "cosine" else "be negative"
    if total is not None and total < steps:
        raise UsageError(
            f"lr_scheduler.total_steps is {total}; it must be at least training.steps, {steps}: after its last step "
            f"the learning rate would {after}"
        )
