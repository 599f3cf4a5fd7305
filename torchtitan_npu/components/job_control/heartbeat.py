"""Messages between ranks: progress, heartbeats, and the first failure of the job."""

from __future__ import annotations

import json
import os
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import Self

from torch.distributed import DistError


class JsonMessage:
    """A dataclass that ranks send to each other."""

    def to_json(self) -> str:
        return json.dumps(asdict(self))  # type: ignore[call-overload]

    @classmethod
    def from_json(cls, text: str | bytes) -> Self:
        return cls(**json.loads(text))


@dataclass(frozen=True)
class RankFailure(JsonMessage):
    """The rank that failed first, and how."""

    rank: int
    host: str
    pid: int
    what: str
    """A verb phrase, such as ``failed in step 7: ValueError: ...``."""
    details: str = ""
    """The Python stack of a rank that hangs, or a hint."""
    hangs: bool = False
    """The process still exists and has to be killed."""

    def __str__(self) -> str:
        return f"rank {self.rank} ({self.host}, pid {self.pid}) {self.what}"

    @property
    def report(self) -> str:
        """The failure with its details, for several lines."""
        return "\n".join([str(self), *(f"  {line}" for line in self.details.splitlines())])


def is_communication_error(error: BaseException) -> bool:
    """Return whether ``error`` may be the consequence of another rank's failure: a collective that failed.

    gloo and HCCL raise plain ``RuntimeError``. Its text has the file in gloo, or the name of HCCL.
    """
    text = str(error).lower()
    return isinstance(error, DistError) or (
        isinstance(error, RuntimeError) and any(name in text for name in ("gloo", "hccl", "nccl", "connection closed"))
    )


def write_error_file(text: str, exit_code: int, cause: RankFailure | None = None, later: bool = False) -> None:
    """Write ``text`` to the file from which torchrun and the launcher report this rank.

    torchrun calls the rank with the smallest time the root cause, in seconds. ``later``: another rank is the cause.
    """
    path = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if not path:
        return
    extra = {"py_callstack": text, "timestamp": str(int(time.time()) + later)}
    message = {"message": text.partition("\n")[0], "extraInfo": extra, "errorCode": exit_code}
    if cause:
        message["cause"] = asdict(cause)
    part = f"{path}.part"
    with open(part, "w") as file:
        json.dump({"message": message}, file)
    os.replace(part, path)


PHASES = ("starting", "loading data", "training", "saving or validating")
"""Phases of a rank. The last three repeat in each step, in this order."""

CHECK_S = 1.0
"""Seconds between two checks of the monitor while the main thread waits for it."""


class StepProgress:
    """The step and phase of this rank. It lets all ranks stop after the same step.

    The main thread asks :meth:`may_start` before each step. To stop, a monitor thread on each rank calls :meth:`hold`,
    which returns the last step that its main thread has started. The largest of these over all ranks is the last step
    of the job, :meth:`run_until`. A rank that has not started that step runs it, so no rank waits for another one in a
    collective. ``check_monitor`` raises if the monitor thread has ended: the main thread must not wait for it.
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


STACK_LINES = 12
"""Lines of the Python stack of a stalled rank, from its innermost call."""
LIBRARIES = ("torch", "torch_npu", "torchtitan", "torchtitan_npu")
"""Packages in which a rank waits for a collective, or for the device that runs one."""


@dataclass
class Heartbeat(JsonMessage):
    """The state that a rank publishes."""

    rank: int
    host: str
    pid: int
    number: int = 0
    step: int = 0
    phase: str = PHASES[0]
    stalled_s: float = 0.0
    """Seconds for which the main thread has been in one call."""
    stack: str = ""
    """The Python stack of the main thread, if it is stalled."""
    in_library: bool = False
    """The innermost call is in one of ``LIBRARIES``, so it may wait in a collective."""
    done: bool = False

    @property
    def position(self) -> tuple[int, int]:
        return self.step, PHASES.index(self.phase)

    @property
    def where(self) -> str:
        return f"step {self.step} ({self.phase})" if self.step else f"phase {self.phase!r}"

    def failure(self, what: str, details: str = "", hangs: bool = False) -> RankFailure:
        return RankFailure(self.rank, self.host, self.pid, what, details, hangs)


class StallTimer:
    """Measure how long the main thread has been in one call."""

    def __init__(self, show_stack_after_s: float) -> None:
        self._show_stack_after_s = show_stack_after_s
        self._main_thread = threading.main_thread().ident or 0
        self._last_position: list[object] = []
        self._last_moved_at = time.monotonic()

    def update(self, beat: Heartbeat) -> None:
        """Set the seconds and the stack in ``beat``, whose step and phase are those of now."""
        innermost = frame = sys._current_frames().get(self._main_thread)
        position: list[object] = [beat.position]
        while frame is not None:
            position.append((id(frame), frame.f_lasti))
            frame = frame.f_back
        now = time.monotonic()
        if position != self._last_position:
            self._last_position, self._last_moved_at = position, now
        beat.stalled_s, beat.stack, beat.in_library = now - self._last_moved_at, "", False
        if innermost is not None and beat.stalled_s > self._show_stack_after_s:
            beat.stack = "".join(traceback.format_stack(innermost, STACK_LINES)).rstrip()
            beat.in_library = innermost.f_code.co_filename.startswith(_library_folders())


def ranks_behind(beats: list[Heartbeat]) -> list[Heartbeat]:
    """Return the ranks that other ranks wait for; an empty list if no rank is known to wait.

    They are in the earliest phase. Of several, they are those outside ``LIBRARIES``, unless all or none are.
    """
    first = min(beat.position for beat in beats)
    earliest = [beat for beat in beats if beat.position == first]
    outside = [beat for beat in earliest if not beat.in_library]
    if 0 < len(outside) < len(earliest):
        return outside
    return earliest if len(earliest) < len(beats) else []


def stall_failure(beats: list[Heartbeat]) -> RankFailure:
    """Return the failure of the rank that other ranks wait for, or of the first one if none is behind."""
    behind = ranks_behind(beats)
    chosen, *also = behind or beats
    what = f"hangs: no progress for {chosen.stalled_s:.0f} s in {chosen.where}"
    if also:
        what += f", like rank {', '.join(str(beat.rank) for beat in also[:8])}"
        what += "" if behind else "; none is behind the others"
    return chosen.failure(what, chosen.stack, hangs=True)


def _library_folders() -> tuple[str, ...]:
    files = [getattr(sys.modules.get(name), "__file__", None) for name in LIBRARIES]
    return tuple(os.path.dirname(file) + os.sep for file in files if file)
