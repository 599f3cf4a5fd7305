"""Workaround: FSDP2 rejects TorchTitan's models whose embedding and output share one weight.

Fault: TorchTitan 0.2.2 gives the embedding and the output an FSDP group each. Since torch 2.13, FSDP rejects a
parameter in two groups ("Parameter is shared", torch/distributed/fsdp/_fully_shard/_fsdp_state.py:223). Tensor parallel
also unties the two before that. Here they are tied again after tensor parallel, and one group holds both.

Delete this file when TorchTitan puts tied weights into one FSDP group.
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
    """True if the model's output uses its embedding's weight."""
    return getattr(model, "enable_weight_tying", False)


class DimsWithoutDataParallel(ParallelDims):
    """A job's layout on the same meshes, in which a parallel plan sees no data parallelism to apply."""

    fsdp_enabled = dp_replicate_enabled = False  # type: ignore[assignment]

    def __init__(self, dims: ParallelDims) -> None:
        dims.world_mesh  # noqa: B018  # builds the meshes
        self.__dict__.update(dims.__dict__)


def parallelize_tied(
    model: Any, dims: ParallelDims, job_config: JobConfig, parallelize: ParallelizeFunction
) -> nn.Module:
    """Apply ``parallelize`` except FSDP, then FSDP2 with embedding, last norm and output in one group."""
    model = parallelize(model, DimsWithoutDataParallel(dims), job_config)
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
    # used first and last, so gathered once
    fully_shard([model.tok_embeddings, model.norm, model.output], **{**config, "reshard_after_forward": False})
    fully_shard(model, **config)
    disable_fsdp_gradient_division(model)
    return model
