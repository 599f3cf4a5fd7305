"""Section ``[optimizer]``: TorchTitan's keys, and those of the swap optimizer."""

# no `from __future__ import annotations`: TorchTitan and tyro read the field types
from dataclasses import dataclass
from typing import TYPE_CHECKING

from torchtitan.config.job_config import Optimizer as TitanOptimizer

from torchtitan_npu.config.check_helpers import check_adapted, check_at_least, check_known
from torchtitan_npu.errors import UsageError

if TYPE_CHECKING:
    from torchtitan_npu.config.preflight import JobContext


@dataclass
class Optimizer(TitanOptimizer):
    swap: bool = False
    """
    Keep Adam's moments in host memory, which frees 8 bytes of device memory per float32 parameter. Each step copies
    them to the device and back slice by slice. Results are bit-identical. See
    [swap optimizer](../how-to/swap-optimizer.md).
    """

    swap_slice_mib: int = 64
    """
    Size of a slice in MiB, at least 1. During a step the device holds three slices: one loading, one being updated and
    one being stored.
    """

    swap_fraction: float = 1.0
    """
    Largest fraction of the optimizer states to keep in host memory, above 0 and at most 1. The largest parameters are
    swapped first.
    """


def check_optimizer(job: "JobContext") -> None:
    config, optimizer = job.config, job.config.optimizer
    check_known("optimizer.name", optimizer.name, ("Adam", "AdamW"))
    if not optimizer.swap:
        return
    check_at_least("optimizer.swap_slice_mib", optimizer.swap_slice_mib, 1)
    if not 0 < optimizer.swap_fraction <= 1:
        raise UsageError(f"optimizer.swap_fraction is {optimizer.swap_fraction}; it must be above 0 and at most 1")
    excluded = {
        # steps one parameter at a time as its gradient arrives: no transfer is left to overlap
        "optimizer.early_step_in_backward": optimizer.early_step_in_backward,
        # keeps the states in host memory already
        "training.enable_cpu_offload": config.training.enable_cpu_offload,
        # has its own optimizer container
        "fault_tolerance.enable": config.fault_tolerance.enable,
    }
    for key, is_set in excluded.items():
        if is_set:
            raise UsageError(f"optimizer.swap cannot be combined with {key} = true")
    check_adapted(job, "optimizer.swap")
    if not job.can_swap_optimizers:
        raise UsageError(
            "optimizer.swap must be false: the train spec's build_optimizers_fn does not use "
            "TorchTitan's OptimizersContainer"
        )
