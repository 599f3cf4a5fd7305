"""Which rank failed first, on whichever node, and what it said.

When a rank fails, the others fail after it: connections that close, collectives that time out. Each node's launcher
writes down its failed ranks in the folder of the logs; where the nodes share that folder, each can tell who was first.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import time
from collections.abc import Collection, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # the launcher refuses what it can before torch is imported
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure

LAST_LINES = 30
"""Of a rank that left no traceback: how much of its log is shown."""
KILLED_AFTER = 30
"""Seconds that torchrun gives the other ranks of a node to end after its SIGTERM; then it sends SIGKILL."""
PATIENCE = KILLED_AFTER + 10.0
"""Seconds to wait for the other nodes' reports."""
SKEW = 60.0
"""Seconds by which clocks may differ: a report that is older than this launch by more is of an earlier one."""


@dataclass(frozen=True)
class Failure:
    """One failed rank."""

    rank: int
    node: int
    host: str
    exit_code: int
    time: float
    """When it failed, in seconds since the epoch."""
    error: str
    """Its traceback, or the end of its log."""
    log: str
    """The folder with its ``stdout.log`` and ``stderr.log``."""
    ended_by_torchrun: bool
    """It had not failed: torchrun ends the ranks of a node that still run when another has."""

    @property
    def order(self) -> tuple[bool, bool, float]:
        """The smallest is the cause. A mistake in the job makes every rank exit, and only one of them says why."""
        return self.ended_by_torchrun, not self.error, self.time

    def __str__(self) -> str:
        code = f"exit code {self.exit_code}"
        if self.exit_code < 0:
            code = f"ended by {signal.Signals(-self.exit_code).name}"
        return f"rank {self.rank} (node {self.node}, {self.host}), {code}"


def failures_of(error: ChildFailedError, node: int, folder: Path) -> list[Failure]:
    """The failed ranks of this node; ``folder``: what torchrun was given for the logs of this launch, and of no other.

    A failure's own ``error_file`` does not tell where the logs are: a rank that raised nothing has none.
    """
    logs = {int(path.name): path for path in folder.glob("*/attempt_*/[0-9]*")}
    first = min(failure.timestamp for failure in error.failures.values())
    return [
        _failure(rank, failure, node, logs[failure.local_rank], failure.timestamp - first)
        for rank, failure in error.failures.items()
    ]


def _failure(rank: int, failure: ProcessFailure, node: int, log: Path, later: int) -> Failure:
    """``later``: how many seconds after the first of its node torchrun saw that it had ended."""
    outputs = [path for path in (log / "stderr.log", log / "stdout.log") if path.is_file()]
    recorded = log / "error.json"
    # a rank that raised wrote the file then, and torchrun's own time is in whole seconds; one that was killed wrote its
    # last line before the others could notice
    written = [recorded] if recorded.is_file() else outputs
    when = max((path.stat().st_mtime for path in written), default=float(failure.timestamp))
    ends = ["\n".join(path.read_text(errors="replace").splitlines()[-LAST_LINES:]) for path in outputs]
    text = _traceback(failure) or next(filter(None, ends), "")
    # one that raised had failed, even if it hung then and had to be ended
    ended = not recorded.is_file() and (
        failure.exitcode == -signal.SIGTERM or (failure.exitcode == -signal.SIGKILL and later >= KILLED_AFTER)
    )
    return Failure(rank, node, socket.gethostname(), failure.exitcode, when, text, str(log), ended)


def _traceback(failure: ProcessFailure) -> str:
    message = failure.error_file_data.get("message")
    if not isinstance(message, dict):
        return ""
    return message["extraInfo"].get("py_callstack") or message["message"]


def report_path(logs: Path, node: int) -> Path:
    return logs / f"node{node}.failures.json"


def write_report(logs: Path, node: int, failures: list[Failure]) -> None:
    """All at once: another node may be reading."""
    path = report_path(logs, node)
    part = path.with_suffix(".part")
    part.write_text(json.dumps([asdict(failure) for failure in failures], indent=1))
    os.replace(part, path)


def gather_reports(
    logs: Path,
    nodes: Collection[int],
    started: float,
    signals: Sequence[signal.Signals] = (),
    patience: float = PATIENCE,
) -> dict[int, list[Failure]]:
    """The failures of each of ``nodes`` that reported before the ``patience`` ended; this launch has ``started`` then.

    When one of ``signals`` comes, which a handler adds to, there is no more waiting.
    """
    deadline = time.monotonic() + patience
    while True:
        reports = dict(_reports(logs, nodes, started))
        if len(reports) == len(nodes) or signals or time.monotonic() > deadline:
            return reports
        time.sleep(0.2)


def _reports(logs: Path, nodes: Collection[int], started: float) -> Iterator[tuple[int, list[Failure]]]:
    for node in nodes:
        path = report_path(logs, node)
        if path.is_file() and path.stat().st_mtime > started - SKEW:
            yield node, [Failure(**fields) for fields in json.loads(path.read_text())]


def describe(reports: dict[int, list[Failure]], nodes: int) -> str:
    """What the user reads: the first failure with its error, then a line for each that followed."""
    first, *later = sorted((f for failures in reports.values() for f in failures), key=lambda f: f.order)
    lines = [f"first failure: {first}, at {time.strftime('%H:%M:%S', time.localtime(first.time))}"]
    lines += [f"  {line}" for line in first.error.splitlines()] or ["  it said nothing"]
    lines += [f"  its log: {first.log}"]
    for failure in later:
        what = "ended with it" if failure.ended_by_torchrun else (failure.error.splitlines() or [""])[-1]
        lines.append(f"after it: {failure}: {what} (its log: {failure.log})")
    lines += [
        f"node {node} has not reported: its ranks still run, or the nodes do not share the folder of the logs"
        for node in range(nodes)
        if node not in reports
    ]
    return "\n".join(lines)
