"""Checks of ``[optimizer]``, ``[checkpoint]`` and TorchTitan's smaller sections, and of those without an effect."""

from __future__ import annotations

from importlib.util import find_spec

import torch
from torch import nn
from torchtitan.components.optimizer import build_optimizers, build_optimizers_with_moe_load_balancing
from torchtitan.models.moe.moe import MoE

from torchtitan_npu import platform
from torchtitan_npu.components.optimizers import SwappableOptimizers
from torchtitan_npu.config.allowed import check_known
from torchtitan_npu.config.titan_sections import Profiling, hccl_buffers
from torchtitan_npu.errors import UsageError
from torchtitan_npu.preflight.job_context import JobContext, check_adapted, check_not_on_cpu, first_set


def check_unsupported_sections(job: JobContext) -> None:
    """Raise for a section that TorchTitan's Trainer reads nowhere: the job would run without what it asks for."""
    if job.config.fault_tolerance.enable:
        raise UsageError("fault_tolerance.enable must be false: only TorchTitan's experiment for TorchFT supports it")
    if job.config.memory_estimation.enable:
        raise UsageError("memory_estimation.enable must be false; torchtitan-npu plan estimates the memory of a job")


def check_optimizer(job: JobContext) -> None:
    config, optimizer = job.config, job.config.optimizer
    build = job.train_spec.build_optimizers_fn
    can_swap = isinstance(build, SwappableOptimizers)
    # another builder may know other names, and puts the optimizer states where it likes
    if can_swap or build in (build_optimizers, build_optimizers_with_moe_load_balancing):
        check_known("optimizer.name", optimizer.name, ("Adam", "AdamW"))
    dims = job.dims
    sums_counts = config.npu.moe_sequence_parallel and dims.ep > 1 and dims.tp > 1 and dims.etp == 1
    if job.is_adapted and sums_counts and not can_swap and _balances_experts(job):
        raise UsageError(
            "npu.moe_sequence_parallel must be false: the train spec's build_optimizers_fn is none of TorchTitan's "
            "builders, and would balance the experts by the tokens of a part of the tensor-parallel ranks; or make it "
            "torchtitan_npu.components.optimizers.SwappableOptimizers(balances_experts=True)"
        )
    if not optimizer.swap:
        return
    excluded = {
        # steps one parameter at a time as its gradient arrives: no transfer is left to overlap
        "optimizer.early_step_in_backward": optimizer.early_step_in_backward,
        # keeps the states in host memory already
        "training.enable_cpu_offload": config.training.enable_cpu_offload,
    }
    if key := first_set(excluded):
        raise UsageError(f"optimizer.swap cannot be combined with {key} = true")
    check_adapted(job, "optimizer.swap")
    if not can_swap:
        raise UsageError(
            "optimizer.swap must be false: the train spec's build_optimizers_fn is none of TorchTitan's builders, "
            "and places the optimizer states itself"
        )


def _balances_experts(job: JobContext) -> bool:
    return any(isinstance(module, MoE) and module.load_balance_coeff for module in job.model.modules())


def check_checkpoint(job: JobContext) -> None:
    checkpoint = job.config.checkpoint
    if checkpoint.async_mode == "async_with_pinned_mem":
        mode = 'checkpoint.async_mode = "async_with_pinned_mem"'
        if platform.job_backend() != "cuda":
            raise UsageError(f'{mode} needs a GPU: torch pins the memory of a checkpoint only with CUDA; use "async"')
        if torch.__version__ < "2.13":  # it closes the object that TorchTitan uses for all saves
            version = torch.__version__
            raise UsageError(f'{mode} needs torch 2.13: with torch {version} the second save fails; use "async"')
    if checkpoint.create_seed_checkpoint and job.world_size != 1:
        raise UsageError(f"checkpoint.create_seed_checkpoint needs one rank, not {job.world_size}")
    requests = {
        "checkpoint.create_seed_checkpoint": checkpoint.create_seed_checkpoint,
        "checkpoint.initial_load_path": bool(checkpoint.initial_load_path),
        "checkpoint.initial_load_in_hf": checkpoint.initial_load_in_hf,
        "checkpoint.load_step": checkpoint.load_step != -1,
    }
    if not checkpoint.enable and (key := first_set(requests)):
        raise UsageError(f"{key} needs checkpoint.enable = true; nothing is loaded or saved without it")
    if checkpoint.initial_load_in_hf_quantized and not checkpoint.initial_load_in_hf:
        raise UsageError("checkpoint.initial_load_in_hf_quantized needs checkpoint.initial_load_in_hf = true")
    if checkpoint.initial_load_in_hf and not checkpoint.initial_load_model_only:
        raise UsageError("checkpoint.initial_load_in_hf loads only the model: set initial_load_model_only = true")
    if checkpoint.last_save_in_hf and not checkpoint.last_save_model_only:
        raise UsageError("checkpoint.last_save_in_hf saves only the model: set last_save_model_only = true")


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
