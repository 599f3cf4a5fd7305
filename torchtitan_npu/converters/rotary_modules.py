"""Find the modules that rotate, give them ``npu_rope``'s rotations, and decide which of them can share tables.

A module rotates if one of its methods calls a registered rotation; it may be a user's module. Shared tables replace
another argument, so every method that sees them must only pass them on or rotate by them.
"""

from __future__ import annotations

import functools
import inspect
import re
from collections.abc import Callable, Iterator
from types import CodeType, FunctionType
from typing import Any

from torch import Tensor, nn

from torchtitan_npu.converters.rotary_functions import replacements
from torchtitan_npu.layers.rotary.registry import PASSTHROUGH_PACKAGES, ROTATIONS, Rotation
from torchtitan_npu.layers.rotary.tables import FROM_COMPLEX, Pairing, RotaryTables
from torchtitan_npu.titan_internals.hooks import with_rotations
from torchtitan_npu.titan_internals.rebind import refers_to


def method_names(cls: type[nn.Module]) -> list[str]:
    """Return the names of the attributes that ``cls`` adds to ``nn.Module``, and ``forward``."""
    return [name for name in dir(cls) if name == "forward" or not hasattr(nn.Module, name)]


@functools.cache
def rotating_methods(cls: type[nn.Module]) -> dict[str, frozenset[Rotation]]:
    """Return the rotations of each method of ``cls`` that calls a registered one."""
    found = {name: refers_to(inspect.getattr_static(cls, name), ROTATIONS) for name in method_names(cls)}
    return {name: frozenset(ROTATIONS[f] for f in functions) for name, functions in found.items() if functions}


@functools.cache
def rotating(cls: type[nn.Module]) -> type[nn.Module]:
    """Return a subclass of ``cls`` whose methods call ``npu_rope``'s rotations."""

    def extra_repr(self: nn.Module) -> str:
        return ", ".join(filter(None, (cls.extra_repr(self), "rotation=npu_rotary_mul")))

    names = rotating_methods(cls)  # type: ignore[arg-type] # mypy takes the modules' __hash__ for that of their class
    methods = {name: with_rotations(inspect.getattr_static(cls, name), replacements()) for name in names}
    if "forward" in methods:
        methods["forward"] = taking_tables(methods["forward"])
    return type(f"Npu{cls.__name__}", (cls,), {**methods, "extra_repr": extra_repr})


def taking_tables(forward: Callable[..., Any]) -> Callable[..., Any]:
    """Return ``forward`` with a keyword ``rotary_tables``, which takes the place of the argument that it names."""
    names = list(inspect.signature(forward).parameters)[1:]

    @functools.wraps(forward)
    def forward_with_tables(
        self: nn.Module, *args: Any, rotary_tables: RotaryTables | None = None, **kwargs: Any
    ) -> Any:
        if rotary_tables is not None:
            index = names.index(rotary_tables.argument)
            args = (*args[:index], rotary_tables, *args[index + 1 :])
        return forward(self, *args, **kwargs)

    return forward_with_tables


def pairings_of(module: nn.Module) -> frozenset[Pairing]:
    """Return how ``module`` rotates; nothing if it does not."""
    rotations = frozenset[Rotation]().union(*rotating_methods(type(module)).values())  # type: ignore[arg-type]
    return frozenset(rotation.pairing for rotation in rotations if rotation.runs_in(module))


def takes_angles(module: nn.Module) -> bool:
    """Return whether ``module`` is passed a buffer of angles, which it indexes by position."""
    return any(pairing.cache for pairing in pairings_of(module))


@functools.cache
def rotates_unseen(cls: type[nn.Module]) -> bool:
    """Return whether the code of ``cls`` uses the name of a rotation, in a way that cannot be converted."""
    if rotating_methods(cls):  # type: ignore[arg-type]
        return False
    names = {function.__name__ for function in ROTATIONS}
    return any(names & _names(f.__code__) for name in ["__init__", *method_names(cls)] for f in _functions(cls, name))


def _functions(cls: type[nn.Module], name: str) -> Iterator[FunctionType]:
    """Yield the method ``name`` of ``cls``, and those of its parents that it reaches by ``super()``."""
    for base in cls.__mro__:
        method = vars(base).get(name)
        function = inspect.unwrap(getattr(method, "__func__", method))  # type: ignore[arg-type]
        if isinstance(function, FunctionType):
            yield function
            if "super" not in function.__code__.co_names:
                return


def _names(code: CodeType) -> set[str]:
    """Return the names that ``code`` uses: globals, attributes, imports."""
    return set(code.co_names).union(
        *(_names(constant) for constant in code.co_consts if isinstance(constant, CodeType))
    )


def takes_positions(module: nn.Module) -> bool:
    """Return whether the forward of ``module`` has an argument ``positions``."""
    return "positions" in inspect.signature(module.forward).parameters


def shared_pairings(owner: nn.Module, targets: list[nn.Module]) -> tuple[Pairing, ...]:
    """Return the pairings of the ``targets`` inside ``owner`` if they can share tables, else nothing.

    They can if ``owner`` has the buffer of angles, all its targets rotate by that buffer, and only code of a registered
    passthrough package sees what ``owner`` passes to them.
    """
    inside = {module for module in set(targets).intersection(owner.modules()) if takes_angles(module)}
    found = frozenset[Pairing]().union(*map(pairings_of, inside))
    caches = {pairing.cache for pairing in found}
    if len(caches) != 1 or owner in inside:
        return ()
    (cache,) = caches
    if not isinstance(getattr(owner, str(cache), None), Tensor) or not all(map(passes_through, between(owner, inside))):
        return ()
    return tuple(found) if len(found) == 1 else FROM_COMPLEX


def between(owner: nn.Module, targets: set[nn.Module]) -> list[nn.Module]:
    """Return ``owner``, the ``targets``, the modules that hold them, and their counterparts in other layers."""
    places: dict[str, list[nn.Module]] = {}
    for fqn, module in owner.named_modules(remove_duplicate=False):
        places.setdefault(re.sub(r"\d+", "*", fqn), []).append(module)
    on_path = [modules for modules in places.values() if any(targets.intersection(m.modules()) for m in modules)]
    return [module for modules in on_path for module in modules]


def passes_through(module: nn.Module) -> bool:
    """Return whether forward and every method with positions are defined in a passthrough package."""
    if type(module).forward is nn.Module.forward:  # a container
        return True
    methods = [inspect.getattr_static(type(module), name) for name in method_names(type(module))]
    functions = [method for method in methods if isinstance(method, FunctionType)]
    with_positions = [f for f in functions if "positions" in inspect.signature(f).parameters]
    forward = getattr(module.forward, "__func__", module.forward)  # an instance may have one of its own
    packages = tuple(PASSTHROUGH_PACKAGES)
    # a wrapper's __module__ is that of the function it wraps
    return all(str(f.__globals__.get("__name__")).startswith(packages) for f in (forward, *with_positions))
