"""Check whether this machine can train. Print a green, yellow or red line per check, with advice.

    torchtitan-npu doctor [--backend npu|cuda|cpu] [--only versions,environment,...] [--json]

Exit code 0: no red line, 1: at least one red line, 2: invalid arguments. See docs/how-to/doctor.md.
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
from typing import TYPE_CHECKING

from torchtitan_npu.cli.arguments import OneLineParser
from torchtitan_npu.cli.doctor.environment import addresses, find_cautions, find_conflicts
from torchtitan_npu.cli.doctor.findings import Finding, first_line, green, red, yellow
from torchtitan_npu.cli.doctor.host import check_host, check_interfaces
from torchtitan_npu.cli.doctor.versions import check_imports, check_versions, version_of
from torchtitan_npu.progress import Progress

if TYPE_CHECKING:
    from torchtitan_npu.platform import Backend

COLORS = {"green": "\x1b[32m", "yellow": "\x1b[33m", "red": "\x1b[31m"}


def main(argv: list[str]) -> int:
    args = parse_args(argv)
    with other_output_to_stderr(), Progress("doctor: checking the machine") as progress:
        lines = list(examine(args.backend, args.only or list(CHECKS), progress))
    if args.json:
        print(json.dumps([asdict(line) for line in lines], indent=1))
    else:
        show(lines)
    return int(any(line.status == "red" for line in lines))


@contextmanager
def other_output_to_stderr() -> Iterator[None]:
    """Redirect stdout to stderr: torch_npu and its libraries print warnings there, also in child processes."""
    stdout = os.dup(1)
    os.dup2(2, 1)
    try:
        yield
    finally:
        sys.stdout.flush()
        os.dup2(stdout, 1)
        os.close(stdout)


def build_parser() -> OneLineParser:
    parser = OneLineParser(
        "torchtitan-npu doctor",
        description=__doc__,
        allow_abbrev=False,
    )
    parser.add_argument(
        "--backend",
        "--home",
        choices=("npu", "cuda", "cpu"),
        help="backend to check for (default: npu if torch_npu is installed, else the one that PyTorch finds)",
    )
    parser.add_argument(
        "--only", type=lambda text: text.split(","), help=f"comma-separated subset of {','.join(CHECKS)}"
    )
    parser.add_argument("--json", action="store_true", help="print a JSON list of {status, check, what, advice}")
    return parser


def parse_args(argv: list[str]) -> argparse.Namespace:
    """Parse and check the arguments."""
    parser = build_parser()
    args = parser.parse_args(argv)
    if unknown := set(args.only or ()) - set(CHECKS):
        parser.error(f"--only: {', '.join(sorted(unknown))} is none of {', '.join(CHECKS)}")
    return args


def examine(backend: Backend | None, selected: list[str], progress: Progress) -> Iterator[Finding]:
    """Run the ``selected`` checks."""
    machine = ExaminedMachine(backend)
    for name, check in CHECKS.items():
        if name in selected:
            progress.update(f"doctor: checking {name}")
            yield from check(machine)


class ExaminedMachine:
    """Hold what the checks share: the backend to check for, and whether PyTorch loads."""

    def __init__(self, backend: Backend | None) -> None:
        self.error: str | None = None
        self.ranks = 1
        found: Backend = "cpu"
        self.cann: str | None = None
        try:
            import torch

            from torchtitan_npu import platform

            found = platform.backend()
            if found != "cpu":
                self.ranks = torch.get_device_module(found).device_count()
            self.cann = platform.cann_version()
        except (AttributeError, ImportError, RuntimeError, OSError) as error:
            self.error = first_line(error)
        self.backend: Backend = backend or ("npu" if version_of("torch_npu") else found)
        self.usable = self.error is None and self.backend == found


def versions(machine: ExaminedMachine) -> Iterator[Finding]:
    yield from check_versions(machine.backend == "npu", machine.cann)
    if machine.error is not None:
        advice = "correct the red versions above; for libascendcl.so, source CANN's set_env.sh"
        yield red("import torch", machine.error, advice)
    else:
        yield green("import torch", "loads")
        yield from check_imports()


def devices(machine: ExaminedMachine) -> Iterator[Finding]:
    if machine.error is not None:
        yield red("devices", "not checked: torch does not load", "see import torch")
    else:
        from torchtitan_npu.cli.doctor.devices import check_devices

        yield from check_devices(machine.backend)


def host(machine: ExaminedMachine) -> Iterator[Finding]:
    yield from check_host(machine.backend != "cpu", machine.ranks)


def environment(machine: ExaminedMachine) -> Iterator[Finding]:
    found = find_conflicts(os.environ)
    for conflict in found:
        yield red(" ".join(conflict.names), conflict.why, conflict.advice)
    for caution in find_cautions(os.environ):
        yield yellow(" ".join(caution.names), caution.why, caution.advice)
    if not found:
        yield green("environment", "no conflicting variables")
    if machine.backend == "npu":
        yield check_interfaces(addresses(), os.environ)


def operators(machine: ExaminedMachine) -> Iterator[Finding]:
    if machine.usable:
        from torchtitan_npu.cli.doctor.operators import check_operators

        yield from check_operators(machine.backend)
    else:
        yield yellow("operators", f"not run: no {machine.backend} device", "see devices")


def collectives(machine: ExaminedMachine) -> Iterator[Finding]:
    if machine.usable:
        from torchtitan_npu.cli.doctor.devices import check_all_reduce

        yield check_all_reduce(machine.backend, 2 if machine.backend == "cpu" else machine.ranks)
    else:
        yield yellow("all-reduce", f"not run: no {machine.backend} device", "see devices")


CHECKS: dict[str, Callable[[ExaminedMachine], Iterator[Finding]]] = {
    "versions": versions,
    "devices": devices,
    "host": host,
    "environment": environment,
    "operators": operators,
    "collectives": collectives,
}


def show(lines: list[Finding]) -> None:
    """Print one line per finding, in color on a terminal, and the counts."""
    width = min(44, max(len(line.check) for line in lines))
    for line in lines:
        status = f"{line.status:6}"
        if sys.stdout.isatty():
            status = f"{COLORS[line.status]}{status}\x1b[0m"
        advice = f"\n{'':{7 + width}}→ {line.advice}" if line.advice else ""
        print(f"{status} {line.check:{width}} {line.what}{advice}")
    count = Counter(line.status for line in lines)
    print(f"{count['green']} green, {count['yellow']} yellow, {count['red']} red")
