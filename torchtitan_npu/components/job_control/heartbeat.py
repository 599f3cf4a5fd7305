"""The state that each rank publishes every second, and the rank that the others wait for."""

from __future__ import annotations

import json
import os
import sys
import threading
import time
import traceback
from dataclasses import asdict, dataclass

from torchtitan_npu.components.job_control.failure import RankFailure
from torchtitan_npu.components.job_control.progress import PHASES

STACK_LINES = 12
"""Lines of the Python stack of a stalled rank, from its innermost call."""
LIBRARIES = ("torch", "torch_npu", "torchtitan", "torchtitan_npu")
"""Packages in which a rank waits for a collective, or for the device that runs one."""


@dataclass
class Heartbeat:
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

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str | bytes) -> Heartbeat:
        return cls(**json.loads(text))


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
    """Return the ranks that the others wait for; an empty list if no rank is known to wait.

    They are in the earliest phase. Of several, they are those outside ``LIBRARIES``, unless all or none are.
    """
    first = min(beat.position for beat in beats)
    earliest = [beat for beat in beats if beat.position == first]
    outside = [beat for beat in earliest if not beat.in_library]
    if 0 < len(outside) < len(earliest):
        return outside
    return earliest if len(earliest) < len(beats) else []


def stall_failure(beats: list[Heartbeat]) -> RankFailure:
    """Return the failure of the rank that the others wait for, or of the first one if none is behind."""
    behind = ranks_behind(beats)
    chosen, *others = behind or beats
    what = f"hangs: no progress for {chosen.stalled_s:.0f} s in {chosen.where}"
    if others:
        what += f", like rank {', '.join(str(beat.rank) for beat in others[:8])}"
        what += "" if behind else "; none is behind the others"
    return chosen.failure(what, chosen.stack, hangs=True)


def _library_folders() -> tuple[str, ...]:
    files = [getattr(sys.modules.get(name), "__file__", None) for name in LIBRARIES]
    return tuple(os.path.dirname(file) + os.sep for file in files if file)
