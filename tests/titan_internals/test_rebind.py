"""Copies of functions with other globals: what changes, and that nothing else does."""

from __future__ import annotations

import functools
import inspect
import re
from pathlib import Path
from types import FunctionType
from typing import Any

import pytest
import torch
from torch import nn

import torchtitan_npu
from torchtitan_npu.titan_internals.rebind import copy_with_globals, refers_to


def scale(x: int) -> int:
    return 2 * x


def other(x: int) -> int:
    return -x


also_scale = scale


def direct(x: int, *, offset: int = 1) -> int:
    """Scaled and shifted."""
    return scale(x) + offset


def through_alias(x: int) -> int:
    return also_scale(x)


def through_helper(x: int) -> int:
    return direct(x) + direct(x, offset=10)


def in_nested(x: int) -> list[int]:
    def inner(y: int) -> int:
        return scale(y)

    return [*(scale(y) for y in range(x)), inner(x), (lambda: scale(x))()]


def unrelated(x: int) -> int:
    return other(x)


def down(x: int) -> list[int]:
    return [scale(x), *up(x - 1)] if x else []


def up(x: int) -> list[int]:
    return [0, *down(x - 1)] if x > 0 else []


class Holder:
    def scale(self, x: int) -> int:
        return 100 * x

    def by_attribute(self, x: int) -> int:
        return self.scale(x)


@pytest.mark.parametrize(
    ("function", "argument", "copied", "original"),
    [
        (direct, 3, -3 + 1, 7),
        (through_alias, 3, -3, 6),  # by object, whatever the name
        (through_helper, 3, (-3 + 1) + (-3 + 10), 7 + 16),
        (in_nested, 2, [0, -1, -2, -2], [0, 2, 4, 4]),
        (down, 5, [-5, 0, -3, 0, -1], [10, 0, 6, 0, 2]),
        (up, 5, [0, -4, 0, -2, 0], [0, 8, 0, 4, 0]),
    ],
)
def test_replaces_the_object_in_a_copy(function: Any, argument: int, copied: Any, original: Any) -> None:
    assert refers_to(function, [other, scale]) == [scale]
    assert copy_with_globals(function, {scale: other})(argument) == copied
    assert function(argument) == original


def test_leaves_alone_what_does_not_refer_to_it() -> None:
    assert copy_with_globals(unrelated, {scale: other}) is unrelated
    assert copy_with_globals(Holder.by_attribute, {scale: other})(Holder(), 3) == 300
    assert copy_with_globals(abs, {scale: other}) is abs
    assert refers_to(unrelated, [scale]) == refers_to(abs, [scale]) == []
    # functions of another package are not copied, even if they refer to the object
    foreign: Any = FunctionType(compile("def f(x): return through(x)", "f", "exec").co_consts[0], {"through": direct})
    foreign.__module__ = "another.module"
    assert copy_with_globals(foreign, {scale: other}) is foreign


def test_the_copy_keeps_name_and_signature() -> None:
    copy = copy_with_globals(direct, {scale: other})
    assert (copy.__name__, copy.__qualname__, copy.__module__) == ("direct", "direct", __name__)
    assert copy.__doc__ == "Scaled and shifted." and inspect.signature(copy) == inspect.signature(direct)


def test_keeps_closures_and_super() -> None:
    class Base(nn.Module):
        def forward(self, x: int) -> int:
            return 1000

    class Module(Base):
        def forward(self, x: int) -> int:
            return super().forward(x) + scale(x)

    class Rebound(Module):
        forward = copy_with_globals(Module.forward, {scale: other})

    assert Rebound()(3) == 997 and Module()(3) == 1006


def decorated_by(extra: int) -> Any:
    def decorate(function: Any) -> Any:
        @functools.wraps(function)
        def wrapper(*args: Any, **kwargs: Any) -> int:
            return function(*args, **kwargs) + extra

        return wrapper

    return decorate


@decorated_by(1000)
def decorated(x: int, *, offset: int = 1) -> int:
    return scale(x) + offset


def test_replaces_in_what_a_decorator_decorates() -> None:
    assert refers_to(decorated, [scale]) == [scale] and refers_to(decorated, [other]) == []
    copy = copy_with_globals(decorated, {scale: other})
    assert copy(3, offset=5) == -3 + 5 + 1000 and decorated(3, offset=5) == 6 + 5 + 1000
    assert inspect.signature(copy) == inspect.signature(decorated) == inspect.signature(direct)


def test_replaces_names_of_the_function_around_it() -> None:
    """The class that super() starts from is not replaced, even if it is one of the objects."""
    local = scale

    def recursive(x: int) -> int:
        return local(x) + (recursive(x - 1) if x else 0)

    class Base:
        def value(self) -> int:
            return 5

    class Derived(Base):
        def value(self) -> int:
            return scale(super().value())

    copy: Any = copy_with_globals(recursive, {scale: other})
    assert copy(3) == -6 and recursive(3) == 12

    class Further(Derived):
        value = copy_with_globals(Derived.value, {scale: other, Derived: int})

    assert Further().value() == -5 and Derived().value() == 10


def tripled(x: torch.Tensor) -> torch.Tensor:
    return 3 * x


def halved(x: torch.Tensor) -> torch.Tensor:
    return x / 2


def compiled_part(x: torch.Tensor) -> torch.Tensor:
    return tripled(x) + 1


@decorated_by(0)
def decorated_part(x: torch.Tensor) -> torch.Tensor:
    return tripled(x) + 1


@pytest.mark.parametrize("part", [compiled_part, decorated_part])
@pytest.mark.parametrize("first", ["copy", "original"])
def test_compiles_apart_from_the_original(first: str, part: Any) -> None:
    """torch.compile distinguishes copy and original, whichever it sees first."""
    torch._dynamo.reset()
    calls = [(copy_with_globals(part, {tripled: halved}), 3.0), (part, 13.0)]
    for function, expected in calls if first == "copy" else reversed(calls):
        assert torch.compile(function, backend="eager", fullgraph=True)(torch.tensor([4.0])).item() == expected


def test_where_functions_are_copied() -> None:
    """Only where TorchTitan leaves no other hook, which a comment there names."""
    package = Path(torchtitan_npu.__file__).parent
    counts = {
        str(path.relative_to(package)): len(re.findall(r"(?<!def )\bcopy_with_globals\(", path.read_text()))
        for path in package.rglob("*.py")
        if path.name != "rebind.py"
    }
    assert {path: count for path, count in counts.items() if count} == {
        "converters/rope.py": 1,  # attention calls its rotation
        "distributed/moe_tensor_parallel.py": 1,  # apply_moe_ep_tp uses the experts' styles
        "models/deepseek_v32/parallelize.py": 1,  # DeepSeek-V3's plan calls functions for its own modules
        "train_specs/adapt.py": 2,  # plans call their parts; a pipeline names its stages' class
        "trainer.py": 1,  # the constructor names its checkpoint manager
    }
