"""An op's arguments by name, whatever way the call spelt them."""

from __future__ import annotations

from functools import cache
from typing import Any

from torchtitan_npu.torch_internals.dispatch import OpOverload


def by_name(op: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """Every argument of ``op``'s schema, in its order; the dispatcher leaves out those that equal their default."""
    defaults, _ = _schema(op)
    return defaults | dict(zip(defaults, args, strict=False)) | kwargs


def spelt_out(op: OpOverload, arguments: dict[str, Any]) -> tuple[list[Any], dict[str, Any]]:
    """``(args, kwargs)`` to call ``op`` with: the inverse of :func:`by_name`."""
    _, keyword_only = _schema(op)
    args = [value for name, value in arguments.items() if name not in keyword_only]
    return args, {name: value for name, value in arguments.items() if name in keyword_only}


@cache  # to ask the schema takes longer than many a kernel
def _schema(op: OpOverload) -> tuple[dict[str, Any], frozenset[str]]:
    """The defaults by argument name, ``None`` where there is none; and the names of the keyword-only ones."""
    arguments = op._schema.arguments
    defaults = {argument.name: argument.default_value for argument in arguments}
    return defaults, frozenset(argument.name for argument in arguments if argument.kwarg_only)
