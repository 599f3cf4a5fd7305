"""The table of kernels: one Python function per ``aclnn`` operator.

A kernel gets the arguments of the operator's C prototype, in its order and without workspace and executor, as Python
objects. Tensors are CPU tensors that share the device's memory; a kernel writes its outputs in place::

    @kernel("aclnnAdd")
    def add(left, right, alpha, out):
        out.copy_(torch.add(left, right, alpha=alpha))

A kernel returns None, or the sizes of outputs whose size depends on the data, ``{index of the argument: size}``.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

Kernel = Callable[..., "dict[int, tuple[int, ...]] | None"]
Check = Callable[..., "int | None"]

KERNELS: dict[str, Kernel] = {}
CHECKS: dict[str, Check] = {}


class Refused(Exception):
    """Arguments that CANN refuses; raised by a check, with the message that the user sees."""


def kernel(*names: str) -> Callable[[Kernel], Kernel]:
    """Register a function as the kernel of these operators."""

    def register(function: Kernel) -> Kernel:
        for name in names:
            if name in KERNELS:
                raise ValueError(f"{name} has two kernels")
            KERNELS[name] = function
        return function

    return register


def check(*names: str) -> Callable[[Check], Check]:
    """Register a function that runs in GetWorkspaceSize: it raises :class:`Refused`, or returns bytes of workspace."""

    def register(function: Check) -> Check:
        CHECKS.update(dict.fromkeys(names, function))
        return function

    return register


def describe(value: Any) -> str:
    """Return a short text for an argument: ``bfloat16[4, 8]`` for a tensor."""
    if isinstance(value, list):
        return "[" + ", ".join(map(describe, value[:4])) + (", …]" if len(value) > 4 else "]")
    if hasattr(value, "dtype"):
        return f"{str(value.dtype).removeprefix('torch.')}{list(value.shape)}"
    return repr(value)
