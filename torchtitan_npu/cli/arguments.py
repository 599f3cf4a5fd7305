"""What commands have in common: a parser that reports errors in one line, arguments, an exit code."""

from __future__ import annotations

import argparse
import logging
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NoReturn

from torchtitan_npu.errors import UsageError

EXIT_INTERRUPTED = 130
"""Ended by Ctrl-C: 128 and the number of SIGINT, as a shell reports it."""

EXIT_OUTPUT_CLOSED = 141
"""The reader of the output has ended, as in ``| head``: 128 and the number of SIGPIPE."""


class OneLineParser(argparse.ArgumentParser):
    """Report an invalid argument in one line, without the usage text. Show the description as it is written."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.actions: list[argparse.Action] = []
        """What was added. argparse has no public list."""
        super().__init__(*args, **{"formatter_class": argparse.RawDescriptionHelpFormatter} | kwargs)

    def _add_action(self, action: Any) -> Any:
        self.actions.append(action)
        return super()._add_action(action)

    def add_action(self, action: argparse.Action) -> None:
        """Add an action of another parser."""
        self._add_action(action)

    def add_subparsers(self, **kwargs: Any) -> Any:  # does not call _add_action
        self.actions.append(super().add_subparsers(**kwargs))
        return self.actions[-1]

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: {message} (--help shows the arguments)\n")


def checkpoint_parser(prog: str, description: str | None) -> OneLineParser:
    """Return a parser with the job and the checkpoint of a command that runs a trained model."""
    parser = OneLineParser(prog, description=description)
    parser.add_argument("--config", required=True, help="the job's TOML file")
    parser.add_argument(
        "--checkpoint", required=True, type=Path, help="folder of a job's checkpoint, or of Hugging Face"
    )
    return parser


@contextmanager
def without_log() -> Iterator[None]:
    """Hide TorchTitan's log, whose lines are about the start of jobs."""
    logging.disable(logging.WARNING)
    try:
        yield
    finally:
        logging.disable(logging.NOTSET)


def read_utf8(option: str, file: Path) -> str:
    """Return the text of the ``file`` that ``option`` names. Text in another encoding is a :class:`UsageError`."""
    try:
        return file.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise UsageError(f"{option} {file} is not UTF-8 text: {error}") from error


_UNITS = {
    f"{prefix}{end}": base**power for end, base in (("iB", 1024), ("B", 1000)) for power, prefix in enumerate("KMGT", 1)
}


def memory_size(text: str) -> int:
    """Return the bytes of ``60.9GiB`` or ``64GB``. A number without a unit is an error."""
    match = re.fullmatch(r"(\d+(?:\.\d*)?) *([KMGT]i?B)", text)
    if not match:
        raise argparse.ArgumentTypeError(f"{text!r} is no size: write a number and its unit, such as 60.9GiB or 64GB")
    return int(float(match[1]) * _UNITS[match[2]])
