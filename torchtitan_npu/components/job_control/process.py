"""Processes and signals of a job: other ranks on this host, the parent, and requests to stop."""

from __future__ import annotations

import ctypes
import os
import select
import signal
import socket
import sys
import time
from contextlib import suppress
from pathlib import Path
from types import FrameType
from typing import Any

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


PR_SET_PDEATHSIG = 1


def end_with_torchrun() -> None:
    """Let Linux kill this process when its parent process ends, in whatever way, if that is torchrun.

    Ranks without a launcher would hold their devices and write into the checkpoints of the next launch. A process that
    a shell has started may outlive it (``nohup``). Linux sends the signal when the parent's thread that created this
    process ends: torchrun starts its ranks in its main thread.
    """
    if sys.platform != "linux" or "TORCHELASTIC_RUN_ID" not in os.environ:
        return
    parent = os.getppid()
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG)")
    if os.getppid() != parent:  # it ended before the call
        os.kill(os.getpid(), signal.SIGKILL)


STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT)


class StopSignals:
    """Collect stop signals in a socket, which a thread can poll.

    Python runs signal handlers in the main thread between two bytecodes, so not while it waits in C++. The C handler
    writes the signal's number to the socket at once. Create and close the object in the main thread.
    """

    def __init__(self) -> None:
        self._receiver, self._sender = socket.socketpair()
        for end in (self._receiver, self._sender):
            end.setblocking(False)
        self._pid = os.getpid()
        self._wakeup = signal.set_wakeup_fd(self._sender.fileno(), warn_on_full_buffer=False)
        self._handlers: dict[int, Any] = {number: signal.signal(number, _do_nothing) for number in STOP_SIGNALS}
        os.register_at_fork(after_in_child=self._reset_in_child)

    def fileno(self) -> int:
        return self._receiver.fileno()

    def received(self) -> list[signal.Signals]:
        """Return the stop signals since the last call."""
        try:
            numbers = self._receiver.recv(4096)
        except BlockingIOError:
            return []
        return [signal.Signals(number) for number in numbers if number in STOP_SIGNALS]

    def ignore(self) -> None:
        """Ignore signals from now on: this process is about to end by itself."""
        for number in STOP_SIGNALS:
            signal.signal(number, signal.SIG_IGN)

    def close(self) -> None:
        """Restore the handlers, unless signals are ignored until the process ends."""
        signal.set_wakeup_fd(self._wakeup)
        for number, handler in self._handlers.items():
            if signal.getsignal(number) is _do_nothing:
                signal.signal(number, handler)
        self._handlers = {}
        self._receiver.close()
        self._sender.close()

    def _reset_in_child(self) -> None:
        """Let a forked data loader worker survive a stop signal of its rank.

        torchrun signals the process group of a rank. The child leaves that group and does not write to this socket.
        """
        if self._handlers:
            signal.set_wakeup_fd(-1)
            for number in STOP_SIGNALS:
                signal.signal(number, signal.SIG_DFL)
            os.setpgid(0, 0)


def _do_nothing(number: int, frame: FrameType | None) -> None:
    """Replace the default action. The C part of the handler has written to the socket."""
