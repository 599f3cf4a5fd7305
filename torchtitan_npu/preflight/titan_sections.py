"""Checks of TorchTitan's smaller sections, and of those that this trainer does not have."""

from __future__ import annotations

from importlib.util import find_spec

from torch import nn

from torchtitan_npu import platform
from torchtitan_npu.config.titan_sections import Profiling, hccl_buffers
from torchtitan_npu.errors import UsageError
from torchtitan_npu.preflight.check_helpers import check_not_on_cpu
from torchtitan_npu.preflight.job_context import JobContext


def check_unsupported_sections(job: JobContext) -> None:
    """Raise for a section that TorchTitan's Trainer reads nowhere: the job would run without what it asks for."""
    if job.config.fault_tolerance.enable:
        raise UsageError("fault_tolerance.enable must be false: only TorchTitan's experiment for TorchFT supports it")
    if job.config.memory_estimation.enable:
        raise UsageError("memory_estimation.enable must be false; torchtitan-npu plan estimates the memory of a job")


def check_activation_checkpoint(job: JobContext) -> None:
    options, compile = job.config.activation_checkpoint, job.config.compile
    if options.mode == "memory_budget" and not (compile.enable and "model" in compile.components):
        raise UsageError(
            'activation_checkpoint.mode = "memory_budget" needs compile.enable = true and "model" in '
            "compile.components: the compiler chooses what to recompute"
        )
    if options.mode != "selective" or options.selective_ac_option != "op":
        return
    if options.debug:
        raise UsageError(
            'activation_checkpoint.debug must be false with selective_ac_option = "op": torch does not support both'
        )
    for part in options.per_op_sac_force_recompute_mm_shapes_by_fqns:
        for name, module in job.model.named_modules():
            if part in name and name.startswith("layers.") and not isinstance(module, nn.Linear):
                raise UsageError(
                    f"activation_checkpoint.per_op_sac_force_recompute_mm_shapes_by_fqns: {part!r} matches {name}, "
                    f"a {type(module).__name__}; it must match nn.Linear only"
                )


def check_lr_scheduler(job: JobContext) -> None:
    """Raise if the schedule ends before the job: TorchTitan's learning rate would then be negative, or rise again."""
    total, steps = job.config.lr_scheduler.total_steps, job.config.training.steps
    after = "rise again" if job.config.lr_scheduler.decay_type == "cosine" else "be negative"
    if total is not None and total < steps:
        raise UsageError(
            f"lr_scheduler.total_steps is {total}; it must be at least training.steps, {steps}: after its last step "
            f"the learning rate would {after}"
        )


def check_metrics(job: JobContext) -> None:
    """Raise if Weights & Biases is asked for and missing: TorchTitan logs an error and trains without it."""
    if job.config.metrics.enable_wandb and find_spec("wandb") is None:
        raise UsageError("metrics.enable_wandb needs the package wandb, which is not installed: pip install wandb")


def check_profiling(job: JobContext) -> None:
    profiling = job.config.profiling
    for key in ("enable_profiling", "enable_memory_snapshot"):
        check_not_on_cpu({f"profiling.{key}": getattr(profiling, key)})
    for key, default in vars(Profiling()).items():
        if key.startswith("npu_") and getattr(profiling, key) != default:
            if platform.job_backend() != "npu":
                raise UsageError(f"profiling.{key} is for torch_npu's profiler; this job is not for NPUs")
            if not profiling.enable_profiling:
                raise UsageError(f"profiling.{key} needs profiling.enable_profiling = true")
    if not profiling.enable_profiling:
        return
    cycle = profiling.profiler_warmup + profiling.profiler_active
    if profiling.profile_freq < cycle:
        raise UsageError(
            f"profiling.profile_freq is {profiling.profile_freq}; "
            f"it must be at least profiler_warmup + profiler_active, {cycle}"
        )
    for rank in profiling.npu_ranks:
        if not 0 <= rank < job.world_size:
            raise UsageError(f"profiling.npu_ranks: there is no rank {rank}; the job has {job.world_size}")


def check_comm(job: JobContext) -> None:
    comm = job.config.comm
    if hccl_buffers(comm) and platform.job_backend() != "npu":
        raise UsageError(f"comm.hccl_buffers is for HCCL; this job runs on {platform.job_backend()}")
