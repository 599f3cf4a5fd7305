"""The result of one check: green, yellow or red, with advice."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Status = Literal["green", "yellow", "red"]


@dataclass(frozen=True)
class Finding:
    status: Status
    check: str
    """The subject of the check: ``"torch_npu"``."""
    what: str
    """The state that was found."""
    advice: str = ""
    """The next action. Every yellow and red finding has one."""


def green(check: str, what: str) -> Finding:
    """Report a correct state, or one that does not matter on this machine."""
    return Finding("green", check, what)


def yellow(check: str, what: str, advice: str) -> Finding:
    """Report that training runs, but may be slow, may fail later, or was never tried with this version."""
    return Finding("yellow", check, what, advice)


def red(check: str, what: str, advice: str) -> Finding:
    """Report that training fails or computes a wrong result."""
    return Finding("red", check, what, advice)


def first_line(error: BaseException) -> str:
    """Return the type and first line of an exception. torch_npu's messages are pages long."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {lines[0] if lines else ''}"[:300]
