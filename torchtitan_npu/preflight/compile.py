"""Checks of ``[compile]`` and ``[npu]``: code generation, graph passes, device graphs."""

from __future__ import annotations

import torch
from torchtitan.models.moe.moe import GroupedExperts

from torchtitan_npu import platform
from torchtitan_npu.compile.passes import PASSES
from torchtitan_npu.config.allowed import check_known
from torchtitan_npu.config.job_config import compiles_blocks
from torchtitan_npu.config.sections import Npu
from torchtitan_npu.distributed import matmul_sharding
from torchtitan_npu.errors import UsageError, did_you_mean
from torchtitan_npu.preflight.job_context import JobContext, check_adapted, check_not_on_cpu, first_set
from torchtitan_npu.torch_internals.dtensor import has_single_dim_strategy
from torchtitan_npu.torch_internals.inductor import check_options


def check_compile(job: JobContext) -> None:
    """Check the backend, and a job that this package compiles: without code generation, or with graph passes."""
    config = job.config
    if config.compile.enable:
        check_known("compile.backend", config.compile.backend, torch.compiler.list_backends(exclude_tags=()))
    if not compiles_blocks(config):
        return
    if config.npu.bypass_codegen != "off":
        key, off = "npu.bypass_codegen", 'npu.bypass_codegen = "off"'
        remedy = 'set it to "off" or compile.enable to false'
        reason = "else Inductor compiles"
    else:
        key, off, remedy = "npu.graph_passes", "npu.graph_passes = []", "set it to []"
        reason = "graph passes run in Inductor"
    if config.compile.backend != "inductor":
        raise UsageError(f"compile.backend {config.compile.backend!r} needs {off}: {reason}")
    excluded = {
        # TorchTitan's code generator chooses what to recompute
        'activation_checkpoint.mode = "memory_budget"': config.activation_checkpoint.mode == "memory_budget",
        # a pass of Inductor; this package has its own
        'parallelism.enable_async_tensor_parallel = true (use npu.graph_passes = ["async_tp"])': (
            config.parallelism.enable_async_tensor_parallel
        ),
        # its kernel is generated
        f"flex attention (model.flavor {config.model.flavor!r})": job.attention == "flex",
        f'compile.components {config.compile.components} without "model", the only component compiled': (
            "model" not in config.compile.components
        ),
    }
    if option := first_set(excluded):
        raise UsageError(f"{key} cannot be combined with {option}; {remedy}")
    check_adapted(job, key, f"; {remedy}")
    if config.npu.bypass_codegen != "off":
        check_options()


def check_device_graphs(job: JobContext) -> None:
    """Raise if the job captures its blocks and a graph cannot hold them."""
    config, dims = job.config, job.dims
    if not config.npu.device_graphs:
        return
    check_not_on_cpu({"npu.device_graphs": True})
    recomputes = config.activation_checkpoint.mode in ("full", "selective")
    reasons = {
        "pipeline parallel: several microbatches are in a stage at once": dims.pp_enabled,
        "FSDP: the gathered weights have other addresses in each step": dims.fsdp_enabled,
        "data-parallel replicas: their gradients are reduced during the backward pass": dims.dp_replicate_enabled,
        "tensor parallel: collectives are not captured": dims.tp_enabled,
        "context parallel: collectives are not captured": dims.cp_enabled,
        "expert parallel: the number of a rank's tokens depends on the routing": dims.ep_enabled,
        "activation_checkpoint.preserve_rng_state = true: a capture cannot read the random state; set it to false": (
            recomputes and config.activation_checkpoint.preserve_rng_state
        ),
        "[replay]: the host records and sets the experts of each step": config.replay.is_used,
        f"{job.attention} attention (model.flavor {config.model.flavor!r}): its mask is made by the host": (
            job.attention != "sdpa"
        ),
    }
    if reason := first_set(reasons):
        raise UsageError(f"npu.device_graphs cannot be combined with {reason}")


def check_device_graph_model(job: JobContext) -> None:
    """Raise if the host takes part in each step of the model: without a fused operator it counts experts' tokens."""
    if not job.config.npu.device_graphs:
        return
    has_experts = any(isinstance(module, GroupedExperts) for module in job.model.modules())
    if has_experts and platform.job_backend() == "npu" and "npu_gmm" not in job.config.model.converters:
        raise UsageError(
            "npu.device_graphs needs npu_gmm in model.converters: without it, the host reads how many tokens each "
            "expert has"
        )


def check_npu(job: JobContext) -> None:
    """Check the keys for graph passes and matrix products. Other sections check the keys that concern them."""
    npu = job.config.npu
    if npu.graph_passes and not job.config.compile.enable:
        raise UsageError("npu.graph_passes needs compile.enable = true")
    for name in npu.graph_passes:
        if name not in PASSES:
            raise UsageError(
                f"npu.graph_passes: no pass {name!r}{did_you_mean(name, PASSES)}; there are {', '.join(PASSES)}"
            )
    if npu.loss_chunk_tokens:
        check_adapted(job, "npu.loss_chunk_tokens")
        if job.dims.fsdp_enabled and torch.__version__ < "2.13":
            raise UsageError(
                f"npu.loss_chunk_tokens must be 0 with FSDP and torch {torch.__version__}: before 2.13, FSDP fails if "
                "the output layer does not run in the model's forward pass"
            )
    defaults = Npu()
    for key in ("sp_min_tokens", "sp_whole_inputs"):
        if getattr(npu, key) != getattr(defaults, key) and "sequence_parallel" not in npu.graph_passes:
            raise UsageError(f'npu.{key} is for the pass "sequence_parallel", which npu.graph_passes does not list')
    if npu.moe_combine_dtype != defaults.moe_combine_dtype and "npu_permute" not in job.config.model.converters:
        raise UsageError("npu.moe_combine_dtype is for the converter npu_permute, which model.converters does not list")
    for op in matmul_sharding.OPS if npu.matmul_sharding and job.dims.tp_enabled else ():
        if has_single_dim_strategy(op):  # torch prefers it to this package's
            raise UsageError(f"npu.matmul_sharding must be false: this torch has its own single-dim strategy for {op}")
