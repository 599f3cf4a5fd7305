"""Import the training entry in another process, because a broken extension may crash it."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from torchtitan_npu.cli.doctor.findings import Finding, green, red, yellow

ROOT = Path(__file__).resolve().parents[3]
"""The parent of the package, which may not be installed."""
STATUS_OF_FAILURE = {"torchtitan_npu.train": red, "torchao": yellow}
MISSING = "pip install . in a checkout of this repository installs the missing packages"
BROKEN = (
    "correct the red versions above, or reinstall the package of that file with pip install --force-reinstall --no-deps"
)


def check_imports() -> Iterator[Finding]:
    """Check the training entry, and torchao, which only the converters ``quantize.*`` import, in parallel."""
    processes = {module: start_import(module) for module in STATUS_OF_FAILURE}
    errors = {module: import_error(process) for module, process in processes.items()}
    for module, error in errors.items():
        if error is None:
            yield green(f"import {module}", "loads")
        else:
            missing = error.startswith("ModuleNotFoundError")
            yield STATUS_OF_FAILURE[module](f"import {module}", error, MISSING if missing else BROKEN)


def import_error(process: subprocess.Popen[str]) -> str | None:
    """Wait for the end of ``process``. Return its error in one line with the file, or None."""
    stderr = process.communicate()[1]
    return error_in(stderr, process.returncode) if process.returncode else None


def start_import(module: str) -> subprocess.Popen[str]:
    """Start to import ``module`` in another process."""
    code = f"import sys; sys.path.insert(0, {str(ROOT)!r}); import {module}"
    return subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)


def error_in(stderr: str, code: int) -> str:
    """Return the error line and innermost file of the last traceback; without one, how the process ended."""
    _, header, trace = stderr.rpartition("Traceback (most recent call last):\n")
    places = re.findall(r'^  File "(.+)", line (\d+)', trace, re.MULTILINE)
    error = re.search(r"^\S.*", trace, re.MULTILINE)
    if not header or not places or not error:
        return f"its process ended with signal {-code}" if code < 0 else f"its process ended with exit code {code}"
    return f"{error[0][:300]} ({':'.join(places[-1])})"
