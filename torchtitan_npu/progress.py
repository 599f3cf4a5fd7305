"""The progress of work that takes longer than some seconds, on standard error."""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from itertools import islice
from types import TracebackType
from typing import TextIO, TypeVar

from rich.console import Console
from rich.live import Live
from rich.spinner import Spinner
from rich.text import Text

T = TypeVar("T")

LINE_INTERVAL_S = 10.0
"""Seconds between two lines of a log."""


class Progress:
    """Show what is done, and for how long, until the ``with`` block ends.

    On a terminal it is one line with a spinner, which the end removes. Elsewhere, such as in a log file, it is a line
    every ten seconds. Only rank 0 shows it. The block may print in :meth:`hidden` only: its output would be mixed with
    the line.

    Args:
        text: what is done, as ``plan: checking the job``. :meth:`update` replaces it, from any thread
        stream: standard error by default
        interval_s: seconds between two lines of a log
    """

    def __init__(self, text: str, stream: TextIO | None = None, interval_s: float | None = None) -> None:
        self.text = text
        self.fraction = 0.0
        self.stream = stream or sys.stderr
        self.interval_s = interval_s or LINE_INTERVAL_S
        self.start = time.monotonic()
        self._shown = os.environ.get("RANK", "0") == "0"
        self._live: Live | None = None
        self._spinner = Spinner("dots")
        self._writing = threading.Lock()
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._write_lines, name="progress", daemon=True)

    def update(self, text: str, fraction: float = 0.0) -> None:
        """Replace the text. With the ``fraction`` of the work that is done, the time left is shown."""
        self.text, self.fraction = text, fraction

    def line(self) -> str:
        """Return the text with the elapsed seconds, and those left."""
        seconds = time.monotonic() - self.start
        left = f", about {seconds / self.fraction - seconds:.0f} s left" if 0 < self.fraction < 1 else ""
        return f"{self.text} ({seconds:.0f} s{left})"

    @contextmanager
    def hidden(self) -> Iterator[None]:
        """Remove the line while the caller prints. The clock runs on."""
        with self._writing:
            if self._live:
                self._live.stop()
            try:
                yield
            finally:
                if self._live:
                    self._show_live()

    def __enter__(self) -> Progress:
        if self._shown and self.stream.isatty():
            self._show_live()
        elif self._shown:
            self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._ended.set()
        if self._live:
            self._live.stop()
        if self._thread.is_alive():
            self._thread.join()

    def _show_live(self) -> None:
        """Start a new display: rich would erase what was printed since an old one stopped."""
        self._live = Live(
            console=Console(file=self.stream),
            get_renderable=self._render,
            refresh_per_second=10,
            transient=True,  # removed at the end
            redirect_stdout=False,  # the block's output may be of child processes
            redirect_stderr=False,
        )
        self._live.start()

    def _render(self) -> Text:
        frame = self._spinner.render(time.monotonic())
        return Text.assemble(frame, f" {self.line()}", no_wrap=True, overflow="ellipsis")  # type: ignore[arg-type]

    def _write_lines(self) -> None:
        while not self._ended.wait(self.interval_s):
            with self._writing:
                self.stream.write(self.line() + "\n")
                self.stream.flush()


def waiting_for(items: Iterable[T], text: str, total: int) -> Iterator[T]:
    """Yield the ``items``, at most ``total``. Show ``text`` and their number while the next one is awaited."""
    with Progress(f"{text}, 0 of {total} done") as progress:
        for number, item in enumerate(islice(items, total), 1):
            with progress.hidden():
                yield item
            progress.update(f"{text}, {number} of {total} done")
