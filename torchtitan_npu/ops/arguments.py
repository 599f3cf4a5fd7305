"""An op's arguments by name, whatever way the call spelt them."""

from __future__ import annotations

from typing import Any

from torch._ops import OpOverload


def by_name(op: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """Every argument of ``op``'s schema, in its order; the dispatcher leaves out those that equal their default."""
    schema = op._schema.arguments
    given = {argument.name: value for argument, value in zip(schema, args, strict=False)} | kwargs
    return {argument.name: given.get(argument.name, argument.default_value) for argument in schema}
