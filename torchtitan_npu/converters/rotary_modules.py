"""Which modules rotate, and which of them can share tables.

A module rotates if one of its methods calls a function of :data:`ROTATIONS`; it may be a user's. Tables are shared in
place of something else, so that nothing may see them but code that hands them on, or rotates by them.
"""

from __future__ import annotations

import functools
import inspect
import re
from collections.abc import Iterator
from types import CodeType, FunctionType

from torch import Tensor, nn
from torchtitan.models.deepseek_v3.model import model as deepseek_v3
from torchtitan.models.gpt_oss.model import model as gpt_oss
from torchtitan.models.llama3.model import model as llama3
from torchtitan.models.llama4.model import model as llama4
from torchtitan.models.qwen3.model import model as qwen3

from torchtitan_npu.converters.rotary_functions import PAIRINGS, ROTATIONS
from torchtitan_npu.converters.rotary_tables import FROM_COMPLEX, Pairing
from torchtitan_npu.models import deepseek_v32
from torchtitan_npu.upstream.rebind import rebound, refers_to

HAND_ON = tuple(package.__name__ for package in (llama3, llama4, deepseek_v3, qwen3, gpt_oss, deepseek_v32))
"""Whose methods do nothing with positions and angles but to hand them on, or to rotate by them."""


def method_names(cls: type[nn.Module]) -> list[str]:
    """The names of what ``cls`` has, without those that every module has."""
    return [name for name in dir(cls) if name == "forward" or not hasattr(nn.Module, name)]


@functools.cache
def rotating_methods(cls: type[nn.Module]) -> dict[str, frozenset[Pairing]]:
    """The methods of ``cls`` (not those of every module) that call one of the models' functions: how they rotate."""
    found = {name: refers_to(inspect.getattr_static(cls, name), ROTATIONS) for name in method_names(cls)}
    return {
        name: frozenset(PAIRINGS[ROTATIONS[f]] for f in functions) for name, functions in found.items() if functions
    }


@functools.cache
def rotating(cls: type[nn.Module]) -> type[nn.Module]:
    """``cls`` with our rotations in its methods."""

    def extra_repr(self: nn.Module) -> str:
        return ", ".join(filter(None, (cls.extra_repr(self), "rotation=npu_rotary_mul")))

    names = rotating_methods(cls)  # type: ignore[arg-type] # mypy takes the modules' __hash__ for that of their class
    methods = {name: rebound(inspect.getattr_static(cls, name), ROTATIONS) for name in names}
    return type(f"Npu{cls.__name__}", (cls,), {**methods, "extra_repr": extra_repr})


def pairings_of(module: nn.Module) -> frozenset[Pairing]:
    """How ``module`` rotates, if its methods call one of the models' functions and it uses its rotations."""
    if not getattr(module, "use_rope", True):  # llama4's layers without positions
        return frozenset()
    return frozenset().union(*rotating_methods(type(module)).values())  # type: ignore[arg-type]


def looks_up(module: nn.Module) -> bool:
    """Whether ``module`` takes its angles from a buffer of the model, by position."""
    return any(pairing.cache for pairing in pairings_of(module))


@functools.cache
def rotates_unseen(cls: type[nn.Module]) -> bool:
    """Whether ``cls`` does not rotate, as far as can be seen, but its code has the name of one of the functions."""
    if rotating_methods(cls):  # type: ignore[arg-type]
        return False
    names = {function.__name__ for function in ROTATIONS}
    return any(names & _names(f.__code__) for name in ["__init__", *method_names(cls)] for f in _functions(cls, name))


def _functions(cls: type[nn.Module], name: str) -> Iterator[FunctionType]:
    """What runs when the method of that name is called: that of ``cls``, and those of its parents by ``super()``."""
    for base in cls.__mro__:
        method = vars(base).get(name)
        function = inspect.unwrap(getattr(method, "__func__", method))  # type: ignore[arg-type]
        if isinstance(function, FunctionType):
            yield function
            if "super" not in function.__code__.co_names:
                return


def _names(code: CodeType) -> set[str]:
    """What ``code`` calls by name: globals, attributes, what it imports."""
    return set(code.co_names).union(
        *(_names(constant) for constant in code.co_consts if isinstance(constant, CodeType))
    )


def takes_positions(module: nn.Module) -> bool:
    """Whether the forward of ``module`` has an argument of that name."""
    return "positions" in inspect.signature(module.forward).parameters


def shared_pairings(owner: nn.Module, targets: list[nn.Module]) -> tuple[Pairing, ...]:
    """How the ``targets`` inside ``owner`` rotate, if they can share tables that ``owner`` hands them.

    That is so if ``owner`` holds the angles, its targets all rotate by one buffer, and no other code than that of
    :data:`HAND_ON` gets to see what is handed. Else there are none.
    """
    inside = {module for module in set(targets).intersection(owner.modules()) if looks_up(module)}
    found = frozenset[Pairing]().union(*map(pairings_of, inside))
    caches = {pairing.cache for pairing in found}
    if len(caches) != 1 or owner in inside:
        return ()
    (cache,) = caches
    if not isinstance(getattr(owner, str(cache), None), Tensor) or not all(map(hands_on, between(owner, inside))):
        return ()
    return tuple(found) if len(found) == 1 else FROM_COMPLEX


def between(owner: nn.Module, targets: set[nn.Module]) -> list[nn.Module]:
    """``owner``, the ``targets``, the modules that hold them, and those in the same place in other layers."""
    places: dict[str, list[nn.Module]] = {}
    for fqn, module in owner.named_modules(remove_duplicate=False):
        places.setdefault(re.sub(r"\d+", "*", fqn), []).append(module)
    on_the_way = [modules for modules in places.values() if any(targets.intersection(m.modules()) for m in modules)]
    return [module for modules in on_the_way for module in modules]


def hands_on(module: nn.Module) -> bool:
    """Whether the forward of ``module``, and its methods that take positions, are of :data:`HAND_ON`."""
    if type(module).forward is nn.Module.forward:  # a mere container
        return True
    methods = [inspect.getattr_static(type(module), name) for name in method_names(type(module))]
    functions = [method for method in methods if isinstance(method, FunctionType)]
    handed = [f for f in functions if "positions" in inspect.signature(f).parameters]
    forward = getattr(module.forward, "__func__", module.forward)  # an instance may have one of its own
    # a wrapper's __module__ is that of what it wraps
    return all(str(f.__globals__.get("__name__")).startswith(HAND_ON) for f in (forward, *handed))
