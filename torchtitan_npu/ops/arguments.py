"""An op's arguments by name, whatever way the call spelt them."""

from __future__ import annotations

from typing import Any

from torch._ops import OpOverload


def by_name(op: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """Every argument of ``op``'s schema, in its order; the dispatcher leaves out those that equal their default."""
    schema = op._schema.arguments
    given = {argument.name: value for argument, value in zip(schema, args, strict=False)} | kwargs
    return {argument.name: given.get(argument.name, argument.default_value) for argument in schema}


def spelt_out(op: OpOverload, arguments: dict[str, Any]) -> tuple[list[Any], dict[str, Any]]:
    """``(args, kwargs)`` to call ``op`` with: the inverse of :func:`by_name`."""
    keyword_only = {argument.name for argument in op._schema.arguments if argument.kwarg_only}
    args = [value for name, value in arguments.items() if name not in keyword_only]
    return args, {name: value for name, value in arguments.items() if name in keyword_only}
