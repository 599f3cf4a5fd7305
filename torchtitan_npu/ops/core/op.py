"""What an op of the ``npu::`` vocabulary is made of, and how the stand-ins are defined where torch_npu is not.

An op is one :class:`Op`: torch_npu's schema to the letter, and a few plain functions beside it. Each of those functions
gets the op's arguments **by name**, defaults filled in from the schema, so it names the ones it needs and takes the
rest as ``**_``; no default is written twice. To add an op: a reference kernel in ``reference/``, a file here that
declares the :class:`Op`, that file's name in ``__init__.py``, and the schema in the test of the vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

from torchtitan_npu.errors import UsageError
from torchtitan_npu.ops.core.arguments import by_name
from torchtitan_npu.ops.core.autograd import Autograd, Through, autograd_kernel, through_kernel
from torchtitan_npu.ops.core.sharding import Localize, Sharding, has_sharding_rule, register_sharding_rule
from torchtitan_npu.torch_internals.dispatch import OpOverload


@dataclass(frozen=True)
class Limit:
    """One row of the table of what an NPU kernel refuses although the formula allows it (sizes, floating dtypes).

    It does not bind the stand-ins: tiny models and float64 oracles need what an NPU refuses. See :meth:`Op.refusals`.
    """

    what: str
    """What is limited, as the message names it: ``"input.dtype"``."""
    value: Callable[..., Any]
    """Takes the op's arguments by name, gives the value that is limited."""
    allowed: Container[Any]
    """The values an NPU takes; the message quotes it."""


@dataclass(frozen=True, kw_only=True)
class Op:
    """One operator of the vocabulary."""

    schema: str
    """As torch_npu prints it, ``npu::`` included."""
    reference: Callable[..., Any]
    """The kernel in plain PyTorch, run on CPU."""
    cuda: Callable[..., Any] | None = None
    """The kernel for NVIDIA GPUs; ``None``: the reference runs there too."""
    fake: Callable[..., Any]
    """The outputs' shapes, dtypes and strides, as torch_npu's meta kernel gives them."""
    contract: Callable[..., Iterator[str]]
    """Yields what is wrong with the arguments: what torch_npu rejects whatever the size. Runs before every kernel."""
    sharding: Sharding
    """The ways DTensor may shard the op over one mesh dimension."""
    localize: Localize | None = None
    """The plain arguments that change with the shards a rank holds."""
    autograd: Autograd | Through | None = None
    """``None`` where torch_npu has none: its gradients are silently missing there, and so they are here."""
    limits: tuple[Limit, ...] = ()

    @property
    def name(self) -> str:
        """``"npu_rms_norm"``; with an overload, ``"npu_grouped_matmul.List"``."""
        return self.schema.removeprefix("npu::").partition("(")[0]

    def overload(self, namespace: str = "npu") -> OpOverload:
        """The op as it is registered under ``namespace``."""
        packet, _, overload = self.name.partition(".")
        return getattr(getattr(getattr(torch.ops, namespace), packet), overload or "default")

    def check(self, **arguments: Any) -> None:
        """Raise a :class:`UsageError` that names the argument, if torch_npu would reject these ``arguments``."""
        for problem in self.contract(**arguments):
            raise UsageError(f"{self.name}: {problem}")

    def refusals(self, **arguments: Any) -> list[str]:
        """Every limit of the NPU's kernel that these ``arguments`` break, one message each."""
        return [
            f"{self.name}: {limit.what} is {_text(value)}, and an NPU takes {_text(limit.allowed)}"
            for limit in self.limits
            if (value := limit.value(**arguments)) not in limit.allowed
        ]


OPS: dict[str, Op] = {}
"""The vocabulary: every op of this package, by name."""

_libraries: list[torch.library.Library] = []  # registrations live as long as these objects


def declare(op: Op) -> Op:
    """Add ``op`` to the vocabulary. Nothing is registered with PyTorch before :func:`define`."""
    if op.name in OPS:
        raise ValueError(f"{op.name} is declared twice")
    OPS[op.name] = op
    return op


def define(namespace: str, ops: Iterable[Op] | None = None) -> list[str]:
    """Define under ``namespace`` the stand-ins of those ``ops`` (the vocabulary) that it lacks, and return their names.

    Where torch_npu is loaded, its ``npu::`` ops are left alone; those for which it brings no DTensor rule get ours.
    Another namespace takes the stand-ins beside torch_npu's ops, to compare the two in one process.
    """
    ops = list(OPS.values() if ops is None else ops)
    missing = [op for op in ops if not _is_defined(namespace, op)]
    if missing:
        library = torch.library.Library(namespace, "FRAGMENT")
        _libraries.append(library)
        for op in missing:
            _define(library, namespace, op)
    for op in ops:
        if not has_sharding_rule(op.overload(namespace)):
            register_sharding_rule(op.overload(namespace), op.sharding, op.localize)
    return [op.name for op in missing]


def _is_defined(namespace: str, op: Op) -> bool:
    packet, _, overload = op.name.partition(".")
    ops = getattr(torch.ops, namespace)
    return hasattr(ops, packet) and (overload or "default") in getattr(ops, packet).overloads()


def _define(library: torch.library.Library, namespace: str, op: Op) -> None:
    library.define(op.schema.removeprefix("npu::"), tags=torch.Tag.pt2_compliant_tag)
    overload = op.overload(namespace)

    def checked(kernel: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any, **kwargs: Any) -> Any:
            arguments = by_name(overload, args, kwargs)
            op.check(**arguments)
            # autograd would see into the kernel of an op for which torch_npu has no gradient; and the products inside
            # are the kernel's own, whose dtype is not autocast's to choose
            with torch._C._AutoDispatchBelowAutograd(), torch._C._DisableAutocast():
                return kernel(**arguments)

        return run

    library.impl(op.name, checked(op.reference), "CPU")
    library.impl(op.name, checked(op.cuda or op.reference), "CUDA")
    torch.library.register_fake(f"{namespace}::{op.name}", checked(op.fake), lib=library)
    if isinstance(op.autograd, Through):
        library.impl(op.name, through_kernel(overload, op.autograd, op.check), "Autograd")
    elif op.autograd is not None:
        library.impl(op.name, autograd_kernel(overload, op.autograd), "Autograd", with_keyset=True)


def _text(value: object) -> str:
    """A value, or the values allowed, as a message shows them."""
    if isinstance(value, range) and value.step == 1:
        return f"{value.start} to {value.stop - 1}"
    if isinstance(value, Iterable) and not isinstance(value, str):
        return ", ".join(_text(v) for v in value)
    return str(value).removeprefix("torch.")
