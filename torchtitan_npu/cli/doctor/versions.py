"""Check installed versions against ``versions.toml``, without importing them: a wrong version may fail to import."""

from __future__ import annotations

import os
import platform
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path
from typing import Any

from torchtitan_npu import cann
from torchtitan_npu.cann import version_numbers
from torchtitan_npu.cli.doctor.findings import Finding, green, red, yellow

TABLE = tomllib.loads((Path(__file__).parent / "versions.toml").read_text())
DRIVER = Path("/usr/local/Ascend/driver/version.info")
"""The version file of Ascend's driver installer."""
CANN_ROOTS = ("ASCEND_TOOLKIT_HOME", "ASCEND_HOME_PATH")
"""Variables set by CANN's ``set_env.sh``."""


def check_versions(on_npu: bool, loaded_cann: str | None = None) -> Iterator[Finding]:
    """Check all versions. ``on_npu`` requires torch_npu and CANN; ``loaded_cann`` is the version torch_npu reports."""
    yield from _others(on_npu)
    torch, torch_npu = version_of("torch"), version_of("torch_npu")
    # The advice follows the installed torch, else the installed torch_npu.
    stack = stack_of(torch) or stack_of(torch_npu) or TABLE["stack"][0]
    if torch is None:
        yield red("torch", "not installed", f"pip install torch=={stack['torch']}")
    elif stack_of(torch) is None:
        yield red("torch", f"{torch}: {_is_for('torch')}", f"pip install torch=={stack['torch']}")
    else:
        yield green("torch", torch)
    yield from _torch_npu(on_npu, torch, torch_npu, stack)
    yield from _cann(on_npu, loaded_cann or cann_version(), stack)


def _is_for(package: str) -> str:
    return f"this package supports {', '.join(row[package] for row in TABLE['stack'])}"


def _torch_npu(on_npu: bool, torch: str | None, installed: str | None, stack: dict[str, str]) -> Iterator[Finding]:
    supported = stack["torch_npu"]
    if installed is None:
        if on_npu:
            yield red("torch_npu", "not installed", f"pip install torch_npu=={supported}")
        else:
            yield green("torch_npu", "not installed and not needed here")
    elif torch is not None and version_numbers(installed)[:3] != version_numbers(torch)[:3]:
        # If torch_npu matches the table, torch has to change.
        change = f"torch_npu=={supported}" if installed != supported else f"torch=={stack['torch']}"
        what = f"{installed} with torch {torch}: torch_npu requires the torch of its own version"
        yield red("torch_npu", what, f"pip install {change}")
    elif stack_of(installed) is None:
        yield red("torch_npu", f"{installed}: {_is_for('torch_npu')}", f"pip install torch_npu=={supported}")
    else:
        yield green("torch_npu", installed)


def _cann(on_npu: bool, installed: str | None, stack: dict[str, str]) -> Iterator[Finding]:
    supported = stack["cann"]
    if installed is None:
        if on_npu:
            yield red("CANN", "not found", "install CANN and source its set_env.sh in this shell")
        else:
            yield green("CANN", "not found and not needed here")
    elif version_numbers(installed) < version_numbers(supported)[:2]:
        yield red("CANN", f"{installed}, older than {supported}", f"install CANN {supported}")
    elif version_numbers(installed)[:2] != version_numbers(supported)[:2]:
        yield yellow(
            "CANN",
            f"{installed}; the tested version is {supported}",
            "see docs/how-to/install.md; this version is untested",
        )
    else:
        yield green("CANN", installed)
    for converter, requirement in cann.CONVERTERS.items():
        if installed is not None and (error := cann.converter_error(converter, installed)):
            report = yellow if requirement.optional else red
            yield report(converter, error, f"install CANN {supported}, or remove {converter} from model.converters")


def _others(on_npu: bool) -> Iterator[Finding]:
    for row in TABLE["other"]:
        name, supported = row["name"], row["version"]
        installed = _installed(name)
        if installed is None:
            if not row.get("needed", True) or (name == "driver" and not on_npu):
                yield green(name, "not found and not needed here")
            elif name == "driver":
                yield yellow(name, f"{DRIVER} does not exist", "install the driver; in a container, mount that file")
            else:
                yield red(name, "not installed", f"pip install {name}=={supported}")
        elif row.get("exact") and version_numbers(installed) != version_numbers(supported):
            yield red(name, f"{installed}, not {supported}: {row['why']}", f"pip install {name}=={supported}")
        elif version_numbers(installed) >= version_numbers(supported):
            yield green(name, installed)
        elif name == "triton-ascend" and version_of("triton"):
            yield red(
                name,
                f"{installed} together with triton: both install into the same folder",
                f"pip uninstall triton, or {name}",
            )
        elif name in ("Python", "driver"):
            yield red(name, f"{installed}, older than {supported}: {row['why']}", f"install {supported} or newer")
        else:
            yield yellow(name, f"{installed}, older than {supported}: {row['why']}", f"pip install {name}=={supported}")


def stack_of(torch: str | None) -> dict[str, str] | None:
    """Return the row of the table with the same minor version as ``torch``."""
    rows: list[dict[str, Any]] = TABLE["stack"]
    minor = version_numbers(torch or "")[:2]
    return next((row for row in rows if version_numbers(row["torch"])[:2] == minor), None)


def version_of(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _installed(name: str) -> str | None:
    if name == "Python":
        return platform.python_version()
    return version_in(DRIVER) if name == "driver" else version_of(name)


def cann_version() -> str | None:
    """Return the version of the CANN whose ``set_env.sh`` was sourced."""
    roots = [Path(os.environ[name]) for name in CANN_ROOTS if name in os.environ]
    files = [file for root in roots for file in root.glob("*-linux/ascend_toolkit_install.info")]
    return next((version for file in files if (version := version_in(file))), None)


def version_in(path: Path) -> str | None:
    """Read ``version=9.2.0`` from a file of CANN or of its driver."""
    found = (
        re.search(r"^version\s*=\s*(\S+)", path.read_text(), re.IGNORECASE | re.MULTILINE) if path.is_file() else None
    )
    return found[1] if found else None


ROOT = Path(__file__).resolve().parents[3]
"""The parent of the package, which may not be installed."""
STATUS_OF_FAILURE = {"torchtitan_npu.train": red, "torchao": yellow}
MISSING = "pip install . in a checkout of this repository installs the missing packages"
BROKEN = (
    "correct the red versions above, or reinstall the package of that file with pip install --force-reinstall --no-deps"
)


def check_imports() -> Iterator[Finding]:
    """Check the training entry, and torchao, which only the converters ``quantize.*`` import, in parallel."""
    processes = {}
    for module in STATUS_OF_FAILURE:
        command = [sys.executable, "-c", f"import sys; sys.path.insert(0, {str(ROOT)!r}); import {module}"]
        processes[module] = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    errors = {module: process.communicate()[1] for module, process in processes.items()}
    for module, process in processes.items():
        if process.returncode == 0:
            yield green(f"import {module}", "loads")
        else:
            error = error_in(errors[module], process.returncode)
            missing = error.startswith("ModuleNotFoundError")
            yield STATUS_OF_FAILURE[module](f"import {module}", error, MISSING if missing else BROKEN)


def error_in(stderr: str, code: int) -> str:
    """Return the error line and innermost file of the last traceback; without one, how the process ended."""
    _, header, trace = stderr.rpartition("Traceback (most recent call last):\n")
    frames = re.findall(r'^  File "(.+)", line (\d+)', trace, re.MULTILINE)
    error = re.search(r"^\S.*", trace, re.MULTILINE)
    if not header or not frames or not error:
        return f"its process ended with signal {-code}" if code < 0 else f"its process ended with exit code {code}"
    return f"{error[0][:300]} ({':'.join(frames[-1])})"
