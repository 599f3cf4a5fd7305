"""The definition of an operator, and its registration where torch_npu is not loaded.

An operator is one :class:`Op`: torch_npu's schema, verbatim, and a few plain functions. Each function receives the
operator's arguments **by name**, with defaults from the schema. It names those it uses and takes the rest as ``**_``.

Adding an operator touches five files (docs/how-to/add-an-operator.md):

1. ``ops/<family>/reference.py``: the kernel in plain PyTorch, with the formula in its docstring.
2. ``ops/<family>/op.py``: ``declare(Op(...))``.
3. ``tests/_helpers/op_cases/<family>.py``: valid and invalid calls, for the contract tests.
4. ``tests/ops/test_op.py``: the schema, a line of its table.
5. ``tests/ops/test_<family>.py``: the tests of its numbers.

A new family also needs its ``__init__.py``, and its name in ``ops/__init__.py``.
A kernel for GPUs (``triton.py``), autograd, limits and FLOPs are optional fields of the same :class:`Op`.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

from torchtitan_npu.errors import UsageError
from torchtitan_npu.ops.core.arguments import by_name
from torchtitan_npu.ops.core.autograd import Autograd, Through, autograd_kernel, through_kernel
from torchtitan_npu.ops.core.sharding import Localize, Sharding, register_sharding_rule
from torchtitan_npu.torch_internals.dispatch import OpOverload, below_autograd, has_kernel, without_autocast
from torchtitan_npu.torch_internals.dtensor_rules import has_rule


@dataclass(frozen=True)
class Limit:
    """A limit of the NPU kernel that the formula does not have, such as a size or a dtype.

    Limits do not bind the other kernels: tiny models and float64 oracles exceed them. See :meth:`Op.limit_errors`.
    """

    what: str
    """The limited quantity, as the message names it: ``"input.dtype"``."""
    value: Callable[..., Any]
    """Return the limited quantity, given the operator's arguments by name."""
    allowed: Container[Any]
    """The values that the NPU kernel supports. The message lists them."""


@dataclass(frozen=True, kw_only=True)
class Op:
    """An operator of torch_npu."""

    schema: str
    """The schema as torch_npu prints it, ``npu::`` included."""
    reference: Callable[..., Any]
    """The kernel in plain PyTorch, for CPUs."""
    cuda: Callable[..., Any] | None = None
    """The kernel for NVIDIA GPUs. ``None``: the reference runs there too."""
    fake: Callable[..., Any]
    """Return outputs with the shapes, dtypes and strides of torch_npu's meta kernel."""
    checks: Callable[..., Iterator[str]]
    """Yield an error for each argument that torch_npu rejects at any size. Runs before every kernel."""
    sharding: Sharding
    """Yield the strategies by which DTensor may shard the operator over one mesh dimension."""
    localize: Localize | None = None
    """Return the arguments that are not tensors and differ on a rank."""
    autograd: Autograd | Through | None = None
    """The gradients. ``None`` if torch_npu has no gradient; then no gradient flows here either."""
    limits: tuple[Limit, ...] = ()
    sample: Callable[..., dict[str, Any]] | None = None
    """Return the arguments, by name, of a small call within the limits, on the CPU. It receives the options of a
    recorded call by name, and a :class:`~torchtitan_npu.ops.core.call_description.TensorDescription` for each tensor.
    Without them, tensors are bfloat16. ``None`` for an operator that a single process cannot call, or that only
    some chips have."""
    unordered_integers: bool = False
    """Integers in the outputs, such as selected keys, may come in any order."""
    unused_outputs: tuple[int, ...] = ()
    """Outputs that no job uses. An NPU leaves them undefined in some calls."""
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

    def check(self, **arguments: Any) -> None:
        """Raise a :class:`UsageError` that names the argument, if torch_npu would reject these ``arguments``."""
        for problem in self.checks(**arguments):
            raise UsageError(f"{self.name}: {problem}")

    def limit_errors(self, **arguments: Any) -> list[str]:
        """Return a message for each limit of the NPU kernel that these ``arguments`` exceed."""
        return [
            f"{self.name}: {limit.what} is {_text(value)}; the NPU kernel supports {_text(limit.allowed)}"
            for limit in self.limits
            if (value := limit.value(**arguments)) not in limit.allowed
        ]

    def complete(self, **arguments: Any) -> dict[str, Any]:
        """Return ``arguments`` with the defaults of the schema for those that are missing."""
        return by_name(self.overload(), (), arguments)


OPS: dict[str, Op] = {}
"""Every operator of this package, by name."""

_libraries: list[torch.library.Library] = []  # registrations live as long as these objects


def declare(op: Op) -> Op:
    """Add ``op`` to :data:`OPS`. :func:`define` registers it with PyTorch."""
    if op.name in OPS:
        raise ValueError(f"{op.name} is declared twice")
    OPS[op.name] = op
    return op


def define(namespace: str, ops: Iterable[Op] | None = None) -> list[str]:
    """Define those of ``ops`` (default: all) that ``namespace`` lacks, and return their names.

    Where torch_npu is loaded, its ``npu::`` operators stay. Those without a meta kernel or a DTensor rule get ours.
    Another namespace takes our operators beside torch_npu's, to compare the two in one process.
    """
    ops = list(OPS.values() if ops is None else ops)
    library = torch.library.Library(namespace, "FRAGMENT")
    _libraries.append(library)
    missing = [op for op in ops if not _is_defined(namespace, op)]
    for op in missing:
        _define(library, namespace, op)
    for op in ops:
        if not has_kernel(op.overload(namespace), "Meta"):
            torch.library.register_fake(f"{namespace}::{op.name}", _checked(op, namespace, op.fake), lib=library)
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
    library.impl(op.name, _checked(op, namespace, op.cuda or op.reference), "CUDA")
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
