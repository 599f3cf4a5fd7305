"""The parallel plan of Qwen3-VL: TorchTitan's plan of Qwen3 for the decoder, and a similar one for the tower."""

from __future__ import annotations

from typing import Any

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleOutput,
    RowwiseParallel,
    parallelize_module,
)
from torchtitan.config import JobConfig
from torchtitan.distributed import NoParallel, ParallelDims
from torchtitan.distributed.activation_checkpoint import apply_ac
from torchtitan.models.llama4.infra.parallelize import apply_fsdp
from torchtitan.models.qwen3.infra.parallelize import apply_non_moe_tp, parallelize_qwen3

from torchtitan_npu.titan_internals.hooks import with_activation_checkpoint, with_fsdp, with_tensor_parallel


def parallelize_qwen3_vl(model: nn.Module, parallel_dims: ParallelDims, job_config: JobConfig) -> nn.Module:
    parallelize = with_tensor_parallel(parallelize_qwen3, apply_tp_with_tower)
    parallelize = with_activation_checkpoint(parallelize, apply_ac_with_tower)
    parallelize = with_fsdp(parallelize, apply_fsdp_with_tower)
    return parallelize(model, parallel_dims, job_config)


def apply_tp_with_tower(model: Any, tp_mesh: DeviceMesh, **kwargs: Any) -> None:
    """Shard heads and hidden columns of the tower. Its patches, whose number varies, are replicated."""
    apply_non_moe_tp(model, tp_mesh, **kwargs)
    split = {"w1": ColwiseParallel(), "w2": RowwiseParallel()}
    plan: dict[str, Any] = {
        "patch_embed": NoParallel(),
        "pos_embed": NoParallel(),
        "layers.*.attention_norm": NoParallel(),
        **{f"layers.*.attention.{w}": ColwiseParallel() for w in ("wq", "wk", "wv")},
        "layers.*.attention.wo": RowwiseParallel(),
        "layers.*.ffn_norm": NoParallel(),
        **{f"layers.*.feed_forward.{w}": style for w, style in split.items()},
        "merger.norm": NoParallel(),
        **{f"merger.{w}": style for w, style in split.items()},
    }
    if model.vision.deepstack_mergers:
        plan["deepstack_mergers.*.norm"] = NoParallel()
        plan |= {f"deepstack_mergers.*.{w}": style for w, style in split.items()}
    parallelize_module(model.vision, tp_mesh, plan)
    # every rank has all features, and keeps its shard of the sequence; the backward pass gathers their gradients
    outputs = 2 + len(model.vision.deepstack_mergers)
    parts = PrepareModuleOutput(output_layouts=(Replicate(),) * outputs, desired_output_layouts=(Shard(1),) * outputs)
    parallelize_module(model, tp_mesh, {"scatter_features": parts})


def apply_ac_with_tower(model: Any, *args: Any, **kwargs: Any) -> None:
    apply_ac(model, *args, **kwargs)
    apply_ac(model.vision, *args, **kwargs)


def apply_fsdp_with_tower(
    model: Any,
    dp_mesh: DeviceMesh,
    *,
    param_dtype: Any,
    reduce_dtype: Any,
    cpu_offload: bool,
    reshard_after_forward_policy: str,
    **kwargs: Any,
) -> None:
    config: dict[str, Any] = {
        "mesh": dp_mesh,
        "mp_policy": MixedPrecisionPolicy(param_dtype=param_dtype, reduce_dtype=reduce_dtype),
        "offload_policy": CPUOffloadPolicy() if cpu_offload else OffloadPolicy(),
        "reshard_after_forward": reshard_after_forward_policy != "never",
    }
    for block in model.vision.layers.values():
        fully_shard(block, **config)
    fully_shard(model.vision, **config)
    apply_fsdp(
        model,
        dp_mesh,
        param_dtype=param_dtype,
        reduce_dtype=reduce_dtype,
        cpu_offload=cpu_offload,
        reshard_after_forward_policy=reshard_after_forward_policy,
        **kwargs,
    )
