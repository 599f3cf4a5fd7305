"""Shows what rank 0 writes as it comes, but not its errors: the cause may be another rank, to be read first."""

from __future__ import annotations

import io
import re
import threading
from typing import TextIO

ERROR = re.compile(
    r"Traceback \(most recent call last\)"
    r"|\[E\d{4} "  # PyTorch's C++ log: time-outs of collectives
    r"|terminate called"
    r"|ERR\d{5}|EI\d{4}"  # torch_npu's and HCCL's error codes
)


class WithholdErrors(io.TextIOBase):
    """Passes lines on to ``console`` until one begins an error; that and what follows waits for :meth:`release`.

    A job may survive an error that it logs: after ``seconds`` without an end, what waited is shown, and the rest too.
    torchrun takes 30 to end ranks that do not end by themselves.
    """

    def __init__(self, console: TextIO, seconds: float = 60) -> None:
        self.console = console
        self.seconds = seconds
        self.withheld: list[str] = []
        self.timer: threading.Timer | None = None
        self.held = False
        self.lock = threading.Lock()

    def write(self, text: str) -> int:
        with self.lock:
            if self.timer is None and ERROR.search(text):
                self.timer = threading.Timer(self.seconds, self._give_up)
                self.timer.daemon = True
                self.timer.start()
            if self.timer is None:
                self.console.write(text)
                self.console.flush()
            else:
                self.withheld.append(text)
        return len(text)

    def hold(self) -> None:
        """The job has failed: an error is not shown before :meth:`release`, however long that takes."""
        with self.lock:
            self.held = True

    def _give_up(self) -> None:
        with self.lock:
            if not self.held:
                self._release()

    def release(self, drop: bool = False) -> None:
        """Show what waited, or ``drop`` it, and begin again."""
        with self.lock:
            self._release(drop)

    def _release(self, drop: bool = False) -> None:
        if self.timer is not None:
            self.timer.cancel()
            self.timer = None
        if not drop:
            self.console.write("".join(self.withheld))
            self.console.flush()
        self.withheld.clear()
