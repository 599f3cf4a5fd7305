"""Log lines while regions are compiled, so that a long first step does not look like a hang."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torchtitan.tools.logging import logger

from torchtitan_npu.torch_internals.dynamo import compile_callbacks

INTERVAL = 5.0
"""Seconds between two lines."""


class CompileProgress:
    """Counts compiled regions and the seconds spent on them."""

    def __init__(self) -> None:
        self.regions = 0
        self.seconds = 0.0
        self._logged_at = time.monotonic()

    def region_compiled(self, seconds: float) -> None:
        self.regions += 1
        self.seconds += seconds
        if self.regions == 1 or time.monotonic() - self._logged_at >= INTERVAL:
            self._logged_at = time.monotonic()
            graphs = "1 graph" if self.regions == 1 else f"{self.regions} graphs"
            logger.info(f"Compiling: {graphs} so far, {self.seconds:.1f} s; identical blocks reuse graphs")


@contextmanager
def log_compile_progress() -> Iterator[None]:
    """Log the progress of everything that torch compiles in this context, with any backend.

    Inductor compiles a backward graph at its first run, outside of the call of the backend.
    """
    progress, started = CompileProgress(), 0.0

    def start(_: Any) -> None:
        nonlocal started
        started = time.perf_counter()

    def end(_: Any) -> None:
        progress.region_compiled(time.perf_counter() - started)

    with compile_callbacks(start, end):
        yield
