"""Calls of Triton kernels. Nothing imports Triton before a kernel runs: only PyTorch's CUDA builds contain it."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from functools import cache
from typing import Any

import torch

from torchtitan_npu.errors import UsageError


def kernel(reference: Callable[..., Any], module: str = "triton") -> Callable[..., Any]:
    """Return the function of the same name in ``module`` of the same family, imported at its first call.

    A float64 argument selects the ``reference``: float64 is for oracles, not for training.
    """
    family, name = reference.__module__.rpartition(".")[0], reference.__name__

    def run(**arguments: Any) -> Any:
        for value in arguments.values():
            if isinstance(value, torch.Tensor) and value.dtype == torch.float64:
                return reference(**arguments)
        try:
            return _imported(f"{family}.{module}", name)(**arguments)
        except _out_of_resources() as lack:
            raise UsageError(
                f"{name}: the kernel needs more {lack.name} than this GPU has ({lack.required} needed, {lack.limit} "
                "available): use a GPU with 227 KiB of shared memory (docs/how-to/install.md), or remove the converter "
                "that calls it from model.converters"
            ) from lack

    return run


def _out_of_resources() -> type[Any]:
    """Return the exception of a kernel that does not fit the GPU. Python evaluates it only after a kernel raised."""
    from triton.runtime.errors import OutOfResources

    return OutOfResources


@cache
def _imported(module: str, name: str) -> Callable[..., Any]:
    return getattr(importlib.import_module(module), name)


def is_hopper(tensor: torch.Tensor) -> bool:
    """Return whether ``tensor`` is on a GPU of compute capability 9.0."""
    return tensor.is_cuda and _capability(tensor.device.index) == (9, 0)


@cache
def _capability(index: int) -> tuple[int, int]:
    return torch.cuda.get_device_capability(index)
