"""Make kernels from torch functions: an operator of CANN is often a torch function whose result goes to an argument.

A function computes into new memory, and the result is copied to the output. So an output may overlap an input, may be
strided, and gets its dtype by one rounding.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch

from torchtitan_npu.emulator.kernels.registry import Kernel, kernel

Function = Callable[..., Any]


def write(out: torch.Tensor | None, result: torch.Tensor | None) -> None:
    """Copy ``result`` to ``out``: same elements, possibly another dtype or other dimensions of size 1."""
    if out is None or result is None:
        return
    if out.shape != result.shape:
        if out.numel() != result.numel():
            raise ValueError(f"the result has shape {list(result.shape)}, the output {list(out.shape)}")
        result = result.reshape(out.shape)
    out.copy_(result)


def write_all(outputs: Iterable[torch.Tensor | None], results: Iterable[torch.Tensor | None]) -> None:
    """Copy each result to its output. Outputs that are None are not wanted."""
    for out, result in zip(outputs, results, strict=True):
        write(out, result)


def to_last(function: Function) -> Kernel:
    """Return a kernel that writes the result of ``function`` to the last argument."""

    def run(*arguments: Any) -> None:
        write(arguments[-1], function(*arguments[:-1]))

    return run


def to_last_two(function: Function) -> Kernel:
    """Return a kernel that writes the two results of ``function`` to the last two arguments."""

    def run(*arguments: Any) -> None:
        write_all(arguments[-2:], function(*arguments[:-2]))

    return run


def to_first(function: Function) -> Kernel:
    """Return a kernel that writes the result of ``function`` to the first argument, which is also its input."""

    def run(first: torch.Tensor, *rest: Any) -> None:
        write(first, function(first, *rest))

    return run


def register(functions: dict[str, Function], in_place: str = "", make: Callable[[Function], Kernel] = to_last) -> None:
    """Register ``aclnn<name>`` for each function, and ``aclnnInplace<name>`` for the names listed in ``in_place``."""
    for name, function in functions.items():
        kernel(f"aclnn{name}")(make(function))
    for name in in_place.split():
        kernel(f"aclnnInplace{name}")(to_first(functions[name]))
