"""One writer per checkpoint folder: a lock file with the host, process and start time of the job's first rank."""

from __future__ import annotations

import json
import os
import socket
import threading
import time
import uuid
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from pathlib import Path

from torchtitan_npu.errors import UsageError

NAME = "lock"
HEARTBEAT_S = 10.0
"""The holder sets the file's modification time this often."""
STALE_S = 60.0
"""A lock of another machine is stale if its modification time does not change for this long."""
RETRY_S = 5.0
"""A lock that cannot be read is read again for this long before a save fails."""


@dataclass(frozen=True)
class Holder:
    """The process that holds a lock."""

    host: str
    pid: int
    started: str
    kernel: str
    """Identifies the boot of the machine, and the container's process numbers."""
    ticks: str
    """Start time of the process in the kernel's clock: a later process with the same number has another one."""
    token: str = field(default_factory=lambda: uuid.uuid4().hex)

    @classmethod
    def this_process(cls) -> Holder:
        now = datetime.now(UTC).isoformat(timespec="seconds")
        return cls(socket.gethostname(), os.getpid(), now, _kernel(), _start_ticks(os.getpid()))

    @property
    def is_local(self) -> bool:
        return self.kernel == _kernel()

    @property
    def is_alive(self) -> bool:
        """Return whether the process runs. Only for a local holder."""
        return _start_ticks(self.pid) == self.ticks

    def __str__(self) -> str:
        return f"process {self.pid} on {self.host}, since {self.started}"


class WriterLock:
    """The lock of a checkpoint folder. A process that is killed leaves it behind, and the next one recognizes that."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / NAME
        self.token = ""

    def acquire(self) -> str:
        """Take the lock, and return a line about a stale one that was removed, or an empty string.

        Raise :class:`UsageError` if another process holds it, or if it cannot be written. A lock of another machine is
        watched for a minute.
        """
        try:
            return self._acquire()
        except OSError as error:  # a write that fails does not name its file
            raise UsageError(f"{error.filename or self.path} cannot be written: {error.strerror}") from error

    def _acquire(self) -> str:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        holder, note = Holder.this_process(), ""
        while not self._create(holder):
            other = _read(self.path)
            if other is None:
                time.sleep(1.0)  # its holder may be writing it
                other = _read(self.path)
            if other is None and not self.path.exists():
                continue  # released
            if other and not self._is_stale(other):
                raise UsageError(
                    f"{self.path.parent} is in use by {other}: two jobs cannot write to one checkpoint folder. "
                    "End that process, or set another job.dump_folder or checkpoint.folder"
                )
            if self._remove(other, self.path.with_name(f"{NAME}.{holder.token}")):
                note = f"{self.path}: removed the lock of {other or 'an unknown process'}, which has ended"
        self.token = holder.token
        threading.Thread(target=self._keep_fresh, args=(self.token,), daemon=True).start()
        return note

    def check_held(self) -> None:
        """Raise if another job has taken the lock, which it does if this one was stopped for a minute."""
        deadline = time.monotonic() + RETRY_S
        while (other := _read(self.path)) is None and time.monotonic() < deadline:
            time.sleep(RETRY_S / 10)
        if other is None or other.token != self.token:
            raise UsageError(f"{self.path.parent} belongs to {other or 'nobody'} now; this job must not write to it")

    def release(self) -> None:
        other = _read(self.path)
        if other and other.token == self.token:
            self.path.unlink()
        self.token = ""

    def _create(self, holder: Holder) -> bool:
        try:
            descriptor = os.open(self.path, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o644)
        except FileExistsError:
            return False
        try:
            with os.fdopen(descriptor, "w") as file:
                json.dump(asdict(holder), file)
        except OSError:
            self.path.unlink()
            raise
        return True

    def _remove(self, stale: Holder | None, aside: Path) -> bool:
        """Remove the lock of ``stale``. Return False if another job has removed it or taken the folder meanwhile."""
        try:
            self.path.rename(aside)
        except FileNotFoundError:
            return False
        found = _read(aside)
        if (found and found.token) != (stale and stale.token):
            aside.rename(self.path)
            return False
        aside.unlink()
        return True

    def _keep_fresh(self, token: str) -> None:
        while self.token == token:
            time.sleep(HEARTBEAT_S)
            other = _read(self.path)
            if other and other.token != token:
                return
            if other:
                with suppress(OSError):  # the file system may fail once
                    os.utime(self.path)

    def _is_stale(self, other: Holder) -> bool:
        if other.is_local:
            return not other.is_alive
        before, deadline = _mtime(self.path), time.monotonic() + STALE_S
        while time.monotonic() < deadline:
            time.sleep(min(1.0, STALE_S / 4))
            if _mtime(self.path) != before:
                return False
        return True


def _read(path: Path) -> Holder | None:
    try:
        return Holder(**json.loads(path.read_text()))
    except (OSError, ValueError, TypeError):
        return None


def _mtime(path: Path) -> int:
    try:
        return path.stat().st_mtime_ns
    except FileNotFoundError:
        return 0


def _kernel() -> str:
    boot = Path("/proc/sys/kernel/random/boot_id")
    return f"{boot.read_text().strip() if boot.exists() else socket.gethostname()} {os.readlink('/proc/self/ns/pid')}"


def _start_ticks(pid: int) -> str:
    """Return the start time of a process, or an empty string if there is none."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return ""
    fields = text.rpartition(")")[2].split()  # the name of the program may hold spaces
    return "" if fields[0] == "Z" else fields[19]
