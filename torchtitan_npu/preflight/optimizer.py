"""Checks of the section ``[optimizer]``."""

from __future__ import annotations

from torchtitan_npu import platform
from torchtitan_npu.config.allowed import check_known
from torchtitan_npu.errors import UsageError
from torchtitan_npu.preflight.check_helpers import check_adapted
from torchtitan_npu.preflight.job_context import JobContext


def check_optimizer(job: JobContext) -> None:
    config, optimizer = job.config, job.config.optimizer
    if job.has_titan_optimizers:
        check_known("optimizer.name", optimizer.name, ("Adam", "AdamW"))
    if optimizer.triton:
        _check_triton(job)
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
            "optimizer.swap must be false: the train spec's build_optimizers_fn does not use "
            "TorchTitan's OptimizersContainer"
        )


def _check_triton(job: JobContext) -> None:
    config, optimizer = job.config, job.config.optimizer
    excluded = {
        "optimizer.swap = true": optimizer.swap,
        "optimizer.early_step_in_backward = true": optimizer.early_step_in_backward,
        "training.enable_cpu_offload = true": config.training.enable_cpu_offload,
        f"optimizer.name = {optimizer.name!r}: the kernel is for AdamW": optimizer.name != "AdamW",
        f"optimizer.implementation = {optimizer.implementation!r}": optimizer.implementation != "fused",
        f"{job.world_size} ranks: it has run on one GPU only": job.world_size != 1,
    }
    for setting, is_set in excluded.items():
        if is_set:
            raise UsageError(f"optimizer.triton cannot be combined with {setting}")
    if platform.job_backend() != "cuda":
        raise UsageError(f"optimizer.triton needs an NVIDIA GPU; this job runs on the backend {platform.job_backend()}")
    check_adapted(job, "optimizer.triton")
    if not job.can_swap_optimizers:
        raise UsageError(
            "optimizer.triton must be false: the train spec's build_optimizers_fn does not use TorchTitan's "
            "OptimizersContainer"
        )
