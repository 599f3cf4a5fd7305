"""Fused NPU operators: reference kernels and limits of :mod:`torchtitan_npu.ops` behind the arguments of ``aclnn``.

One function per family translates the arguments of an ``aclnn`` prototype to those of torch_npu's operator::

    @fused("npu_swiglu", "aclnnSwiGlu")
    def swiglu(x, dim, out, **_):
        return {"input": x, "dim": dim}, (out,)

It gets the arguments by name, as :func:`argument_names` spells them, so that it serves every version of an operator:
later versions add arguments in the middle. It returns torch_npu's arguments by name, defaults left out, and the outputs
in the order of torch_npu's.

The same translation gives the kernel and the check: what the operator's checks and limits reject, or the documents of
the emulated version of CANN, is refused with CANN's code for invalid parameters.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

from torch import Tensor

from torchtitan_npu.emulator.kernels.registry import Refused, argument_names, check, kernel, write
from torchtitan_npu.emulator.limits import version_limit_errors
from torchtitan_npu.emulator.workspaces import workspace

if TYPE_CHECKING:
    from torchtitan_npu.ops import Op

FUSED: dict[str, str] = {}
"""torch_npu's operator that an ``aclnn`` operator computes."""
Translation = Callable[..., tuple[dict[str, Any], Sequence[Tensor | None]]]


def fused(op: str, *names: str) -> Callable[[Translation], Translation]:
    """Register a translation: the ``aclnn`` operators ``names`` compute torch_npu's operator ``op``."""

    def register(translate: Translation) -> Translation:
        for name in names:

            def compute(*values: Any, name: str = name) -> None:
                arguments, outputs = translate(**by_name(name, values))
                results = operator(op).reference(**operator(op).complete(**arguments))
                results = (results,) if isinstance(results, Tensor) else results
                for output, result in zip(outputs, results, strict=False):  # some results are no outputs of aclnn
                    write(output, result)

            def refuse(*values: Any, name: str = name) -> int:
                passed, _ = translate(**by_name(name, values))
                arguments = operator(op).complete(**passed)
                for problem in problems(operator(op), arguments):
                    raise Refused(problem)
                return workspace(op, **arguments)

            FUSED[name] = op
            kernel(name)(compute)
            check(name)(refuse)
        return translate

    return register


def kernel_by_name(*names: str) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Register a kernel that gets its arguments by name."""

    def register(function: Callable[..., None]) -> Callable[..., None]:
        for name in names:
            kernel(name)(lambda *values, name=name: function(**by_name(name, values)))
        return function

    return register


def by_name(name: str, values: Sequence[Any]) -> dict[str, Any]:
    """Return the arguments of a call of the ``aclnn`` operator ``name`` by name."""
    return dict(zip(argument_names(name), values, strict=True))


def problems(op: Op, arguments: dict[str, Any]) -> Iterator[str]:
    """Yield why CANN refuses a call. Limits are computed only for arguments that pass the checks."""
    yield from op.argument_errors(**arguments)
    yield from op.limit_errors(**arguments)
    yield from version_limit_errors(op, arguments)


def operator(name: str) -> Op:
    """Return torch_npu's operator. Its reference, checks and limits are all that the emulator takes from ``ops``."""
    # Imported when the first fused operator is called: the package registers sharding rules with DTensor.
    from torchtitan_npu.ops import OPS

    return OPS[name]


def is_absent(value: Any) -> bool:
    """Return whether an optional argument is absent: ``None``, an empty tensor, or a list of such."""
    if isinstance(value, list):
        return all(isinstance(item, Tensor) and is_absent(item) for item in value)
    return value is None or (isinstance(value, Tensor) and value.numel() == 0)


def or_none(value: Any) -> Any:
    """Return the value of an optional argument, ``None`` if it is absent."""
    return None if is_absent(value) else value


def without(**arguments: Any) -> None:
    """Raise for arguments that CANN takes and that the emulator's kernel does not have."""
    for name, value in arguments.items():
        if not is_absent(value):
            raise NotImplementedError(f"the emulator's kernel does not have the argument {name}")
