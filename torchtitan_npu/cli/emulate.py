"""Run a command on emulated NPUs: the real torch_npu, whose operators are computed on the CPU.

    torchtitan-npu emulate [--chip Ascend910B3] [--devices 8] [--memory 60.9GiB] [--cann 9.1] [--seed N]
        [--launches] [--log calls.json] [--trace trace.json] [--check-nan] [--null-kernels] -- COMMAND ...

    torchtitan-npu emulate -- python script.py
    torchtitan-npu emulate -- torchrun --nproc_per_node=2 -m torchtitan_npu.train --job.config_file X.toml

The first use compiles the emulator (15 s, needs gcc). The exit code is that of the command; 2: it was not started.
See docs/how-to/emulate-an-npu.md.
"""

from __future__ import annotations

import argparse
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

from torchtitan_npu.cli.arguments import OneLineParser, memory_size
from torchtitan_npu.emulator.build import CANN_VERSIONS, BuildError, build
from torchtitan_npu.emulator.environment import Machine, Observation, process_variables
from torchtitan_npu.emulator.records import join_calls, join_trace, launch_table
from torchtitan_npu.errors import UsageError
from torchtitan_npu.progress import Progress

SHARED_MEMORY = Path("/dev/shm")
ROOM_FOR_COLLECTIVES = 2**30
"""Bytes that must be free in shared memory; otherwise ranks exchange their data in the temporary folder."""

MODULES = {"torchrun": "torch.distributed.run", "pytest": "pytest"}
"""Programs that are modules. If their scripts are not beside this Python, those in ``PATH`` belong to another one."""

FORWARDED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2)


def main(argv: list[str]) -> int:
    """Run the command in ``argv`` on the emulator and return its exit code."""
    args = parse_args(argv)
    machine = Machine(args.chip, args.devices, args.memory, args.cann, args.seed)
    observation = Observation(args.launches, bool(args.log), bool(args.trace), args.check_nan, args.null_kernels)
    try:
        check_output_folders(args)
        machine_variables = machine.variables()
        with Progress("emulate: starting") as progress:
            home = build(lambda text: progress.update(f"emulate: {text}"), args.cann)
        with temporary_folder() as folder, tempfile.TemporaryDirectory(prefix="npu_emulator_") as records:
            environment = {
                **os.environ,
                **process_variables(home, os.environ, seeded=args.seed is not None),
                **machine_variables,
                **observation.variables(Path(records)),
                "NPU_EMULATOR_FOLDER": str(folder),
                # The emulator is built for this Python: `python` is that of its environment.
                "PATH": os.pathsep.join((str(Path(sys.executable).parent), os.environ.get("PATH", os.defpath))),
            }
            code = run(args.command, environment)
            report(Path(records), args)
            return code
    except (BuildError, UsageError) as error:
        print(f"emulate: error: {error}", file=sys.stderr)
        return 2


def build_parser() -> OneLineParser:
    parser = OneLineParser(
        "torchtitan-npu emulate",
        usage="torchtitan-npu emulate [options] -- COMMAND ...",
        description=__doc__,
        allow_abbrev=False,
    )
    parser.add_argument("--chip", default=Machine.chip, help="the emulated chip (default: %(default)s)")
    parser.add_argument("--devices", type=int, default=Machine.devices, help="devices of this host (default: 8)")
    parser.add_argument(
        "--memory", type=memory_size, metavar="60.9GiB", help="memory of each device (default: that of the chip)"
    )
    parser.add_argument(
        "--cann", choices=CANN_VERSIONS, default=Machine.cann, help="version of CANN (default: %(default)s)"
    )
    parser.add_argument(
        "--seed", type=int, metavar="N", help="reorder whatever no event orders, to find a missing synchronization"
    )
    parser.add_argument("--launches", action="store_true", help="print launches and bytes by operator at the end")
    parser.add_argument("--log", type=Path, metavar="FILE", help="write every launch with its arguments, as JSON")
    parser.add_argument("--trace", type=Path, metavar="FILE", help="write a Chrome trace of streams and collectives")
    parser.add_argument(
        "--check-nan",
        action="store_true",
        help="stop at the first operator that computes nan or inf from finite inputs",
    )
    parser.add_argument(
        "--null-kernels", action="store_true", help="compute no floating-point numbers, to measure the host's time"
    )
    return parser


def parse_args(argv: list[str]) -> argparse.Namespace:
    """Parse and check the arguments, and the command after ``--``."""
    parser = build_parser()
    end = argv.index("--") if "--" in argv else len(argv)
    args = parser.parse_args(argv[:end], argparse.Namespace(command=argv[end + 1 :]))
    if not args.command:
        parser.error("no command: write it after --")
    if not 1 <= args.devices <= 64:  # torch's autograd engine aborts without a device; torch_npu knows 64
        parser.error("--devices must be 1 to 64")
    if args.memory == 0:
        parser.error("--memory must be more than 0")
    if args.seed is not None and args.seed < 1:  # 0 turns the seeded order off
        parser.error("--seed must be at least 1")
    return args


def check_output_folders(args: argparse.Namespace) -> None:
    """Raise :class:`UsageError` if a file cannot be written, before the command runs."""
    for option, path in (("--log", args.log), ("--trace", args.trace)):
        if path is not None and not path.absolute().parent.is_dir():
            raise UsageError(f"{option} {path}: there is no folder {path.absolute().parent}")


def report(records: Path, args: argparse.Namespace) -> None:
    """Write the files and print the table that the options ask for, from the records of all processes."""
    if args.log:
        join_calls(records, args.log)
    if args.trace:
        join_trace(records, args.trace)
    if args.launches:
        print(launch_table(records), file=sys.stderr)


@contextmanager
def temporary_folder() -> Iterator[Path]:
    """Yield a folder for the data of collectives, in shared memory if it has room. Remove it afterwards."""
    in_memory = SHARED_MEMORY.is_dir() and shutil.disk_usage(SHARED_MEMORY).free >= ROOM_FOR_COLLECTIVES
    folder = Path(tempfile.mkdtemp(prefix="npu_emulator_", dir=SHARED_MEMORY if in_memory else None))
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def run(command: list[str], environment: dict[str, str]) -> int:
    """Run the command, forward signals to it, and return its exit code; 128 + N if signal N ended it."""
    words = resolve(command, environment["PATH"])
    with subprocess.Popen(words, env=environment) as child:

        def forward(number: int, _: FrameType | None) -> None:
            # A terminal sends its signals to the whole foreground group, hence to the child as well.
            if number not in (signal.SIGINT, signal.SIGQUIT) or not in_foreground():
                child.send_signal(number)

        previous = {number: signal.signal(number, forward) for number in FORWARDED}
        code = child.wait()
        for number, handler in previous.items():
            signal.signal(number, handler)
    return code if code >= 0 else 128 - code


def resolve(command: list[str], path: str) -> list[str]:
    """Return the command with the full path of its program."""
    name, *arguments = command
    beside_python = shutil.which(name, path=str(Path(sys.executable).parent))
    if beside_python is None and name in MODULES:
        return [sys.executable, "-m", MODULES[name], *arguments]
    program = beside_python or shutil.which(name, path=path)
    if program is None:
        raise UsageError(f"there is no program {name}")
    return [program, *arguments]


def in_foreground() -> bool:
    """Return whether a terminal controls this process."""
    try:
        return os.tcgetpgrp(0) == os.getpgrp()
    except OSError:
        return False
