"""The environment variables with which a process runs on the emulator.

    eval "$(python -m torchtitan_npu.emulator.environment [--cann 9.1])"

prints them for a shell, and compiles the emulator if need be. ``torchtitan-npu emulate`` sets them for one command.
"""

from __future__ import annotations

import argparse
import os
import shlex
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from torchtitan_npu.chips import DEFAULT_CHIP, find_chip
from torchtitan_npu.emulator.build import (
    CANN_VERSIONS,
    DEFAULT_CANN_VERSION,
    MEMORY_TOOL,
    TASK_QUEUE,
    BuildError,
    build,
)
from torchtitan_npu.errors import UsageError


@dataclass(frozen=True)
class Machine:
    """The emulated machine."""

    chip: str = DEFAULT_CHIP
    """A key of :data:`torchtitan_npu.chips.CHIPS`."""
    devices: int = 8
    memory: int | None = None
    """Bytes of each device; ``None``: those of the chip."""
    cann: str = DEFAULT_CANN_VERSION
    """A key of ``CANN_VERSIONS``."""
    seed: int | None = None
    """Draw the order of everything that no event orders from this seed."""

    def variables(self) -> dict[str, str]:
        """Return the variables that the emulator's runtime reads (``runtime/settings.c``).

        Raise :class:`UsageError` if there is no such chip, or if nobody has reported its memory.
        """
        chip = find_chip(self.chip)
        memory = chip.memory if self.memory is None else self.memory
        if memory is None:
            raise UsageError(f"the memory of {self.chip} is not known: add --memory, such as --memory 64GiB")
        found = {
            "NPU_EMULATOR_CHIP": self.chip,
            "NPU_EMULATOR_DEVICES": str(self.devices),
            "NPU_EMULATOR_MEMORY": str(memory),
            "NPU_EMULATOR_CANN": CANN_VERSIONS[self.cann],
        }
        if self.seed is not None:
            found["NPU_EMULATOR_SEED"] = str(self.seed)
        return found


@dataclass(frozen=True)
class Observation:
    """Records and checks of a run."""

    launches: bool = False
    """Count launches and bytes by operator."""
    log: bool = False
    """Record every launch with its arguments."""
    trace: bool = False
    """Record what ran when, on which stream."""
    check_nan: bool = False
    """Stop at the first operator that computes a value that is not finite."""
    null_kernels: bool = False
    """Compute no floating-point numbers: launches return at once."""

    def variables(self, folder: Path) -> dict[str, str]:
        """Return the variables of the emulator's runtime; each process writes its records to ``folder``."""
        records = [name for name in ("launches", "log", "trace") if getattr(self, name)]
        found: dict[str, str] = {}
        if records:
            found |= {"NPU_EMULATOR_RECORD": " ".join(records), "NPU_EMULATOR_RECORD_FOLDER": str(folder)}
        if self.check_nan:
            found["NPU_EMULATOR_CHECK_NAN"] = "1"
        if self.null_kernels:
            found["NPU_EMULATOR_NULL_KERNELS"] = "1"
        return found


def process_variables(home: Path, environment: Mapping[str, str], seeded: bool = False) -> dict[str, str]:
    """Return the variables of a process whose CANN is the emulator in ``home``, in addition to ``environment``.

    A ``seeded`` process preloads a library that makes torch_npu's allocator report its blocks. A process with
    torch_npu's task queue preloads one with which the queue's thread gets the GIL.
    """
    libraries = home / "lib64"
    # Kernels are Python: torch_npu's launch thread would only wait for the GIL.
    task_queue = environment.get("TASK_QUEUE_ENABLE") or "0"
    found = {
        "ASCEND_HOME_PATH": str(home),
        "ASCEND_OPP_PATH": str(home / "opp"),
        "LD_LIBRARY_PATH": _prepend(libraries, environment.get("LD_LIBRARY_PATH")),
        "TASK_QUEUE_ENABLE": task_queue,
    }
    preloaded = environment.get("LD_PRELOAD")
    for library, is_needed in ((MEMORY_TOOL, seeded), (TASK_QUEUE, task_queue != "0")):
        if is_needed:
            preloaded = found["LD_PRELOAD"] = _prepend(libraries / library, preloaded)
    return found


def _prepend(path: Path, paths: str | None) -> str:
    return f"{path}{os.pathsep}{paths}" if paths else str(path)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cann", choices=CANN_VERSIONS, default=Machine.cann)
    args = parser.parse_args()
    try:
        home = build(lambda text: print(text, file=sys.stderr), args.cann)
    except BuildError as error:
        sys.exit(f"error: {error}")
    for name, value in (process_variables(home, os.environ) | Machine(cann=args.cann).variables()).items():
        print(f"export {name}={shlex.quote(value)}")


if __name__ == "__main__":
    main()
