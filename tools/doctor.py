#!/usr/bin/env python
"""Says whether this machine can train: a green, yellow or red line for each thing, and what to do.

    python tools/doctor.py [--home npu|cuda|cpu] [--only versions,environment,...] [--json]

Exit code 0: nothing is red, 1: something is, 2: it was asked wrongly. See docs/doctor.md.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # this package may not be installed yet

from machine.check import Line, green, in_one_line, red, yellow
from machine.conflicts import cautions, conflicts
from machine.host import check_host
from machine.imports import check_imports
from machine.versions import check_versions, version_of

if TYPE_CHECKING:
    from torchtitan_npu.platform import Home

COLORS = {"green": "\x1b[32m", "yellow": "\x1b[33m", "red": "\x1b[31m"}


def main() -> None:
    args = parse_args()
    with other_output_to_stderr():
        lines = list(examine(args.home, args.only or list(CHECKS)))
    if args.json:
        print(json.dumps([asdict(line) for line in lines], indent=1))
    else:
        show(lines)
    sys.exit(any(line.status == "red" for line in lines))


@contextmanager
def other_output_to_stderr() -> Iterator[None]:
    """torch_npu and its libraries print warnings to stdout, also from the processes of the all-reduce."""
    stdout = os.dup(1)
    os.dup2(2, 1)
    try:
        yield
    finally:
        sys.stdout.flush()
        os.dup2(stdout, 1)
        os.close(stdout)


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        "doctor.py", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument(
        "--home",
        choices=("npu", "cuda", "cpu"),
        help="where this machine is to train (default: npu with torch_npu installed, else what PyTorch finds)",
    )
    parser.add_argument("--only", type=lambda text: text.split(","), help=f"some of {','.join(CHECKS)}")
    parser.add_argument("--json", action="store_true", help="a list of {status, check, what, advice}")
    args = parser.parse_args()
    if unknown := set(args.only or ()) - set(CHECKS):
        parser.error(f"--only: {', '.join(sorted(unknown))} is none of {', '.join(CHECKS)}")
    return args


def examine(home: Home | None, wanted: list[str]) -> Iterator[Line]:
    """The lines of the checks that are ``wanted``."""
    machine = Machine(home)
    for name, check in CHECKS.items():
        if name in wanted:
            yield from check(machine)


class Machine:
    """What the checks know: where the machine is to train, and whether PyTorch loads."""

    def __init__(self, home: Home | None) -> None:
        self.error: str | None = None
        self.ranks = 1
        found: Home = "cpu"
        self.cann: str | None = None
        try:
            import torch

            from torchtitan_npu import platform

            found = platform.home()
            if found != "cpu":
                self.ranks = torch.get_device_module(found).device_count()
            if found == "npu":
                self.cann = torch.get_device_module(found).utils.get_cann_version() or None
        except (AttributeError, ImportError, RuntimeError, OSError) as error:
            self.error = in_one_line(error)
        self.home: Home = home or ("npu" if version_of("torch_npu") else found)
        self.usable = self.error is None and self.home == found


def versions(machine: Machine) -> Iterator[Line]:
    yield from check_versions(machine.home == "npu", machine.cann)
    if machine.error is not None:
        advice = "mend the red versions above; for libascendcl.so, source CANN's set_env.sh"
        yield red("import torch", machine.error, advice)
    else:
        yield green("import torch", "loads")
        yield from check_imports()


def devices(machine: Machine) -> Iterator[Line]:
    if machine.error is not None:
        yield red("devices", "not seen: torch does not load", "see import torch")
    else:
        from machine.devices import check_devices

        yield from check_devices(machine.home)


def host(machine: Machine) -> Iterator[Line]:
    yield from check_host(machine.home != "cpu", machine.ranks)


def environment(machine: Machine) -> Iterator[Line]:
    found = conflicts(os.environ)
    for conflict in found:
        yield red(" ".join(conflict.names), conflict.why, conflict.advice)
    for caution in cautions(os.environ):
        yield yellow(" ".join(caution.names), caution.why, caution.advice)
    if not found:
        yield green("environment", "no variables that conflict")


def operators(machine: Machine) -> Iterator[Line]:
    if machine.usable:
        from machine.operators import check_operators

        yield from check_operators(machine.home)
    else:
        yield yellow("operators", f"not run: there is no {machine.home} to run on", "see devices")


def collectives(machine: Machine) -> Iterator[Line]:
    if machine.usable:
        from machine.collectives import check_all_reduce

        yield check_all_reduce(machine.home, 2 if machine.home == "cpu" else machine.ranks)
    else:
        yield yellow("all-reduce", f"not run: there is no {machine.home} to run on", "see devices")


CHECKS: dict[str, Callable[[Machine], Iterator[Line]]] = {
    "versions": versions,
    "devices": devices,
    "host": host,
    "environment": environment,
    "operators": operators,
    "collectives": collectives,
}


def show(lines: list[Line]) -> None:
    """A line each, in color on a terminal; then the sum."""
    width = min(44, max(len(line.check) for line in lines))
    for line in lines:
        status = f"{line.status:6}"
        if sys.stdout.isatty():
            status = f"{COLORS[line.status]}{status}\x1b[0m"
        advice = f"\n{'':{7 + width}}→ {line.advice}" if line.advice else ""
        print(f"{status} {line.check:{width}} {line.what}{advice}")
    count = Counter(line.status for line in lines)
    print(f"{count['green']} green, {count['yellow']} yellow, {count['red']} red")


if __name__ == "__main__":
    main()
