"""Section ``[training]``, and ``[validation]``, whose data keys have the same checks."""

# no `from __future__ import annotations`: TorchTitan and tyro read the field types
import math
from dataclasses import dataclass, field
from typing import Any, Literal

from torchtitan.config.job_config import Training as TitanTraining

from torchtitan_npu import platform
from torchtitan_npu.config.allowed import NAME, PATH, Allowed, Number
from torchtitan_npu.config.data import USER_DATASETS
from torchtitan_npu.errors import UsageError

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


def check_data_workers(name: str, section: Any) -> None:
    """Raise if the loader of ``section`` has more than one worker, each of which would read the complete stream."""
    if (workers := section.dataloader.num_workers) > 1 and section.dataset.lower() not in USER_DATASETS:
        raise UsageError(
            f"{name}.dataloader.num_workers is {workers}; it must be 0 or 1, since every worker would read the "
            "complete stream (with npu.layout_independent_data = false TorchTitan's loader can have more)"
        )
