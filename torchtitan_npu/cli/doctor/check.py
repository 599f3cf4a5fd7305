"""What a check says: a line that is green, yellow or red, and what to do."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Status = Literal["green", "yellow", "red"]


@dataclass(frozen=True)
class Line:
    status: Status
    check: str
    """What was looked at: ``"torch_npu"``."""
    what: str
    """What was found."""
    advice: str = ""
    """What to do; every red line has one."""


def green(check: str, what: str) -> Line:
    """As it should be, or not needed here."""
    return Line("green", check, what)


def yellow(check: str, what: str, advice: str) -> Line:
    """Training runs, and something may be slow, or fail later, or was not tried by anyone here."""
    return Line("yellow", check, what, advice)


def red(check: str, what: str, advice: str) -> Line:
    """Training does not run, or computes something else."""
    return Line("red", check, what, advice)


def in_one_line(error: BaseException) -> str:
    """What an exception says first; torch_npu's go on for pages."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {lines[0] if lines else ''}"[:300]
