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
from torchtitan_npu.titan_internals.rebind import rebound, refers_to


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


def test_replaces_what_a_name_refers_to() -> None:
    assert rebound(direct, {scale: other})(3) == -3 + 1
    assert rebound(direct, {scale: other})(3, offset=5) == -3 + 5
    assert direct(3) == 7 and scale(3) == 6


def test_replaces_by_object_whatever_the_name() -> None:
    assert rebound(through_alias, {scale: other})(3) == -3
    assert through_alias(3) == 6


def test_replaces_in_functions_of_the_package_that_are_called() -> None:
    assert rebound(through_helper, {scale: other})(3) == (-3 + 1) + (-3 + 10)
    assert through_helper(3) == 7 + 16


def test_replaces_in_nested_functions() -> None:
    assert rebound(in_nested, {scale: other})(2) == [0, -1, -2, -2]
    assert in_nested(2) == [0, 2, 4, 4]


def test_replaces_in_functions_that_call_each_other() -> None:
    assert rebound(down, {scale: other})(5) == [-5, 0, -3, 0, -1]
    assert rebound(up, {scale: other})(5) == [0, -4, 0, -2, 0]
    assert down(5) == [10, 0, 6, 0, 2]


def test_leaves_alone_what_does_not_refer_to_it() -> None:
    assert rebound(unrelated, {scale: other}) is unrelated
    assert rebound(Holder.by_attribute, {scale: other}) is Holder.by_attribute  # an attribute of the same name
    assert rebound(abs, {scale: other}) is abs
    # functions of another package are not copied, even if they refer to the object
    foreign: Any = FunctionType(compile("def f(x): return through(x)", "f", "exec").co_consts[0], {"through": direct})
    foreign.__module__ = "another.module"
    assert rebound(foreign, {scale: other}) is foreign


def test_takes_functions_without_a_module() -> None:
    scope: dict[str, Any] = {"scale": scale}
    exec("def helper(x): return scale(x)\ndef top(x): return helper(x)", scope)
    assert scope["top"].__module__ is None
    assert rebound(scope["top"], {scale: other})(3) == -3


def test_the_copy_keeps_name_and_signature() -> None:
    copy = rebound(direct, {scale: other})
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
        forward = rebound(Module.forward, {scale: other})

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


class Methods:
    @staticmethod
    def static(x: int) -> int:
        return scale(x)

    @classmethod
    def of_the_class(cls, x: int) -> tuple[type, int]:
        return cls, scale(x)


def test_replaces_in_what_a_decorator_decorates() -> None:
    assert refers_to(decorated, [scale]) == [scale] and refers_to(decorated, [other]) == []
    copy = rebound(decorated, {scale: other})
    assert copy(3, offset=5) == -3 + 5 + 1000 and decorated(3, offset=5) == 6 + 5 + 1000
    assert inspect.signature(copy) == inspect.signature(decorated) == inspect.signature(direct)


def test_replaces_in_static_and_class_methods() -> None:
    class Other(Methods):
        static = rebound(vars(Methods)["static"], {scale: other})
        of_the_class = rebound(vars(Methods)["of_the_class"], {scale: other})

    assert refers_to(vars(Methods)["static"], [scale]) == refers_to(vars(Methods)["of_the_class"], [scale]) == [scale]
    assert Other.static(3) == Other().static(3) == -3 and Other.of_the_class(3) == Other().of_the_class(3) == (
        Other,
        -3,
    )
    assert Methods.static(3) == 6 and Methods.of_the_class(3) == (Methods, 6)


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

    copy: Any = rebound(recursive, {scale: other})
    assert copy(3) == -6 and recursive(3) == 12

    class Further(Derived):
        value = rebound(Derived.value, {scale: other, Derived: int})

    assert Further().value() == -5 and Derived().value() == 10


def test_refers_to() -> None:
    assert refers_to(direct, [other, scale]) == [scale]
    assert refers_to(through_helper, {scale: None}) == [scale]
    assert refers_to(in_nested, [scale, other]) == [scale]
    assert sorted(f.__name__ for f in refers_to(lambda x: through_helper(other(x)), [scale, other])) == [
        "other",
        "scale",
    ]
    assert refers_to(down, [scale]) == refers_to(up, [scale]) == [scale]
    assert refers_to(unrelated, [scale]) == refers_to(Holder.by_attribute, [scale]) == refers_to(abs, [scale]) == []


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
    calls = [(rebound(part, {tripled: halved}), 3.0), (part, 13.0)]
    for function, expected in calls if first == "copy" else reversed(calls):
        assert torch.compile(function, backend="eager", fullgraph=True)(torch.tensor([4.0])).item() == expected


def test_only_upstream_rebinds() -> None:
    package = Path(torchtitan_npu.__file__).parent
    users = [path for path in package.rglob("*.py") if re.search(r"\brebound\(", path.read_text())]
    assert {path.relative_to(package).parts[0] for path in users} == {"titan_internals", "planner"}
