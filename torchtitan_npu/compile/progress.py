"""A sign of life while regions are compiled, so that a long first step is not taken for one that hangs."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch._dynamo.callback import callback_handler
from torchtitan.tools.logging import logger

PAUSE = 5.0
"""Seconds between two lines."""


class Progress:
    """Counts regions, and the seconds that went into them."""

    def __init__(self) -> None:
        self.regions = 0
        self.seconds = 0.0
        self._said = time.monotonic()

    def region_compiled(self, seconds: float) -> None:
        self.regions += 1
        self.seconds += seconds
        if self.regions == 1 or time.monotonic() - self._said >= PAUSE:
            self._said = time.monotonic()
            what = "1 graph" if self.regions == 1 else f"{self.regions} graphs"
            logger.info(f"Compiling: {what} so far, {self.seconds:.1f} s; blocks that are alike share theirs")


@contextmanager
def told_by_torch() -> Iterator[None]:
    """Say so of all that torch compiles meanwhile, with whatever backend.

    Inductor compiles a backward graph when it is first run, so that it is not part of what a backend is called for.
    """
    progress, started = Progress(), 0.0

    def start(_: Any) -> None:
        nonlocal started
        started = time.perf_counter()

    def end(_: Any) -> None:
        progress.region_compiled(time.perf_counter() - started)

    callback_handler.register_start_callback(start)
    callback_handler.register_end_callback(end)
    try:
        yield
    finally:
        callback_handler.remove_start_callback(start)
        callback_handler.remove_end_callback(end)
