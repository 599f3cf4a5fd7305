"""Conversion between a call's ``args`` and ``kwargs`` and the operator's arguments by name."""

from __future__ import annotations

from functools import cache
from types import SimpleNamespace
from typing import Any

from torchtitan_npu.torch_internals.dispatch import OpOverload, op_schema


class Call(SimpleNamespace):
    """The arguments of one call as attributes, with the names of the operator's schema."""

    def pick(self, *names: str) -> dict[str, Any]:
        """Return some of the arguments by name."""
        return {name: getattr(self, name) for name in names}


def by_name(op: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """Return every argument of ``op``'s schema, in its order. Arguments that the call omits have their defaults."""
    defaults, _ = _schema(op)
    return defaults | dict(zip(defaults, args, strict=False)) | kwargs


def args_and_kwargs(op: OpOverload, arguments: dict[str, Any]) -> tuple[list[Any], dict[str, Any]]:
    """Return ``(args, kwargs)`` to call ``op`` with: the inverse of :func:`by_name`."""
    _, keyword_only = _schema(op)
    args = [value for name, value in arguments.items() if name not in keyword_only]
    return args, {name: value for name, value in arguments.items() if name in keyword_only}


@cache  # reading the schema takes longer than launching a small kernel
def _schema(op: OpOverload) -> tuple[dict[str, Any], frozenset[str]]:
    """Return the defaults by argument name (``None`` without one) and the names of keyword-only arguments."""
    arguments = op_schema(op).arguments
    defaults = {argument.name: argument.default_value for argument in arguments}
    return defaults, frozenset(argument.name for argument in arguments if argument.kwarg_only)
