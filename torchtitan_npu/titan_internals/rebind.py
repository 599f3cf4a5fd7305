"""Copy a function and change what some of its global names refer to.

TorchTitan's models and parallel plans call each other by global names and offer no other hook. Assigning to such a
name would change every model in the process. A copy of the one function, with its own globals, changes only itself.

Any module may import this one: it imports nothing of this package. A test counts its uses: where TorchTitan offers a
method to override or an argument, use that.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from types import CellType, CodeType, FunctionType
from typing import Any


def copy_with_globals(function: Callable[..., Any], replacements: Mapping[Any, Any]) -> Callable[..., Any]:
    """Return a copy of ``function`` in which global names refer to ``replacements[x]`` instead of the object ``x``.

    The match is by object, not by name. Functions and classes in the closure count too, because a decorator keeps
    there what it decorates. Functions of the same package or of TorchTitan that ``function`` calls are copied in the
    same way, recursively. Return ``function`` itself if it refers to none of the objects.
    """
    return _copy(function, replacements, {})


def refers_to(function: Callable[..., Any], objects: Collection[Any]) -> list[Any]:
    """Return the ``objects`` that :func:`copy_with_globals` would replace in ``function``."""
    used, replaceable = set[int](), {id(thing) for thing in objects}
    followed = [function] if isinstance(function, FunctionType) else []
    for current in followed:
        for value in (*_globals_of(current).values(), *_enclosing(current).values()):
            used.add(id(value))
            if id(value) not in replaceable and _is_followed(value, current) and value not in followed:
                followed.append(value)
    return [thing for thing in objects if id(thing) in used]


def _copy(function: Any, replacements: Mapping[Any, Any], done: dict[Any, Any]) -> Any:
    if function in done:
        return done[function]
    if not refers_to(function, replacements):
        return function
    scope = dict(function.__globals__)
    # torch.compile takes globals with a __name__ for that module's globals, and would guard on the originals
    scope.pop("__name__", None)
    # torch.compile caches by code object: sharing it would run the original's compiled code
    code = function.__code__.replace()
    cells = dict(zip(code.co_freevars, function.__closure__ or (), strict=True))
    cells |= {name: CellType() for name in _enclosing(function)}
    copy = FunctionType(code, scope, function.__name__, function.__defaults__, tuple(cells.values()) or None)
    copy.__dict__.update(function.__dict__)  # holds the signature of a decorated function
    copy.__kwdefaults__, copy.__annotations__ = function.__kwdefaults__, function.__annotations__
    copy.__qualname__, copy.__module__, copy.__doc__ = function.__qualname__, function.__module__, function.__doc__
    done[function] = copy  # before its globals are complete, because functions may call each other recursively
    new = {id(old): replacement for old, replacement in replacements.items()}

    def replaced(value: Any) -> Any:
        if id(value) in new:
            return new[id(value)]
        return _copy(value, replacements, done) if _is_followed(value, function) else value

    scope.update((name, replaced(value)) for name, value in _globals_of(function).items())
    for name, value in _enclosing(function).items():
        cells[name].cell_contents = replaced(value)
    return copy


def _globals_of(function: FunctionType) -> dict[str, Any]:
    """Return the globals that ``function`` may read, by name."""
    scope, names = function.__globals__, _names(function.__code__)
    return {name: scope[name] for name in names if name in scope}


def _names(code: CodeType) -> set[str]:
    """Return the names in ``code`` and in the functions inside it."""
    # co_names has attributes too; to replace a global of that name, which the function does not read, changes nothing
    return set(code.co_names).union(*(_names(inner) for inner in code.co_consts if isinstance(inner, CodeType)))


def _enclosing(function: FunctionType) -> dict[str, Any]:
    """Return the functions and classes in the closure of ``function``, except the ``__class__`` that super() needs."""
    cells = dict(zip(function.__code__.co_freevars, function.__closure__ or (), strict=True))
    values = {name: cell.cell_contents for name, cell in cells.items() if cell != CellType() and name != "__class__"}
    return {name: value for name, value in values.items() if isinstance(value, (FunctionType, type))}


def _is_followed(value: Any, function: FunctionType) -> bool:
    return isinstance(value, FunctionType) and _package(value) in (_package(function), "torchtitan")


def _package(function: FunctionType) -> str:
    return (function.__module__ or "").partition(".")[0]
