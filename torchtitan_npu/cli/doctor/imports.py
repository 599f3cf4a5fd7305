"""Whether what training imports does import: each in a process of its own, which it may end."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from torchtitan_npu.cli.doctor.check import Line, green, red, yellow

ROOT = Path(__file__).resolve().parents[3]
"""This package may not be installed yet."""
MISSING = "pip install . in a checkout of this repository brings what is missing"
BROKEN = "mend the red versions above, or pip install --force-reinstall --no-deps the package of that file"


def check_imports() -> Iterator[Line]:
    """The entry, and torchao, which only the converters ``quantize.*`` import; torch must load."""
    for module, status in (("torchtitan_npu.train", red), ("torchao", yellow)):
        if (error := import_error(module)) is None:
            yield green(f"import {module}", "loads")
        else:
            missing = error.startswith("ModuleNotFoundError")
            yield status(f"import {module}", error, MISSING if missing else BROKEN)


def import_error(module: str) -> str | None:
    """What ends the import of ``module``, in one line, and in which file."""
    code = f"import sys; sys.path.insert(0, {str(ROOT)!r}); import {module}"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    return error_in(result.stderr, result.returncode) if result.returncode else None


def error_in(stderr: str, code: int) -> str:
    """The last traceback's first line of the error, and its innermost file; without one, how the process ended."""
    _, header, trace = stderr.rpartition("Traceback (most recent call last):\n")
    places = re.findall(r'^  File "(.+)", line (\d+)', trace, re.MULTILINE)
    error = re.search(r"^\S.*", trace, re.MULTILINE)
    if not header or not places or not error:
        return f"its process ended with signal {-code}" if code < 0 else f"its process ended with exit code {code}"
    return f"{error[0][:300]} ({':'.join(places[-1])})"
