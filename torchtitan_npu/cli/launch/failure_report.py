"""Report which rank failed first, on any node, with its error.

When a rank fails, other ranks fail after it: connections close and collectives time out. The launcher of each node
writes its failed ranks to the log folder. If the nodes share this folder, each node can find the first failure.
"""

from __future__ import annotations

import io
import json
import os
import re
import signal
import socket
import threading
import time
from collections.abc import Collection, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

from torchtitan_npu.errors import ERROR_PREFIX, EXIT_NONFINITE, EXIT_STOPPED, EXIT_USAGE

if TYPE_CHECKING:  # the launcher checks its options before it imports torch
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure

LAST_LINES = 30
"""Lines of the log to show for a rank without a traceback."""
KILLED_AFTER = 30
"""Seconds between torchrun's SIGTERM to the other ranks of a node and its SIGKILL."""
REPORT_TIMEOUT = KILLED_AFTER + 10.0
"""Seconds to wait for the reports of other nodes."""
SKEW = 60.0
"""Allowed clock difference in seconds. A report older than this launch by more belongs to an earlier launch."""


@dataclass(frozen=True)
class Failure:
    """Describe one failed rank."""

    rank: int
    node: int
    host: str
    exit_code: int
    time: float
    """Time of the failure in seconds since the epoch."""
    error: str
    """The traceback, or the end of the log."""
    log: str
    """The folder with ``stdout.log`` and ``stderr.log``."""
    killed_by_torchrun: bool
    """True for a rank that did not fail itself: torchrun kills the other ranks of a node after a failure."""
    cause: dict[str, Any] | None = None
    """The job's first failure, if the ranks have found it: see ``RankFailure`` in components/job_control."""

    @property
    def order(self) -> tuple[bool, bool, float]:
        """Return the sort key; the smallest failure is the cause.

        Ranks with an error text come first: an invalid job makes every rank exit, and only one prints the reason.
        """
        if self.cause:
            return self.cause["rank"] != self.rank, False, self.time
        return self.killed_by_torchrun, not self.error, self.time

    def __str__(self) -> str:
        code = f"exit code {self.exit_code}"
        if self.exit_code < 0:
            code = f"killed by {signal.Signals(-self.exit_code).name}"
        return f"rank {self.rank} (node {self.node}, {self.host}), {code}"


def failures_of(error: ChildFailedError, node: int, folder: Path) -> list[Failure]:
    """Return the failed ranks of this node. ``folder`` is torchrun's log folder of this launch.

    The ``error_file`` of a failure does not give the log folder: a rank without an exception has no such file.
    """
    logs = {int(path.name): path for path in folder.glob("*/attempt_*/[0-9]*")}
    first = min(failure.timestamp for failure in error.failures.values())
    return [
        _failure(rank, failure, node, logs[failure.local_rank], failure.timestamp - first)
        for rank, failure in error.failures.items()
    ]


def _failure(rank: int, failure: ProcessFailure, node: int, log: Path, later: int) -> Failure:
    """Describe one rank, which ended ``later`` seconds after the first failure of its node."""
    outputs = [path for path in (log / "stderr.log", log / "stdout.log") if path.is_file()]
    recorded = log / "error.json"
    # File times are more precise than torchrun's, which are in seconds. A rank writes error.json when it raises.
    # A killed rank wrote its last line before the other ranks could notice.
    written = [recorded] if recorded.is_file() else outputs
    when = max((path.stat().st_mtime for path in written), default=float(failure.timestamp))
    ends = ["\n".join(path.read_text(errors="replace").splitlines()[-LAST_LINES:]) for path in outputs]
    text = _traceback(failure) or next(filter(None, ends), "")
    # A rank that raised has failed, even if it then hung and was killed.
    killed = not recorded.is_file() and (
        failure.exitcode == -signal.SIGTERM or (failure.exitcode == -signal.SIGKILL and later >= KILLED_AFTER)
    )
    message = failure.error_file_data.get("message")
    cause = message.get("cause") if isinstance(message, dict) else None
    return Failure(rank, node, socket.gethostname(), failure.exitcode, when, text, str(log), killed, cause)


def refusal(failures: list[Failure]) -> str | None:
    """Return the reason why the ranks of this node have refused the job, or ``None`` if one failed otherwise."""
    ended = [failure for failure in failures if not failure.killed_by_torchrun]
    if any(failure.exit_code != EXIT_USAGE or failure.cause for failure in ended):
        return None
    for failure in ended:
        stderr = Path(failure.log) / "stderr.log"
        lines = stderr.read_text(errors="replace").splitlines() if stderr.is_file() else []
        if lines and lines[-1].startswith(ERROR_PREFIX):
            return lines[-1].removeprefix(ERROR_PREFIX)
    return None


def stop_message(folder: Path) -> tuple[str, int] | None:
    """Return the message and exit code of the ranks of this launch if all have stopped in the same way, as they should.

    They do so after a signal, and after a step that is not finite.
    """
    logs = list(folder.glob("*/attempt_*/[0-9]*"))
    files = [log / "error.json" for log in logs]
    if not logs or not all(file.is_file() for file in files):
        return None
    messages = [json.loads(file.read_text())["message"] for file in files]
    codes = {one.get("errorCode") if isinstance(one, dict) else None for one in messages}
    if codes not in ({EXIT_STOPPED}, {EXIT_NONFINITE}):
        return None
    return messages[0]["extraInfo"]["py_callstack"], codes.pop()


def _traceback(failure: ProcessFailure) -> str:
    message = failure.error_file_data.get("message")
    if not isinstance(message, dict):
        return ""
    return message["extraInfo"].get("py_callstack") or message["message"]


def _clock(failure: Failure) -> str:
    return time.strftime("%H:%M:%S", time.localtime(failure.time))


def _indented(cause: dict[str, Any] | None) -> list[str]:
    """Return the lines of the job's first failure, as the ranks have found it."""
    return [f"  {line}" for line in (cause["what"], *cause["details"].splitlines())] if cause else []


def report_path(logs: Path, node: int) -> Path:
    return logs / f"node{node}.failures.json"


def write_report(logs: Path, node: int, failures: list[Failure]) -> None:
    """Write the report atomically, because another node may be reading it."""
    path = report_path(logs, node)
    part = path.with_suffix(".part")
    part.write_text(json.dumps([asdict(failure) for failure in failures], indent=1))
    os.replace(part, path)


def gather_reports(
    logs: Path,
    nodes: Collection[int],
    started: float,
    signals: Sequence[signal.Signals] = (),
    timeout: float = REPORT_TIMEOUT,
) -> dict[int, list[Failure]]:
    """Return the failures of each node that reports within ``timeout``, for the launch that began at ``started``.

    A signal handler appends to ``signals``. Waiting ends as soon as the list is not empty.
    """
    deadline = time.monotonic() + timeout
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
    """Return the report for the user: the first failure with its error, then one line per later failure."""
    failures = [failure for of_node in reports.values() for failure in of_node]
    cause = next((failure.cause for failure in failures if failure.cause), None)
    if cause:
        failures = [replace(failure, cause=cause) for failure in failures]
    first, *later = sorted(failures, key=lambda failure: failure.order)
    if cause and first.rank != cause["rank"]:  # it exited with 0, so torchrun does not count it as failed
        name = f"rank {cause['rank']} ({cause['host']}, pid {cause['pid']}), exit code 0"
        lines, later = [f"first failure: {name}, before {_clock(first)}", *_indented(cause)], [first, *later]
    else:
        lines = [f"first failure: {first}, at {_clock(first)}", *_indented(cause)]
        lines += [f"  {line}" for line in first.error.splitlines()] or ["  no output"]
        lines += [f"  log: {first.log}"]
    for failure in later:
        what = (
            "killed by torchrun after the first failure"
            if failure.killed_by_torchrun
            else (failure.error.splitlines() or [""])[-1]
        )
        lines.append(f"later: {failure}: {what} (log: {failure.log})")
    lines += [
        f"node {node} has not reported: its ranks still run, or the nodes do not share the log folder"
        for node in range(nodes)
        if node not in reports
    ]
    return "\n".join(lines)


ERROR = re.compile(
    r"Traceback \(most recent call last\)"
    r"|\[E\d{4} "  # PyTorch's C++ log: timeouts of collectives
    rf"|{re.escape(ERROR_PREFIX)}"
    r"|terminate called"
    r"|ERR\d{5}|EI\d{4}"  # error codes of torch_npu and HCCL
)


class DeferErrors(io.TextIOBase):
    """Write text to ``console`` until an error begins. Defer everything from there until :meth:`release`.

    A job may survive an error that it logs: if it still runs after ``seconds``, the deferred text is shown. torchrun
    needs 30 seconds to kill ranks that do not exit.
    """

    def __init__(self, console: TextIO, seconds: float = 60) -> None:
        self.console = console
        self.seconds = seconds
        self.deferred: list[str] = []
        self.timer: threading.Timer | None = None
        self.held = False
        self.lock = threading.Lock()

    def write(self, text: str) -> int:
        with self.lock:
            if self.timer is None and ERROR.search(text):
                self.timer = threading.Timer(self.seconds, self._expire)
                self.timer.daemon = True
                self.timer.start()
            if self.timer is None:
                self.console.write(text)
                self.console.flush()
            else:
                self.deferred.append(text)
        return len(text)

    def hold(self) -> None:
        """Defer errors until :meth:`release`, without a time limit, because the job has failed."""
        with self.lock:
            self.held = True

    def _expire(self) -> None:
        with self.lock:
            if not self.held:
                self._release()

    def release(self, drop: bool = False) -> None:
        """Show or ``drop`` the deferred text, and show later output immediately again."""
        with self.lock:
            self._release(drop)

    def _release(self, drop: bool = False) -> None:
        if self.timer is not None:
            self.timer.cancel()
            self.timer = None
        if not drop:
            self.console.write("".join(self.deferred))
            self.console.flush()
        self.deferred.clear()
