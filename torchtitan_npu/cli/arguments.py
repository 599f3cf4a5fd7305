"""An argument parser that reports errors in one line, and the types of its arguments."""

from __future__ import annotations

import argparse
import re
from typing import NoReturn


class OneLineParser(argparse.ArgumentParser):
    """Report an invalid argument in one line, without the usage text."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: {message} (--help shows the arguments)\n")


_UNITS = {
    f"{prefix}{end}": base**power for end, base in (("iB", 1024), ("B", 1000)) for power, prefix in enumerate("KMGT", 1)
}


def memory_size(text: str) -> int:
    """Return the bytes of ``60.9GiB`` or ``64GB``. A number without a unit is an error."""
    match = re.fullmatch(r"(\d+(?:\.\d*)?) *([KMGT]i?B)", text)
    if not match:
        raise argparse.ArgumentTypeError(f"{text!r} is no size: write a number and its unit, such as 60.9GiB or 64GB")
    return int(float(match[1]) * _UNITS[match[2]])
