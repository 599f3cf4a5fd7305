"""The process of another rank on this host: notice its end, and kill it if it hangs."""

from __future__ import annotations

import os
import select
import signal
import time
from contextlib import suppress
from pathlib import Path

STOPPED_STATES = {
    "T": "the process is stopped (SIGSTOP); its log ends with its stack",
    "t": "the process is stopped by a debugger",
    "D": "the process waits in the kernel for a device or a file system; until it returns, it cannot show its stack",
}
"""Hints by the state of a process in /proc."""
STACK_S = 4.0
"""Seconds for which a process may write its stack after SIGABRT."""


class RankProcess:
    """A process that this one has not started. Its descriptor, if there is one, becomes readable when it ends.

    Old kernels, some containers and some builds of Python have no process descriptors. The process is then polled.
    """

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.descriptor: int | None = None
        with suppress(OSError, AttributeError):
            self.descriptor = os.pidfd_open(pid)

    def has_ended(self) -> bool:
        if self.descriptor is not None:
            poller = select.poll()
            poller.register(self.descriptor, select.POLLIN)
            return bool(poller.poll(0))
        try:
            os.kill(self.pid, 0)
        except ProcessLookupError:
            return True
        except OSError:  # it exists, and this process must not signal it
            return False
        return self.state() in ("Z", "X")

    def state(self) -> str:
        """Return the letter of the state in /proc, or an empty string if it cannot be read."""
        try:
            return Path(f"/proc/{self.pid}/stat").read_text().rpartition(")")[2].split()[0]
        except OSError:
            return ""

    def kill(self, shows_stack: bool = True) -> None:
        """Kill a process that hangs. SIGABRT lets it show its stack first (faulthandler).

        Its state is no reason to skip that: a process that reads a page from a disk is in state D for an instant.
        ``shows_stack`` is false if another process has sent SIGABRT: a second one would end it at once.
        """
        if shows_stack:
            self._send(signal.SIGABRT)
            self._send(signal.SIGCONT)  # if it is stopped: its main thread takes the SIGABRT before anything else
        deadline = time.monotonic() + STACK_S
        while time.monotonic() < deadline:
            if self.has_ended():
                return
            time.sleep(0.05)
        self._send(signal.SIGKILL)

    def close(self) -> None:
        if self.descriptor is not None:
            os.close(self.descriptor)

    def _send(self, number: signal.Signals) -> None:
        if not self.has_ended():
            with suppress(OSError):  # it has just ended, or the container does not allow it: torchrun will end it
                os.kill(self.pid, number)
