"""Calls of the operators for the contract tests against torch_npu, one file per family.

``arguments(device)`` builds the arguments of a call on any device, fake tensors included. It therefore uses factory
functions only (``torch.randn(..., device=device)``) and reads no values.
"""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

bf16, fp16, fp32, int32, int64 = torch.bfloat16, torch.float16, torch.float32, torch.int32, torch.int64
Shape = tuple[int, ...]
Arguments = Callable[[str], tuple[tuple[Any, ...], dict[str, Any]]]
"""Positional and keyword arguments on a device."""


@dataclass(frozen=True)
class Case:
    """One call: the operator's name, what is special about the call, and a function that builds its arguments."""

    op: str
    what: str
    arguments: Arguments
    rejected_by: str | None = None
    """``None``: the call is valid. ``"torch_npu"``: torch_npu's meta kernel or C++ checks reject it, and so must ours.
    ``"us"``: only our checks reject it. torch_npu's meta kernel accepts it, and the NPU's kernel would not."""
    forward_only: bool = False
    """The call is valid, but its outputs lack what the backward needs. Our checks reject the backward, as the NPU's
    kernel would; torch_npu's meta kernel accepts it."""

    def __str__(self) -> str:
        return f"{self.op}: {self.what}"


def tensors(*shapes: Shape, dtype: torch.dtype = bf16, **keywords: Any) -> Arguments:
    """Return a call with random tensors of these shapes, then keywords."""
    return lambda device: (tuple(torch.randn(shape, dtype=dtype, device=device) for shape in shapes), keywords)


def changed(call: Arguments, index: int, change: Callable[[Tensor], Any]) -> Arguments:
    """Return the call with one positional argument changed."""

    def arguments(device: str) -> tuple[tuple[Any, ...], dict[str, Any]]:
        args, kwargs = call(device)
        return (*args[:index], change(args[index]), *args[index + 1 :]), kwargs

    return arguments


def strided(tensor: Tensor) -> Tensor:
    """Return the tensor with its first two dimensions swapped in memory."""
    return tensor.transpose(0, 1).contiguous().transpose(0, 1)


def all_cases() -> list[Case]:
    """Return the cases of every family."""
    modules = [importlib.import_module(f"{__name__}.{info.name}") for info in pkgutil.iter_modules(__path__)]
    return [case for module in modules for case in module.CASES]
