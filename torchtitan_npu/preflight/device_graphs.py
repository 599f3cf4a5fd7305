"""Checks of ``npu.device_graphs``."""

from __future__ import annotations

from torchtitan.models.moe.moe import GroupedExperts

from torchtitan_npu import platform
from torchtitan_npu.errors import UsageError
from torchtitan_npu.preflight.check_helpers import check_not_on_cpu
from torchtitan_npu.preflight.job_context import JobContext


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
    for reason, holds in reasons.items():
        if holds:
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
