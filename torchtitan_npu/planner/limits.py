"""What may well train, but not on fake tensors."""

from __future__ import annotations

from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    UnsupportedFakeTensorException,
    UnsupportedOperatorException,
)

from torchtitan_npu.config.job_config import JobConfig
from torchtitan_npu.errors import UsageError
from torchtitan_npu.planner.rank_share import uses_fsdp

LIMITS: dict[type[Exception], str] = {
    DataDependentOutputException: "reads a value of a tensor",
    DynamicOutputShapeException: "reads a value of a tensor",
    UnsupportedFakeTensorException: "has a tensor that cannot be a fake one",
    UnsupportedOperatorException: "calls an operator without a fake kernel",
}
"""What fake tensors raise where real ones may well go on, and what that says of the job."""


def check_rehearsable(config: JobConfig) -> None:
    """Raise :class:`UsageError` for a job that may well train, but not on fake tensors."""
    if config.dsa.document_mask:
        raise UsageError("dsa.document_mask = true is not rehearsed: a rehearsal has no text to find documents in")
    if config.training.enable_cpu_offload:
        raise UsageError("training.enable_cpu_offload = true is not rehearsed: fake tensors cannot be pinned")
    if config.activation_checkpoint.mode == "memory_budget" and compiles_model(config):
        raise UsageError(
            'activation_checkpoint.mode = "memory_budget" is not rehearsed: the compiler chooses what is kept; '
            '"selective" and "full" are'
        )
    replicas = config.parallelism.data_parallel_replicate_degree
    if replicas > 1 and not uses_fsdp(config):
        raise UsageError(
            f"parallelism.data_parallel_replicate_degree {replicas} with nothing else is not rehearsed: torch's DDP "
            f"compares values; with data_parallel_replicate_degree 1 and data_parallel_shard_degree {replicas} it is"
        )


def compiles_model(config: JobConfig) -> bool:
    """Whether the model itself is compiled, not only the loss."""
    return config.compile.enable and "model" in config.compile.components
