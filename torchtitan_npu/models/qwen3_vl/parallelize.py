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
from torchtitan.config import TORCH_DTYPE_MAP, JobConfig
from torchtitan.distributed import NoParallel, ParallelDims
from torchtitan.distributed.activation_checkpoint import apply_ac
from torchtitan.models.qwen3.infra.parallelize import parallelize_qwen3

from torchtitan_npu.titan_internals.hooks import qwen3_saved_operators


def parallelize_qwen3_vl(model: Any, parallel_dims: ParallelDims, job_config: JobConfig) -> nn.Module:
    """Parallelize the tower, then the decoder. FSDP of the model takes the tower's parameters as they are."""
    checkpointing = job_config.activation_checkpoint
    if parallel_dims.tp_enabled:
        apply_tp_to_tower(model, parallel_dims.get_mesh("tp"))
    if checkpointing.mode != "none":
        apply_ac(
            model.vision,
            checkpointing,
            model_compile_enabled=job_config.compile.enable and "model" in job_config.compile.components,
            op_sac_save_list=qwen3_saved_operators,
            base_folder=job_config.job.dump_folder,
        )
    if parallel_dims.fsdp_enabled:
        apply_fsdp_to_tower(model.vision, parallel_dims, job_config)
    return parallelize_qwen3(model, parallel_dims, job_config)


def apply_tp_to_tower(model: Any, tp_mesh: DeviceMesh) -> None:
    """Shard heads and hidden columns of the tower. Its patches, whose number varies, are replicated."""
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


def apply_fsdp_to_tower(tower: Any, parallel_dims: ParallelDims, job_config: JobConfig) -> None:
    training = job_config.training
    config: dict[str, Any] = {
        "mesh": parallel_dims.get_mesh(["dp_replicate", "fsdp"] if parallel_dims.dp_replicate_enabled else ["fsdp"]),
        "mp_policy": MixedPrecisionPolicy(
            param_dtype=TORCH_DTYPE_MAP[training.mixed_precision_param],
            reduce_dtype=TORCH_DTYPE_MAP[training.mixed_precision_reduce],
        ),
        "offload_policy": CPUOffloadPolicy() if training.enable_cpu_offload else OffloadPolicy(),
        "reshard_after_forward": job_config.parallelism.fsdp_reshard_after_forward != "never",
    }
    for block in tower.layers.values():
        fully_shard(block, **config)
    fully_shard(tower, **config)
