"""The step and phase of this rank, and the last step that all ranks agree to run."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

PHASES = ("starting", "loading data", "training", "saving or validating")
"""Phases of a rank. The last three repeat in each step, in this order."""

CHECK_S = 1.0
"""Seconds between two checks of the monitor while the main thread waits for it."""


class Progress:
    """Record where this rank is, and let it stop after the same step as the others.

    The main thread asks :meth:`may_start` before each step. To stop, a monitor thread on each rank calls :meth:`hold`,
    which returns the last step that its main thread has started. The largest of these over all ranks is the last step
    of the job, :meth:`run_until`. A rank that has not started that step runs it, so no rank waits for another one in a
    collective. A step without a stop request costs one lock and no communication.

    ``check_monitor`` raises if the monitor thread has ended: the main thread must not wait for it.
    """

    def __init__(self, check_monitor: Callable[[], None] = lambda: None) -> None:
        self.step = 0
        """The last step that the main thread has started."""
        self.phase = PHASES[0]
        self.has_stepped = False
        self._check_monitor = check_monitor
        self._changed = threading.Condition()
        self._held = False
        self._last: int | None = None

    @contextmanager
    def during(self, phase: str) -> Iterator[None]:
        before, self.phase = self.phase, phase
        yield
        self.phase = before

    def may_start(self, step: int) -> bool:
        """Return whether to run ``step``. If a stop is requested, wait until the ranks agree on their last step."""
        self._check_monitor()
        with self._changed:
            while self._held and self._last is None:
                self._changed.wait(CHECK_S)
                self._check_monitor()
            if self._last is not None and step > self._last:
                return False
            self.step = step
            return True

    def hold(self) -> int:
        """Let no further step start before :meth:`run_until`, and return the last one that has started."""
        with self._changed:
            self._held = True
            return self.step

    def run_until(self, last: int) -> None:
        with self._changed:
            self._last = last
            self._changed.notify_all()
