"""A function as it is, except for what some of its global names mean.

TorchTitan's models and parallel plans call each other by global names, and leave no other hook. Replacing what such a
name means would change every model in the process. A copy of the one function that is called, with the same code and
globals of its own, changes nothing but itself.
"""

from __future__ import annotations

import dis
from collections.abc import Callable, Iterable, Iterator, Mapping
from types import CodeType, FunctionType
from typing import Any


def rebound(function: Callable[..., Any], replacements: Mapping[Any, Any]) -> Callable[..., Any]:
    """``function`` with ``replacements`` for objects that it refers to by a global name, whatever the name.

    The same is done in the functions that it calls, of its own package or TorchTitan's, and in those that they call. A
    function that comes by none of the objects is returned as it is.
    """
    return _rebound(function, replacements, {})


def refers_to(function: Callable[..., Any], objects: Iterable[Any]) -> list[Any]:
    """Those of ``objects`` that ``function``, or a function that it calls as in :func:`rebound`, has a name for."""
    found: dict[int, Any] = {}
    wanted = {id(thing): thing for thing in objects}
    queue, seen = [function], set()
    while queue:
        current = queue.pop()
        if not isinstance(current, FunctionType) or current in seen:
            continue
        seen.add(current)
        for _, value in _globals_of(current):
            if id(value) in wanted:
                found[id(value)] = value
            elif _is_followed(value, current):
                queue.append(value)
    return list(found.values())


def _rebound(function: Any, replacements: Mapping[Any, Any], done: dict[Any, Any]) -> Any:
    if function in done:
        return done[function]
    if not refers_to(function, replacements):
        return function
    scope = dict(function.__globals__)
    # torch.compile takes a scope with a name for that module's own, and would guard on what the names mean there
    scope.pop("__name__", None)
    # and it keeps what it compiled by code object: the original's would be run here
    code = function.__code__.replace()
    copy = FunctionType(code, scope, function.__name__, function.__defaults__, function.__closure__)
    copy.__kwdefaults__, copy.__annotations__ = function.__kwdefaults__, function.__annotations__
    copy.__qualname__, copy.__module__, copy.__doc__ = function.__qualname__, function.__module__, function.__doc__
    done[function] = copy  # before its scope is complete: functions may call each other in a circle
    new = {id(old): replacement for old, replacement in replacements.items()}
    for name, value in _globals_of(function):
        if id(value) in new:
            scope[name] = new[id(value)]
        elif _is_followed(value, function):
            scope[name] = _rebound(value, replacements, done)
    return copy


def _globals_of(function: FunctionType) -> Iterator[tuple[str, Any]]:
    for name in _names(function.__code__):
        if name in function.__globals__:
            yield name, function.__globals__[name]


def _names(code: CodeType) -> Iterator[str]:
    """The global names that ``code`` reads; ``co_names`` has those of attributes too."""
    yield from (step.argval for step in dis.get_instructions(code) if step.opname == "LOAD_GLOBAL")
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _names(constant)


def _is_followed(value: Any, function: FunctionType) -> bool:
    return isinstance(value, FunctionType) and _package(value) in (_package(function), "torchtitan")


def _package(function: FunctionType) -> str:
    return (function.__module__ or "").partition(".")[0]
