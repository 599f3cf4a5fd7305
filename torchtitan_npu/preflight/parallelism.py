"""Checks of the section ``[parallelism]``."""

from __future__ import annotations

import math

from torchtitan.models.moe.moe import MoE

from torchtitan_npu.config.allowed import check_known
from torchtitan_npu.config.titan_sections import PARALLELISM
from torchtitan_npu.distributed.context_parallel import ContextParallel
from torchtitan_npu.errors import UsageError
from torchtitan_npu.preflight.job_context import JobContext

SPLIT_ROWS = {"w1", "w3", "mlp1_weight", "mlp1_bias"}
"""Expert weights whose rows TorchTitan's expert tensor parallel splits. Other weights keep all their rows."""


def check_world_size(job: JobContext) -> None:
    """Raise unless the degrees of ``[parallelism]`` divide the ranks."""
    p, world_size = job.config.parallelism, job.world_size
    splitting = (
        "data_parallel_replicate",
        "data_parallel_shard",
        "context_parallel",
        "tensor_parallel",
        "pipeline_parallel",
    )
    degrees = {f"{name}_degree": getattr(p, f"{name}_degree") for name in splitting}
    ep, etp, tp = p.expert_parallel_degree, p.expert_tensor_parallel_degree, p.tensor_parallel_degree
    for name, degree in {**degrees, "expert_parallel_degree": ep, "expert_tensor_parallel_degree": etp}.items():
        PARALLELISM[name].check(f"parallelism.{name}", degree)
    any_shard_degree = p.data_parallel_shard_degree == -1
    fixed = {name: degree for name, degree in degrees.items() if degree != -1}
    product = math.prod(fixed.values())
    if world_size % product if any_shard_degree else world_size != product:
        listed = " × ".join(f"{name} {degree}" for name, degree in fixed.items() if degree > 1) or "one rank"
        raise UsageError(
            f"{world_size} ranks (torchrun's --nproc_per_node × --nnodes) do not fit the layout: "
            f"{listed} takes {'a multiple of ' if any_shard_degree else ''}{product}"
        )
    if etp not in (1, tp):  # TorchTitan makes a mesh with this degree without expert parallelism too
        raise UsageError(
            f"parallelism.expert_tensor_parallel_degree is {etp}; it must be 1 or tensor_parallel_degree, {tp}"
        )
    if ep == 1:
        return
    ranks = world_size // (p.pipeline_parallel_degree * p.data_parallel_replicate_degree)
    if ranks % (ep * etp):
        raise UsageError(
            f"parallelism.expert_parallel_degree {ep} × expert_tensor_parallel_degree {etp} does not divide the "
            f"{ranks} ranks of a pipeline stage and replica"
        )


def check_model_divides(job: JobContext) -> None:
    """Raise unless the degrees divide the model's experts and heads."""
    dims, config = job.dims, job.config
    flavor = f"model.flavor {config.model.flavor!r}"
    if dims.ep_enabled:
        experts = [moe.experts for moe in job.model.modules() if isinstance(moe, MoE)]
        if not experts:
            raise UsageError(
                f"parallelism.expert_parallel_degree must be 1: {flavor} of {config.model.name} has no experts"
            )
        number = experts[0].num_experts
        if number % dims.ep:
            raise UsageError(
                f"parallelism.expert_parallel_degree {dims.ep} does not divide the {number} experts of {flavor}"
            )
        shards = dims.dp_shard * dims.cp * dims.tp // (dims.ep * dims.etp)
        rows = {
            weight.shape[1] // (dims.etp if name in SPLIT_ROWS else 1) for name, weight in experts[0].named_parameters()
        }
        if shards * dims.ep > number and any(size % shards for size in rows):
            raise UsageError(
                f"parallelism.expert_parallel_degree {dims.ep}: {shards} ranks have the same {number // dims.ep} "
                f"experts of {flavor}, so FSDP splits the rows of their weights, and {shards} does not divide "
                f"{' and '.join(map(str, sorted(rows)))}: choose another "
                "parallelism.data_parallel_shard_degree"
            )
    for key in ("n_heads", "n_kv_heads"):
        if (heads := getattr(job.model_args, key, None)) and heads % dims.tp:
            raise UsageError(f"parallelism.tensor_parallel_degree {dims.tp} does not divide {key} {heads} of {flavor}")


def check_context_parallel(job: JobContext) -> None:
    """Check the load balancer and the class named by ``npu.context_parallel``."""
    if not job.dims.cp_enabled:
        return
    if job.config.validation.enable and not hasattr(job.model, "freqs_cis"):
        raise UsageError(
            f"validation.enable must be false with context parallelism: TorchTitan does not support it for "
            f"{job.config.model.name}"
        )
    load_balancer = job.config.parallelism.context_parallel_load_balancer
    if job.config.npu.context_parallel:
        _check_context_parallel_class(job)
    if (context := job.context_parallel_class) is not None:
        if load_balancer not in context.load_balancers:
            supported = " or ".join(repr(name or "") for name in context.load_balancers)
            key = f"parallelism.context_parallel_load_balancer {load_balancer!r}"
            raise UsageError(f"{key} is not supported by {context.__name__}: use {supported}")
        if error := context.model_error(job.model):
            raise UsageError(f"npu.context_parallel: {error}")
        return
    # TorchTitan's "ptrr" rearranges the blocks of flex attention's masks
    flex = ["ptrr"] if getattr(job.model_args, "attn_type", "sdpa") == "flex" else []
    check_known("parallelism.context_parallel_load_balancer", load_balancer or "", ["headtail", "", *flex])


def _check_context_parallel_class(job: JobContext) -> None:
    """Raise unless ``npu.context_parallel`` names a class that defines how attention communicates."""
    key, base = f"npu.context_parallel {job.config.npu.context_parallel!r}", ContextParallel
    try:
        cls = job.context_parallel_class
    except (ImportError, AttributeError, ValueError) as error:
        raise UsageError(f'{key} is not "module:Class": {error}') from error
    if not (isinstance(cls, type) and issubclass(cls, base)):
        raise UsageError(f"{key} is not a subclass of {base.__module__}.{base.__name__}")
    if cls.parallelize is base.parallelize:
        raise UsageError(f"{key} does not define how attention communicates: it has no parallelize")
