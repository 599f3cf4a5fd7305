"""FSDP2 for models whose embedding and output share one weight.

TorchTitan gives the embedding and the output an FSDP group each; since torch 2.13 FSDP refuses a parameter that two
groups share ("Parameter is shared", torch/distributed/fsdp/_fully_shard/_fsdp_state.py:223), and tensor parallel
unties the two before it. Here they are tied again after tensor parallel, and one group holds both.
"""

from __future__ import annotations

from typing import Any

from torch import nn
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torchtitan.config import TORCH_DTYPE_MAP, JobConfig
from torchtitan.distributed import ParallelDims
from torchtitan.models.llama3.infra.parallelize import disable_fsdp_gradient_division
from torchtitan.protocols.train_spec import ParallelizeFunction


def ties_weights(model: nn.Module) -> bool:
    """Whether the model's output uses its embedding's weight."""
    return getattr(model, "enable_weight_tying", False)


class _WithoutDataParallel:
    """A job's parallel dimensions with data parallel left for later."""

    fsdp_enabled = dp_replicate_enabled = False

    def __init__(self, dims: ParallelDims) -> None:
        self._dims = dims

    def __getattr__(self, name: str) -> Any:
        return getattr(self._dims, name)


def parallelize_tied(
    model: Any, dims: ParallelDims, job_config: JobConfig, parallelize: ParallelizeFunction
) -> nn.Module:
    """``parallelize`` for everything but FSDP, then FSDP2 with embedding, last norm and output in one group."""
    model = parallelize(model, _WithoutDataParallel(dims), job_config)
    model.output.weight = model.tok_embeddings.weight

    config: dict[str, Any] = {
        "mesh": dims.get_mesh(["dp_replicate", "fsdp"] if dims.dp_replicate_enabled else ["fsdp"]),
        "mp_policy": MixedPrecisionPolicy(
            param_dtype=TORCH_DTYPE_MAP[job_config.training.mixed_precision_param],
            reduce_dtype=TORCH_DTYPE_MAP[job_config.training.mixed_precision_reduce],
        ),
        "offload_policy": CPUOffloadPolicy() if job_config.training.enable_cpu_offload else OffloadPolicy(),
        "reshard_after_forward": job_config.parallelism.fsdp_reshard_after_forward != "never",
    }
    for block in model.layers.values():
        fully_shard(block, **config)
    # used first and last: gathered once
    fully_shard([model.tok_embeddings, model.norm, model.output], **{**config, "reshard_after_forward": False})
    fully_shard(model, **config)
    disable_fsdp_gradient_division(model)
    return model
