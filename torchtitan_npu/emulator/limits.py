"""Documented limits of the operators in the emulated version of CANN on the emulated chip.

``cann_limits.json`` has one line for each documented limit of an operator of :mod:`torchtitan_npu.ops`. ``op`` and
``what`` name the operator and the quantity as in its :class:`~torchtitan_npu.ops.core.op.Limit`.
``operator`` is CANN's, ``chips`` are the series of the document (keys of ``torchtitan_npu.chips.SERIES``), and
``allowed`` has the values by the first version of CANN that allows them. ``"1..64"`` is a range, open if an end is
missing. ``null`` instead of values: the document does not say. ``source`` is the document; ``source_8.5`` and
``source_master`` are those of 8.5 and of master if they differ.
"""

from __future__ import annotations

import ctypes
import json
from collections.abc import Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torchtitan_npu.chips import find_chip
from torchtitan_npu.emulator.build import CANN_VERSIONS, RUNTIME, in_version

if TYPE_CHECKING:
    from torchtitan_npu.ops import Op


def version_limit_errors(op: Op, arguments: dict[str, Any]) -> Iterator[str]:
    """Yield a message for each limit of the emulated version and chip that these ``arguments`` exceed."""
    for what, allowed in _limits_of(op.name):
        found, value = limited_value(op, what, arguments)
        if found and not is_documented(value, allowed):
            version, chip = emulated_version_and_chip()
            text = ", ".join(str(item) for item in allowed)
            yield f"{op.name}: {what} is {value}; CANN {version} on {chip} supports {text}"


@cache
def _limits_of(op: str) -> list[tuple[str, list[Any]]]:
    version, chip = emulated_version_and_chip()
    rows = [row for row in documented_limits() if row["op"] == op and chip in row["chips"]]
    limits = [(row["what"], in_version(version, row["allowed"])) for row in rows]
    return [(what, allowed) for what, allowed in limits if isinstance(allowed, list)]


@cache
def documented_limits() -> list[dict[str, Any]]:
    return json.loads(Path(__file__).with_name("cann_limits.json").read_text())


@cache
def emulated_version_and_chip() -> tuple[str, str]:
    """Return the version of CANN, a key of ``CANN_VERSIONS``, and the series of the chip, a key of ``chips.SERIES``."""
    library = ctypes.CDLL(RUNTIME)  # torch_npu has loaded it
    version = (ctypes.c_char * 16).in_dll(library, "cann_version").value.decode()
    library.aclrtGetSocName.restype = ctypes.c_char_p
    series = find_chip(library.aclrtGetSocName().decode()).series
    return next(short for short, number in CANN_VERSIONS.items() if number == version), series


def limited_value(op: Op, what: str, arguments: dict[str, Any]) -> tuple[bool, Any]:
    """Return whether the quantity ``what`` can be told from the arguments, and its value."""
    for limit in op.limits:
        if limit.what == what:
            return True, _plain(limit.measure(**arguments))
    name, _, attribute = what.partition(".")
    if attribute == "dtype" and name in arguments:
        return True, _plain(arguments[name].dtype)
    return what == "norm_type" and what in arguments, arguments.get(what)


def _plain(value: Any) -> Any:
    """Write a dtype as the documents do: ``"bfloat16"``."""
    return value if isinstance(value, int | str) or value is None else str(value).removeprefix("torch.")


def is_documented(value: Any, allowed: Sequence[Any]) -> bool:
    """Return whether a list of values and ranges has ``value``."""
    for item in allowed:
        ends = bounds(item)
        if ends is None or not isinstance(value, int):
            if value == item:
                return True
        elif (ends[0] is None or ends[0] <= value) and (ends[1] is None or value <= ends[1]):
            return True
    return False


def bounds(item: Any) -> tuple[int | None, int | None] | None:
    """Return the ends of ``1`` or ``"1..64"``; an open end is ``None``."""
    if isinstance(item, int):
        return item, item
    if isinstance(item, str) and ".." in item:
        low, _, high = item.partition("..")
        return int(low) if low else None, int(high) if high else None
    return None
