"""Show the output of rank 0 immediately, but defer its errors: another rank may have failed first."""

from __future__ import annotations

import io
import re
import threading
from typing import TextIO

from torchtitan_npu.errors import ERROR_PREFIX

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
