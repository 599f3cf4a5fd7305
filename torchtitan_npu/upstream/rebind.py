"""A function as it is, except for what some of its global names mean.

TorchTitan's models and parallel plans call each other by global names, and leave no other hook. Replacing what such a
name means would change every model in the process. A copy of the one function that is called, with the same code and
globals of its own, changes nothing but itself.
"""

from __future__ import annotations

import dis
from collections.abc import Callable, Iterable, Iterator, Mapping
from types import CellType, CodeType, FunctionType
from typing import Any

_OF_A_CLASS = (staticmethod, classmethod)


def rebound(function: Callable[..., Any], replacements: Mapping[Any, Any]) -> Callable[..., Any]:
    """``function`` with ``replacements`` for objects that it refers to by a global name, whatever the name.

    Names of the function around it count too: there a decorator has what it decorates. The same is done in the
    functions that it calls, of its own package or TorchTitan's, and in those that they call. A function that comes by
    none of the objects is returned as it is; for a static or class method comes one of its kind.
    """
    if isinstance(function, _OF_A_CLASS):
        return type(function)(rebound(function.__func__, replacements))
    return _rebound(function, replacements, {})


def refers_to(function: Callable[..., Any], objects: Iterable[Any]) -> list[Any]:
    """Those of ``objects`` that ``function``, or a function that it calls as in :func:`rebound`, has a name for."""
    found: dict[int, Any] = {}
    wanted = {id(thing): thing for thing in objects}
    queue, seen = [function.__func__ if isinstance(function, _OF_A_CLASS) else function], set()
    while queue:
        current = queue.pop()
        if not isinstance(current, FunctionType) or current in seen:
            continue
        seen.add(current)
        for value in (*_globals_of(current).values(), *_enclosing(current).values()):
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
    cells = dict(zip(code.co_freevars, function.__closure__ or (), strict=True))
    cells |= {name: CellType() for name in _enclosing(function)}
    copy = FunctionType(code, scope, function.__name__, function.__defaults__, tuple(cells.values()) or None)
    copy.__dict__.update(function.__dict__)  # a decorated function has its signature there
    copy.__kwdefaults__, copy.__annotations__ = function.__kwdefaults__, function.__annotations__
    copy.__qualname__, copy.__module__, copy.__doc__ = function.__qualname__, function.__module__, function.__doc__
    done[function] = copy  # before its scope is complete: functions may call each other in a circle
    new = {id(old): replacement for old, replacement in replacements.items()}

    def replaced(value: Any) -> Any:
        if id(value) in new:
            return new[id(value)]
        return _rebound(value, replacements, done) if _is_followed(value, function) else value

    scope.update((name, replaced(value)) for name, value in _globals_of(function).items())
    for name, value in _enclosing(function).items():
        cells[name].cell_contents = replaced(value)
    return copy


def _globals_of(function: FunctionType) -> dict[str, Any]:
    scope = function.__globals__
    return {name: scope[name] for name in _names(function.__code__) if name in scope}


def _names(code: CodeType) -> Iterator[str]:
    """The global names that ``code`` reads; ``co_names`` has those of attributes too."""
    yield from (step.argval for step in dis.get_instructions(code) if step.opname == "LOAD_GLOBAL")
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _names(constant)


def _enclosing(function: FunctionType) -> dict[str, Any]:
    """The functions and classes that ``function`` has from the one around it; but super() needs the class it is in."""
    cells = dict(zip(function.__code__.co_freevars, function.__closure__ or (), strict=True))
    values = {name: cell.cell_contents for name, cell in cells.items() if cell != CellType() and name != "__class__"}
    return {name: value for name, value in values.items() if isinstance(value, (FunctionType, type))}


def _is_followed(value: Any, function: FunctionType) -> bool:
    return isinstance(value, FunctionType) and _package(value) in (_package(function), "torchtitan")


def _package(function: FunctionType) -> str:
    return (function.__module__ or "").partition(".")[0]
