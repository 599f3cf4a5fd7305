"""Section ``[optimizer]``: TorchTitan's keys, and those of the swap optimizer."""

# no `from __future__ import annotations`: TorchTitan and tyro read the field types
from dataclasses import dataclass

from torchtitan.config.job_config import Optimizer as TitanOptimizer

from torchtitan_npu.config.allowed import PRINTABLE, Allowed, Number, Text

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
