"""The vocabulary's kernels for NVIDIA GPUs, in Triton. One file an op or a family of ops; nothing of ``reference/``.

Triton comes with PyTorch's CUDA builds and not with the others, so nothing here imports it before a kernel runs.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from functools import cache
from typing import Any

import torch

from torchtitan_npu.errors import UsageError


def kernel(module: str, name: str, reference: Callable[..., Any]) -> Callable[..., Any]:
    """The function ``name`` of ``ops/triton/module.py``, imported when it is first called.

    float64 stays with the ``reference``: it is for oracles, and nobody trains in it.
    """

    def run(**arguments: Any) -> Any:
        for value in arguments.values():
            if isinstance(value, torch.Tensor) and value.dtype == torch.float64:
                return reference(**arguments)
        try:
            return _imported(module, name)(**arguments)
        except _out_of_resources() as lack:
            raise UsageError(
                f"{name}: its kernel does not fit this GPU ({lack.name}: {lack.required} needed, {lack.limit} there): "
                "use one with 227 KiB of shared memory (docs/how-to/install.md), or remove the converter that calls it"
            ) from lack

    return run


def _out_of_resources() -> type[Any]:
    """What Triton raises of a kernel that it compiled and the GPU cannot hold. Python asks only once one was raised."""
    from triton.runtime.errors import OutOfResources

    return OutOfResources


@cache
def _imported(module: str, name: str) -> Callable[..., Any]:
    return getattr(importlib.import_module(f"torchtitan_npu.ops.{module}"), name)
