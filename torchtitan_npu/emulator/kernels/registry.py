"""The table of kernels: one Python function per ``aclnn`` operator.

A kernel gets the arguments of the operator's C prototype, in its order and without workspace and executor, as Python
objects. Tensors are CPU tensors that share the device's memory; a kernel writes its outputs in place::

    @kernel("aclnnAdd")
    def add(left, right, alpha, out):
        out.copy_(torch.add(left, right, alpha=alpha))

A kernel returns None, or the sizes of outputs whose size depends on the data, ``{index of the argument: size}``.

Many kernels are torch functions whose result goes to an argument: ``register`` makes them. A function computes into new
memory, and the result is copied to the output. So an output may overlap an input, may be strided, and gets its dtype by
one rounding.
"""

from __future__ import annotations

import json
import keyword
import re
from collections.abc import Callable, Iterable
from functools import cache
from typing import Any

import torch

from torchtitan_npu.emulator.build import PROTOTYPES

Kernel = Callable[..., "dict[int, tuple[int, ...]] | None"]
Check = Callable[..., "int | None"]
Function = Callable[..., Any]

KERNELS: dict[str, Kernel] = {}
FAMILIES: dict[str, str] = {}
"""The module of this package that registered an operator: ``"pointwise"``. The package fills it on import."""
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
    """Copy each result to its output. An output of None is left out."""
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


def to_last_in_its_dtype(function: Function) -> Kernel:
    """Return a kernel like :func:`to_last`, for operators with a dtype before the output: that of the output."""

    def run(*arguments: Any) -> None:
        *inputs, _, out = arguments
        write(out, function(*inputs, dtype=out.dtype))

    return run


def register(functions: dict[str, Function], in_place: str = "", make: Callable[[Function], Kernel] = to_last) -> None:
    """Register ``aclnn<name>`` for each function, and ``aclnnInplace<name>`` for the names listed in ``in_place``."""
    for name, function in functions.items():
        kernel(f"aclnn{name}")(make(function))
    for name in in_place.split():
        kernel(f"aclnnInplace{name}")(to_first(functions[name]))


def describe(value: Any) -> str:
    """Return a short text for an argument: ``bfloat16[4, 8]`` for a tensor."""
    if isinstance(value, list):
        return "[" + ", ".join(map(describe, value[:4])) + (", …]" if len(value) > 4 else "]")
    if hasattr(value, "dtype"):
        return f"{str(value.dtype).removeprefix('torch.')}{list(value.shape)}"
    return repr(value)


def describe_call(name: str, arguments: tuple[Any, ...]) -> str:
    """Return a call with the prototype's names: ``aclnnAdd(self=float32[2], other=…)``."""
    names = prototypes()[name]["arguments"]
    return f"{name}({', '.join(f'{key}={describe(value)}' for key, value in zip(names, arguments, strict=True))})"


@cache
def argument_names(name: str) -> list[str]:
    """Return the names of an operator's arguments as Python writes them: ``attenMaskOptional`` is ``atten_mask``."""
    names = (argument.removesuffix("Optional") for argument in prototypes()[name]["arguments"])
    words = (re.sub(r"(?<=[a-z0-9])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])", "_", name).lower() for name in names)
    return [f"{word}_" if keyword.iskeyword(word) else word for word in words]


@cache
def prototypes() -> dict[str, Any]:
    """Return the table of ``prototypes.json``."""
    return json.loads(PROTOTYPES.read_text())
