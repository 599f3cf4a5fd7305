"""The choice of a kernel on an NVIDIA GPU: the first one in ``gpu_kernels/registry.py`` that suits the arguments.

Nothing imports the registry, Triton or a kernel before an operator runs on a GPU: only PyTorch's CUDA builds contain
Triton.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch

from torchtitan_npu.errors import UsageError

PACKAGE = "torchtitan_npu.gpu_kernels"


@dataclass(frozen=True)
class GpuKernel:
    """A kernel for GPUs, by the name of its module."""

    module: str
    """In :data:`PACKAGE`, such as ``"lightning_indexer.gluon"``."""
    suits: Callable[..., bool] = lambda **_: True
    """Return whether the kernel takes these arguments, which come by name."""
    hopper: bool = False
    """It needs a GPU of compute capability 9.0."""
    function: str = ""
    """The function to call. Empty: the one with the name of the operator."""

    def load(self, function: str) -> Callable[..., Any]:
        """Return a function of the kernel's module."""
        return _loaded(self.module, function)


def choose(op: str, **arguments: Any) -> GpuKernel | None:
    """Return the first kernel of ``op`` that suits the ``arguments``, or ``None`` for the reference.

    The reference runs for float64, which is for oracles, not for training, and where no kernel suits.
    """
    tensors = [x[0] if isinstance(x, list) and x else x for x in arguments.values()]
    tensors = [x for x in tensors if isinstance(x, torch.Tensor)]
    if any(tensor.dtype == torch.float64 for tensor in tensors):
        return None
    for kernel in kernels().get(op, ()):
        if (not kernel.hopper or is_hopper(tensors[0])) and kernel.suits(**arguments):
            return kernel
    return None


def run(op: str, reference: Callable[..., Any], **arguments: Any) -> Any:
    """Run the kernel that :func:`choose` returns, or the ``reference``."""
    chosen = choose(op, **arguments)
    if chosen is None:
        return reference(**arguments)
    try:
        return chosen.load(chosen.function or op)(**arguments)
    except _out_of_resources() as lack:
        raise UsageError(
            f"{op}: the kernel needs more {lack.name} than this GPU has ({lack.required} needed, {lack.limit} "
            "available): use a GPU with 227 KiB of shared memory (docs/how-to/install.md), or remove the converter "
            "that calls it from model.converters"
        ) from lack


def kernels() -> Mapping[str, tuple[GpuKernel, ...]]:
    """Return the registry: the kernels of each operator by name, in the order of preference."""
    return _loaded("registry", "KERNELS")


@cache
def _loaded(module: str, name: str) -> Any:
    return getattr(importlib.import_module(f"{PACKAGE}.{module}"), name)


def _out_of_resources() -> type[Any]:
    """Return the exception of a kernel that does not fit the GPU. Python evaluates it only after a kernel raised."""
    from triton.runtime.errors import OutOfResources

    return OutOfResources


def is_hopper(tensor: torch.Tensor) -> bool:
    """Return whether ``tensor`` is on a GPU of compute capability 9.0."""
    return tensor.is_cuda and _capability(tensor.device.index) == (9, 0)


@cache
def _capability(index: int) -> tuple[int, int]:
    return torch.cuda.get_device_capability(index)
