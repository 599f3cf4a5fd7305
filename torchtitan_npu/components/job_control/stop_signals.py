"""Receive SIGTERM and SIGINT in a thread, also while the main thread waits in a collective."""

from __future__ import annotations

import os
import signal
import socket
from types import FrameType
from typing import Any

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

        torchrun signals the process group of a rank. The child leaves that group and does not write to our socket.
        """
        if self._handlers:
            signal.set_wakeup_fd(-1)
            for number in STOP_SIGNALS:
                signal.signal(number, signal.SIG_DFL)
            os.setpgid(0, 0)


def _do_nothing(number: int, frame: FrameType | None) -> None:
    """Replace the default action. The C part of the handler has written to the socket."""
