"""Jobs that may train, but that a dry run does not support."""

from __future__ import annotations

from torchtitan_npu.config.job_config import JobConfig
from torchtitan_npu.errors import UsageError
from torchtitan_npu.planner.per_rank import uses_fsdp


def check_dry_run(config: JobConfig) -> None:
    """Raise :class:`UsageError` for a job that may train, but not on fake tensors."""
    if config.dsa.document_mask:
        raise UsageError("dsa.document_mask = true is not supported in a dry run: it has no text to find documents in")
    if config.training.enable_cpu_offload:
        raise UsageError(
            "training.enable_cpu_offload = true is not supported in a dry run: fake tensors cannot be pinned"
        )
    if config.activation_checkpoint.mode == "memory_budget" and compiles_model(config):
        raise UsageError(
            'activation_checkpoint.mode = "memory_budget" is not supported in a dry run: the compiler chooses what is '
            'kept; "selective" and "full" are supported'
        )
    replicas = config.parallelism.data_parallel_replicate_degree
    if replicas > 1 and not uses_fsdp(config):
        raise UsageError(
            f"parallelism.data_parallel_replicate_degree {replicas} alone is not supported in a dry run: DDP compares "
            "values of the ranks; data_parallel_replicate_degree 1 with data_parallel_shard_degree "
            f"{replicas} is supported"
        )


def compiles_model(config: JobConfig) -> bool:
    """Return whether the model itself is compiled, not only the loss."""
    return config.compile.enable and "model" in config.compile.components
