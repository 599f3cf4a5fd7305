"""Section ``[training]``, and ``[validation]``, whose data keys have the same checks."""

# no `from __future__ import annotations`: TorchTitan and tyro read the field types
import math
import os
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

from torchtitan.config.job_config import Training as TitanTraining

from torchtitan_npu import platform
from torchtitan_npu.config.allowed import NAME, PATH, Allowed, Number
from torchtitan_npu.config.check_helpers import check_known, check_not_on_cpu
from torchtitan_npu.config.data import USER_DATASETS
from torchtitan_npu.errors import UsageError

if TYPE_CHECKING:
    from torchtitan_npu.config.job_config import JobConfig
    from torchtitan_npu.config.preflight import JobContext

DATA: dict[str, Allowed] = {
    "dataset": NAME,
    "dataset_path": PATH,
    "local_batch_size": Number(1),
    "seq_len": Number(1),
    "dataloader.num_workers": Number(0, 1024),
    "dataloader.prefetch_factor": Number(1, 10**6),
}
ALLOWED: dict[str, Allowed] = DATA | {
    "global_batch_size": Number(1, also=(-1,)),
    "max_norm": Number(0, math.inf, above=True),  # infinity: no clipping
    "steps": Number(1),
    "gc_freq": Number(1),
    "max_nonfinite_steps": Number(0),
}
VALIDATION_ALLOWED: dict[str, Allowed] = DATA | {"freq": Number(1), "steps": Number(1, also=(-1,))}


@dataclass
class Training(TitanTraining):
    mixed_precision_param: Literal["bfloat16", "float32"] = field(
        default_factory=lambda: "float32" if platform.job_backend() == "cpu" else "bfloat16"
    )
    """
    dtype of parameters in mixed precision, with FSDP or torch.autocast. Default: `"float32"` on the CPU, which has no
    fast bfloat16 matrix product, else `"bfloat16"`.
    """

    max_nonfinite_steps: int = 1
    """
    Stop the job after this many steps in a row whose loss or gradient norm is not finite; 0 turns the check off. Such a
    step never updates the weights. See [Steps that are not finite](../how-to/nonfinite-steps.md).
    """

    skip_nonfinite_steps: bool = False
    """
    Skip the update of such a step and continue, until there are `max_nonfinite_steps` of them in a row, at least 2.
    """


def check_training(job: "JobContext") -> None:
    """Check the keys of ``[training]``, and of ``[validation]`` if it is enabled."""
    training, validation = job.config.training, job.config.validation
    check_not_on_cpu({"training.enable_cpu_offload": training.enable_cpu_offload})
    if training.gc_debug and platform.job_backend() != "cuda":
        raise UsageError(
            f"training.gc_debug must be false on a {platform.job_backend().upper()}: torch finds reference cycles of "
            "CUDA tensors only"
        )
    sections: dict[str, Any] = {"training": training}
    if validation.enable:
        sections["validation"] = validation
    for name, section in sections.items():
        if job.is_adapted:  # other train specs may have their own data
            _check_dataset(job, name, section)
        if section.seq_len % job.dims.seq_len_divisor:
            raise UsageError(
                f"{name}.seq_len {section.seq_len} is not a multiple of {job.dims.seq_len_divisor} "
                "(2 × tensor_parallel_degree × context_parallel_degree)"
            )
    if job.is_adapted and validation.enable and validation.seq_len > training.seq_len:
        raise UsageError(
            f"validation.seq_len is {validation.seq_len}; it must be at most training.seq_len, {training.seq_len}: "
            "the model has no rotary angles for later positions"
        )
    _check_nonfinite_steps(job.config)
    data_ranks = job.dims.dp_replicate * job.dims.dp_shard
    if training.global_batch_size > 0 and training.global_batch_size % (training.local_batch_size * data_ranks):
        raise UsageError(
            f"training.global_batch_size {training.global_batch_size} is not a multiple of "
            f"local_batch_size {training.local_batch_size} × {data_ranks} data-parallel ranks"
        )


def _check_nonfinite_steps(config: "JobConfig") -> None:
    limit, skips = config.training.max_nonfinite_steps, config.training.skip_nonfinite_steps
    if skips and limit < 2:
        raise UsageError(
            f"training.skip_nonfinite_steps = true needs training.max_nonfinite_steps of at least 2, not {limit}: the "
            "job stops at that many such steps in a row"
        )
    if limit > 1 and not skips:
        raise UsageError(
            f"training.max_nonfinite_steps is {limit}; without training.skip_nonfinite_steps = true it must be 0 or 1: "
            "a step that is not finite cannot update the weights"
        )
    if limit and config.optimizer.early_step_in_backward:
        raise UsageError(
            "optimizer.early_step_in_backward updates the weights before the gradients are checked: set "
            "training.max_nonfinite_steps = 0, which turns the check off"
        )


def _check_dataset(job: "JobContext", name: str, section: Any) -> None:
    check_known(f"{name}.dataset", section.dataset.lower(), job.datasets)
    job.check_dataset_path(name, section)
    if job.config.npu.layout_independent_data:
        check_data_workers(name, section)


def check_dataset_files(job: "JobContext") -> None:
    """Raise if the user's data cannot be read, or for TorchTitan's test dataset, which is not part of its package."""
    sections = {"training": job.config.training, "validation": job.config.validation}
    for name, section in sections.items():
        used = job.is_adapted and (name == "training" or job.config.validation.enable)
        if used and section.dataset.lower() in USER_DATASETS:
            job.check_user_data(name)
        path = section.dataset_path or job.datasets["c4_test"].path
        if used and section.dataset.lower() == "c4_test" and not os.path.exists(path):
            raise UsageError(
                f"{name}.dataset 'c4_test' reads {path}, which exists in TorchTitan's checkout only: set "
                f'{name}.dataset = "tiny_corpus", or {name}.dataset_path'
            )


def check_data_workers(name: str, section: Any) -> None:
    """Raise if the loader of ``section`` has more than one worker, each of which would read the complete stream."""
    if (workers := section.dataloader.num_workers) > 1 and section.dataset.lower() not in USER_DATASETS:
        raise UsageError(
            f"{name}.dataloader.num_workers is {workers}; it must be 0 or 1, since every worker would read the "
            "complete stream (with npu.layout_independent_data = false TorchTitan's loader can have more)"
        )
