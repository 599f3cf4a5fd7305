"""Checks of the section ``[optimizer]``."""

from __future__ import annotations

from torchtitan_npu.config.allowed import check_known
from torchtitan_npu.errors import UsageError
from torchtitan_npu.preflight.check_helpers import check_adapted
from torchtitan_npu.preflight.job_context import JobContext


def check_optimizer(job: JobContext) -> None:
    config, optimizer = job.config, job.config.optimizer
    if job.has_titan_optimizers:
        check_known("optimizer.name", optimizer.name, ("Adam", "AdamW"))
    if not optimizer.swap:
        return
    excluded = {
        # steps one parameter at a time as its gradient arrives: no transfer is left to overlap
        "optimizer.early_step_in_backward": optimizer.early_step_in_backward,
        # keeps the states in host memory already
        "training.enable_cpu_offload": config.training.enable_cpu_offload,
    }
    for key, is_set in excluded.items():
        if is_set:
            raise UsageError(f"optimizer.swap cannot be combined with {key} = true")
    check_adapted(job, "optimizer.swap")
    if not job.can_swap_optimizers:
        raise UsageError(
            "optimizer.swap must be false: the train spec's build_optimizers_fn is none of TorchTitan's builders, "
            "and places the optimizer states itself"
        )
