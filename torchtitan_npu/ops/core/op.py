"""The definition of an operator, and its registration where torch_npu is not loaded.

An operator is one :class:`Op`: torch_npu's schema, verbatim, and a few plain functions. A kernel receives the
arguments by name, with defaults from the schema. Checks, rules and limits receive one :class:`Call`, which has them as
attributes: ``call.input``, ``call.dim``.

Adding an operator touches five files (docs/how-to/add-an-operator.md):

1. ``ops/<family>.py``: the kernel in plain PyTorch, with the formula in its docstring, and ``declare(...)``.
2. ``tests/_helpers/op_cases/<family>.py``: valid and invalid calls, for the contract tests.
3. ``tests/ops/test_op.py``: the schema, a line of its table.
4. ``tests/ops/test_arguments.py``: errors and limits, rows of its tables.
5. ``tests/ops/test_<family>.py``: the tests of its numbers.

A new family is a name in ``ops/__init__.py``, too. Large families are folders: ``op.py`` and ``reference.py``. What
models call instead, with gradients that torch_npu does not have, is at the end of a family's file. Autograd, limits
and FLOPs are optional fields. Kernels for GPUs are in ``gpu_kernels/``.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, ParamSpec

import torch

from torchtitan_npu.errors import UsageError
from torchtitan_npu.ops.core import gpu
from torchtitan_npu.ops.core.arguments import Call, by_name
from torchtitan_npu.ops.core.autograd import Autograd, Through, autograd_kernel, through_kernel
from torchtitan_npu.ops.core.sharding import Localize, Sharding, register_sharding_rule
from torchtitan_npu.torch_internals.dispatch import (
    OpOverload,
    below_autograd,
    has_kernel,
    parse_schema,
    without_autocast,
)
from torchtitan_npu.torch_internals.dtensor import has_rule

Fields = ParamSpec("Fields")


@dataclass(frozen=True)
class Limit:
    """A limit of the NPU kernel that the formula does not have, such as a size or a dtype.

    Limits do not bind the other kernels: tiny models and float64 oracles exceed them. See :meth:`Op.limit_errors`.
    """

    what: str
    """The limited quantity, as the message names it: ``"input.dtype"``."""
    value: Callable[..., Any]
    """Return the limited quantity of a :class:`Call`. An argument that is not known is ``None``."""
    allowed: Container[Any]
    """The values that the NPU kernel supports. The message lists them."""

    def measure(self, **arguments: Any) -> Any:
        """Return the limited quantity of a call with these arguments."""
        return self.value(Call(**arguments))


@dataclass(frozen=True, kw_only=True)
class Op:
    """An operator of torch_npu."""

    schema: str
    """The schema as torch_npu prints it, ``npu::`` included."""
    reference: Callable[..., Any]
    """The kernel in plain PyTorch, for CPUs. It receives the arguments by name, as every kernel does."""
    fake: Callable[..., Any]
    """Return outputs with the shapes, dtypes and strides of torch_npu's meta kernel, for a :class:`Call`."""
    checks: Callable[[Call], Iterator[str]]
    """Yield an error for each argument that torch_npu rejects at any size. Runs once per call, before the kernel."""
    sharding: Sharding
    """Yield the strategies by which DTensor may shard the operator over one mesh dimension."""
    localize: Localize | None = None
    """Return the arguments that are not tensors and differ on a rank."""
    autograd: Autograd | Through | None = None
    """The gradients. ``None`` if torch_npu has no gradient; then no gradient flows here either."""
    limits: tuple[Limit, ...] = ()
    flops: Callable[..., int] | None = None
    """Return the floating-point operations of a call. ``None`` for an operator without matrix products."""

    @property
    def name(self) -> str:
        """``"npu_rms_norm"``; with an overload, ``"npu_grouped_matmul.List"``."""
        return self.schema.removeprefix("npu::").partition("(")[0]

    def overload(self, namespace: str = "npu") -> OpOverload:
        """Return the operator that is registered under ``namespace``."""
        packet, _, overload = self.name.partition(".")
        return getattr(getattr(getattr(torch.ops, namespace), packet), overload or "default")

    def cuda(self, **arguments: Any) -> Any:
        """Run the kernel for NVIDIA GPUs: the first in ``gpu_kernels/registry.py`` that suits, or the reference."""
        return gpu.run(self.name, self.reference, **arguments)

    def meta(self, **arguments: Any) -> Any:
        """Run the kernel for fake tensors and the device ``meta``."""
        return self.fake(Call(**arguments))

    def check(self, **arguments: Any) -> None:
        """Raise a :class:`UsageError` that names the argument, if torch_npu would reject these ``arguments``."""
        for problem in self.checks(Call(**arguments)):
            raise UsageError(f"{self.name}: {problem}")

    def argument_errors(self, **arguments: Any) -> Iterator[str]:
        """Yield an error for each of these arguments that torch_npu rejects at any size."""
        return self.checks(Call(**self.complete(**arguments)))

    def limit_errors(self, **arguments: Any) -> list[str]:
        """Return a message for each limit of the NPU kernel that these ``arguments``, all or some, exceed."""
        names = [argument.name for argument in parse_schema(self.schema).arguments]
        arguments = dict.fromkeys(names) | arguments
        return [
            f"{self.name}: {limit.what} is {_text(value)}; the NPU kernel supports {_text(limit.allowed)}"
            for limit in self.limits
            if (value := limit.measure(**arguments)) not in limit.allowed
        ]

    def complete(self, **arguments: Any) -> dict[str, Any]:
        """Return ``arguments`` with the defaults of the schema for those that are missing."""
        return by_name(self.overload(), (), arguments)


OPS: dict[str, Op] = {}
"""Every operator of this package, by name."""

_libraries: list[torch.library.Library] = []  # registrations live as long as these objects


def _declaring(cls: Callable[Fields, Op]) -> Callable[Fields, None]:
    def declare(*args: Fields.args, **fields: Fields.kwargs) -> None:
        op = cls(*args, **fields)
        assert op.name not in OPS, f"{op.name} is declared twice"
        OPS[op.name] = op

    return declare


declare = _declaring(Op)  # typed as the constructor
"""Add an :class:`Op` with these fields to :data:`OPS`. :func:`define` registers it with PyTorch."""


def define(namespace: str, ops: Iterable[Op] | None = None) -> list[str]:
    """Define those of ``ops`` (default: all) that ``namespace`` lacks, and return their names.

    Where torch_npu is loaded, its ``npu::`` operators stay. Those without a meta kernel or a DTensor rule get this
    package's. Another namespace takes this package's operators beside torch_npu's, to compare the two in one process.
    """
    ops = list(OPS.values() if ops is None else ops)
    library = torch.library.Library(namespace, "FRAGMENT")
    _libraries.append(library)
    missing = [op for op in ops if not _is_defined(namespace, op)]
    for op in missing:
        _define(library, namespace, op)
    for op in ops:
        if not has_kernel(op.overload(namespace), "Meta"):
            kernel = _checked(op, namespace, op.meta)
            torch.library.register_fake(f"{namespace}::{op.name}", kernel, lib=library)
        if not has_rule(op.overload(namespace)):
            register_sharding_rule(op.overload(namespace), op.sharding, op.localize)
    return [op.name for op in missing]


def _is_defined(namespace: str, op: Op) -> bool:
    packet, _, overload = op.name.partition(".")
    ops = getattr(torch.ops, namespace)
    return hasattr(ops, packet) and (overload or "default") in getattr(ops, packet).overloads()


def _define(library: torch.library.Library, namespace: str, op: Op) -> None:
    library.define(op.schema.removeprefix("npu::"), tags=torch.Tag.pt2_compliant_tag)
    overload = op.overload(namespace)
    library.impl(op.name, _checked(op, namespace, op.reference), "CPU")
    library.impl(op.name, _checked(op, namespace, op.cuda), "CUDA")
    if isinstance(op.autograd, Through):
        library.impl(op.name, through_kernel(overload, op.autograd, op.check), "Autograd")
    elif op.autograd is not None:
        library.impl(op.name, autograd_kernel(overload, op.autograd), "Autograd")


def _checked(op: Op, namespace: str, kernel: Callable[..., Any]) -> Callable[..., Any]:
    """Return ``kernel`` as PyTorch calls it, with the checks of ``op`` before it."""
    overload = op.overload(namespace)

    def run(*args: Any, **kwargs: Any) -> Any:
        arguments = by_name(overload, args, kwargs)
        op.check(**arguments)
        # Without these, autograd would differentiate the kernel of an operator that torch_npu has no gradient for,
        # and autocast would change the dtypes of the products inside a kernel.
        with below_autograd(), without_autocast():
            return kernel(**arguments)

    return run


def _text(value: object) -> str:
    """Format a value, or the allowed values, for a message."""
    if isinstance(value, range) and value.step == 1:
        return f"{value.start} to {value.stop - 1}"
    if isinstance(value, Iterable) and not isinstance(value, str):
        return ", ".join(_text(v) for v in value)
    return str(value).removeprefix("torch.")
