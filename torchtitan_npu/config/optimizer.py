"""Section ``[optimizer]``: TorchTitan's keys, and those of the swap optimizer."""

# no `from __future__ import annotations`: TorchTitan and tyro read the field types
from dataclasses import dataclass
from typing import TYPE_CHECKING

from torchtitan.config.job_config import Optimizer as TitanOptimizer

from torchtitan_npu import platform
from torchtitan_npu.config.allowed import PRINTABLE, Allowed, Number, Text
from torchtitan_npu.config.check_helpers import check_adapted, check_known
from torchtitan_npu.errors import UsageError

if TYPE_CHECKING:
    from torchtitan_npu.config.preflight import JobContext

ALLOWED: dict[str, Allowed] = {
    "name": Text('`"Adam"` or `"AdamW"`, unless the model builds its own optimizers', rf"{PRINTABLE}+"),
    "lr": Number(0, 100),
    "beta1": Number(0, 1, below=True),
    "beta2": Number(0, 1, below=True),
    # with 0, or a number that float32 rounds to 0, a weight without a gradient becomes NaN
    "eps": Number(1e-30, 1),
    "weight_decay": Number(0, 100),
    "swap_slice_mib": Number(1, 2**20),
    "swap_fraction": Number(0, 1, above=True),
}


@dataclass
class Optimizer(TitanOptimizer):
    triton: bool = False
    """
    Update the weights by a Triton kernel of this package, on an NVIDIA GPU. It is faster than torch's fused kernel for
    bfloat16 weights, and clips the gradients in the same pass. For AdamW, in jobs of
    one rank. See [GPU kernels](gpu-kernels.md#optimizer).
    """

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
    if job.has_titan_optimizers:
        check_known("optimizer.name", optimizer.name, ("Adam", "AdamW"))
    if optimizer.triton:
        _check_triton(job)
    if not optimizer.swap:
        return
    excluded = {
        # steps one parameter at a time as its gradient arrives: no transfer is left to overlap
        "optimizer.early_step_in_backward": optimizer.early_step_in_backward,
        # keeps the states in host memory already
        "training.enable_cpu_offload": config.training.enable_cpu_offload,
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


def _check_triton(job: "JobContext") -> None:
    config, optimizer = job.config, job.config.optimizer
    excluded = {
        "optimizer.swap = true": optimizer.swap,
        "optimizer.early_step_in_backward = true": optimizer.early_step_in_backward,
        "training.enable_cpu_offload = true": config.training.enable_cpu_offload,
        f"optimizer.name = {optimizer.name!r}: the kernel is for AdamW": optimizer.name != "AdamW",
        f"optimizer.implementation = {optimizer.implementation!r}": optimizer.implementation != "fused",
        f"{job.world_size} ranks: it has run on one GPU only": job.world_size != 1,
    }
    for setting, is_set in excluded.items():
        if is_set:
            raise UsageError(f"optimizer.triton cannot be combined with {setting}")
    if platform.job_backend() != "cuda":
        raise UsageError(f"optimizer.triton needs an NVIDIA GPU; this job runs on the backend {platform.job_backend()}")
    check_adapted(job, "optimizer.triton")
    if not job.can_swap_optimizers:
        raise UsageError(
            "optimizer.triton must be false: the train spec's build_optimizers_fn does not use TorchTitan's "
            "OptimizersContainer"
        )
