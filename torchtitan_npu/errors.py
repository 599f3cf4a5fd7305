"""The error that a user can correct, raised before the first step and printed as one line; exit codes of a rank."""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from typing import Any

EXIT_FAILED = 1
"""This rank failed, or ends because another one did."""
EXIT_USAGE = 2
"""The job cannot run as configured."""
EXIT_NONFINITE = 3
"""Stopped because the loss or the gradients are not finite. The same job would stop there again."""
ERROR_PREFIX = "torchtitan_npu: error: "
"""Begins the line that a job which cannot run prints."""
EXIT_STOPPED = 75
"""Stopped by a signal after a complete step; the job can be resumed. The usual code for "try again later"."""


class UsageError(ValueError):
    """A job cannot run as configured. The message names the key, module or argument to change, and its limit."""


def file_error(error: OSError) -> str:
    """Return the message of ``error`` as ``file: reason``, or the reason if the error names no file."""
    reason = error.strerror or str(error)
    return f"{error.filename}: {reason}" if error.filename else reason


def did_you_mean(name: str, known: Iterable[str], prefix: str = "") -> str:
    """Return ``"; did you mean 'x'?"`` if one of ``known`` is close to ``name``, else an empty string.

    The suggestion starts with ``prefix``, such as the section of a key.
    """
    by_lower_case = {k.lower(): k for k in known}
    close = difflib.get_close_matches(name.lower(), by_lower_case, n=1, cutoff=0.6)
    close = close or [k for k in by_lower_case if name.lower() in k][:1]
    return f"; did you mean {prefix + by_lower_case[close[0]]!r}?" if close else ""


def shown(value: Any) -> str:
    """Return ``value`` for a message: at most 100 characters, also if it is a number with thousands of digits."""
    if isinstance(value, int) and value.bit_length() > 128:
        return f"an integer of {value.bit_length()} bits"
    text = str(value) if isinstance(value, (int, float)) else repr(value)
    return text if len(text) <= 100 else f"{text[:97]}..."


def one_line(text: object) -> str:
    """Return ``text`` with control characters, line ends and undecodable bytes escaped, as for a terminal."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in str(text))
