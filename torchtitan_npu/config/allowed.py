"""Allowed values of a configuration key. Each section lists those of its keys, in ``ALLOWED``, beside its checks.

One list serves the check before a job starts, the table in docs/reference/configuration.md and the fuzz test. Booleans
and literals need no entry: the parser checks them against their type.
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Protocol

from torchtitan_npu.errors import UsageError, did_you_mean, shown

LARGEST = 2**31 - 1
"""The largest integer of a key without another maximum. Beyond it, time-outs and sizes overflow in torch."""
NAME_BYTES, PATH_BYTES = 255, 1000
"""Limits of Linux for a name, and for a path with room for the files that a job writes below it."""


def check_known(key: str, value: str, known: Iterable[str]) -> None:
    """Raise unless ``value`` is one of ``known``; the error suggests the nearest."""
    names = sorted(known)
    if value not in names:
        listed = ", ".join(name or '""' for name in names)
        raise UsageError(f"{key} {shown(value)} is not known{did_you_mean(value, names)} (known: {listed})")


class Allowed(Protocol):
    """The values that a key accepts, as text after "it must be", and their check."""

    def __str__(self) -> str: ...

    def check(self, key: str, value: Any) -> None:
        """Raise :class:`UsageError` unless ``value`` is allowed."""


@dataclass(frozen=True)
class Number:
    """Numbers from ``minimum`` to ``maximum``, and those in ``also``. NaN is never allowed."""

    minimum: float
    maximum: float = LARGEST
    above: bool = False
    """Exclude the minimum."""
    below: bool = False
    """Exclude the maximum."""
    also: tuple[int, ...] = ()

    def __str__(self) -> str:
        low = f"{'above' if self.above else 'at least'} {self.minimum}"
        high = f" and {'below' if self.below else 'at most'} {self.maximum}"
        text = low if self.maximum in (LARGEST, math.inf) else low + high
        return ", or ".join([text, *map(str, self.also)])

    def check(self, key: str, value: Any) -> None:
        inside = (value > self.minimum if self.above else value >= self.minimum) and (
            value < self.maximum if self.below else value <= self.maximum
        )
        if not inside and value not in self.also:
            limit = f"at most {self.maximum}" if value > self.maximum and not self.below else str(self)
            raise UsageError(f"{key} is {shown(value)}; it must be {limit}")


@dataclass(frozen=True)
class OneOf:
    """One of these strings."""

    choices: tuple[str, ...]

    def __str__(self) -> str:
        return " or ".join(f'`"{choice}"`' for choice in self.choices)

    def check(self, key: str, value: Any) -> None:
        check_known(key, value, self.choices)


@dataclass(frozen=True)
class Text:
    """Strings that match ``pattern`` completely; ``words`` says so to the user."""

    words: str
    pattern: str

    def __str__(self) -> str:
        return self.words

    def check(self, key: str, value: Any) -> None:
        if not re.fullmatch(self.pattern, value):
            raise UsageError(f"{key} is {shown(value)}; it must be {self.words}")


@dataclass(frozen=True)
class FilePath:
    """A path that the file system can hold. Each section checks whether it exists or can be written."""

    or_empty: bool = False

    def __str__(self) -> str:
        return "a path, or empty" if self.or_empty else "a path"

    def check(self, key: str, value: Any) -> None:
        if self.or_empty and not value:
            return
        NAME.check(key, value)
        longest = max(map(len, os.fsencode(value).split(b"/")))
        if longest > NAME_BYTES or len(os.fsencode(value)) > PATH_BYTES:
            raise UsageError(
                f"{key} is {shown(value)}; it must be a path of at most {PATH_BYTES} bytes, with names of at most "
                f"{NAME_BYTES}"
            )


@dataclass(frozen=True)
class ListOf:
    """A list whose items are ``item``."""

    item: Allowed

    def __str__(self) -> str:
        return f"a list, each {self.item}"

    def check(self, key: str, value: Any) -> None:
        for item in [value] if isinstance(value, str) else value:
            self.item.check(key, item)


PRINTABLE = r"[^\x00-\x1f\x7f-\x9f\u2028\u2029\ud800-\udfff]"
"""A character that does not end the line of a message or a log."""
LINE = Text("one line of text", rf"{PRINTABLE}*")
NAME = Text("one line of text, not empty", rf"{PRINTABLE}+")
MODULE = Text("a dotted module name, or empty", r"([^\W\d]\w*(\.[^\W\d]\w*)*)?")
PATH = FilePath()
