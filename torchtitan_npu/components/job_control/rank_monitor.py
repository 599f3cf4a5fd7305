"""Watch the ranks of a job: name the first one that fails or hangs, and end the others.

Each rank has a thread that writes a heartbeat to torchrun's store every second, with its step, its phase and how long
its main thread has not moved. It finds four faults:

- A rank on this host ended without saying why: its process descriptor becomes readable at once.
- A rank does not respond: its neighbour, the rank before it, sees no new heartbeat within the limit.
- No rank moves: rank 0 sees that every main thread has been in one call for longer than the limit.
- An exception: the rank itself records it. A failed collective is blamed on the rank that caused it.

The limit is the time-out of collectives and ``TRACE_S``. The first rank to record a failure in the store wins. All
ranks name that failure in their last line and end.
"""

from __future__ import annotations

import json
import os
import select
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from torch.distributed import DistError, Store
from torchtitan.config.job_config import Comm

from torchtitan_npu.components.job_control.failure import RankFailure, is_communication_error, write_error_file
from torchtitan_npu.components.job_control.progress import PHASES, Progress
from torchtitan_npu.components.job_control.stop_signals import StopSignals
from torchtitan_npu.errors import EXIT_FAILED, EXIT_STOPPED

INTERVAL_S = 1.0
"""Seconds between heartbeats."""
SETTLE_S = 3.0
"""Seconds until a failed collective is blamed on a rank without a heartbeat, and until later ranks end themselves."""
TRACE_S = 3.0
"""torch_npu's watchdog writes its trace within a second after a collective has timed out, and then ends nothing."""
SAME_SIGNAL_S = 2.0
"""A scheduler may signal a rank directly and through torchrun. Signals within this time count as one."""
SAVE_LIMIT_S = 1800.0
"""A file system may block one write for minutes, so ranks that save may stand still for this long."""
STACK_LINES = 12
"""Lines of the Python stack of a rank that stands still, from its innermost call."""


@dataclass
class Heartbeat:
    """The state that a rank publishes."""

    rank: int
    host: str
    pid: int
    number: int = 0
    step: int = 0
    phase: str = PHASES[0]
    still: float = 0.0
    """Seconds for which the main thread has been in one call."""
    stack: str = ""
    """The Python stack of the main thread, if it stands still."""
    done: bool = False

    @property
    def position(self) -> tuple[int, int]:
        return self.step, PHASES.index(self.phase)

    @property
    def where(self) -> str:
        return f"step {self.step} ({self.phase})" if self.step else f"phase {self.phase!r}"

    def failure(self, what: str, details: str = "", hangs: bool = False) -> RankFailure:
        return RankFailure(self.rank, self.host, self.pid, what, details, hangs)


@dataclass(frozen=True)
class Limits:
    """Seconds after which a rank counts as hanging, before and after the end of the first step."""

    start: float
    train: float

    @classmethod
    def of(cls, comm: Comm) -> Limits:
        return cls(comm.init_timeout_seconds + TRACE_S, comm.train_timeout_seconds + TRACE_S)


class RankMonitor:
    """Run the monitor thread of this rank. Create it, and call every method without underscore, in the main thread."""

    def __init__(self, store: Store, rank: int, world_size: int, local_ranks: Iterable[int], limits: Limits) -> None:
        self.progress = Progress()
        self.stop_reason = ""
        """The signal and the rank that received it, if a stop is requested."""
        self._store, self._rank, self._world_size, self._limits = store, rank, world_size, limits
        self._own = Heartbeat(rank, socket.gethostname(), os.getpid())
        self._neighbour = (rank + 1) % world_size
        self._seen = {"number": -1, "at": time.monotonic()}
        self._unopened = set(local_ranks) - {rank}
        self._processes: dict[int, int] = {}
        self._signals: StopSignals | None = None
        self._signalled_at: float | None = None
        self._main = threading.main_thread().ident
        self._place: tuple[object, ...] = ()
        self._moved_at = time.monotonic()
        self._holding = False
        self._reporting = threading.Event()
        self._closing = False
        self._wake_receiver, self._wake_sender = os.pipe()
        self._poller = select.poll()
        self._poller.register(self._wake_receiver, select.POLLIN)
        watched = range(world_size) if rank == 0 else {self._neighbour, *self._unopened}
        for key in ("failure", "stop", "last_step", *map(_beat_key, watched)):
            store.compare_set(key, "", "")  # create it: reading a missing key would wait
        self._thread = threading.Thread(target=self._run, name="rank monitor", daemon=True)
        self._thread.start()

    # The main thread

    def watch_signals(self) -> None:
        """Let SIGTERM and SIGINT request a stop after the current step, from now until :meth:`close`."""
        self._signals = StopSignals()
        self._poller.register(self._signals.fileno(), select.POLLIN)
        self._wake()

    def report(self, error: BaseException) -> None:
        """Record ``error``, which ends this rank. Print it, or the failure of another rank that caused it."""
        self._reporting.set()
        shown = traceback.format_exc()
        first = self._record(self._cause(error))
        if first.rank == self._rank:
            text = shown
            print(shown, file=sys.stderr, end="")
        else:
            text = f"{first.report}\n{shown}"
            last = (str(error).splitlines() or [""])[0]
            print(f"rank {self._rank}: {type(error).__name__}: {last}, after the first failure", file=sys.stderr)
        write_error_file(text, EXIT_FAILED, first, later=first.rank != self._rank)
        _print_last(first)

    def finish_stop(self, message: str) -> None:
        """Wait until all ranks have saved, ignore further signals, and leave ``message`` to torchrun."""
        self._store.add("stopped", 1)
        deadline = time.monotonic() + SAVE_LIMIT_S
        while self._store.add("stopped", 0) < self._world_size and time.monotonic() < deadline:
            time.sleep(0.05)
        if self._signals:
            self._signals.ignore()
        write_error_file(message, EXIT_STOPPED)

    def close(self) -> None:
        """Tell the other ranks that this one ends as it should, and end the thread."""
        self._closing = True
        self._wake()
        self._thread.join()
        if self._signals:
            self._signals.close()
        for descriptor in (self._wake_receiver, self._wake_sender, *self._processes.values()):
            os.close(descriptor)

    # The thread

    def _run(self) -> None:
        try:
            while not self._closing:
                self._beat()
                self._wait(0.05 if self._holding else INTERVAL_S)
            if not self._reporting.is_set():
                self._own.done = True
                self._publish()
        except DistError as error:  # the store is in the launcher of node 0
            if self._reporting.is_set() or self._closing:
                return
            text = str(error).partition("\n")[0]
            self._end(self._own.failure(f"lost the store of torchrun on node 0, whose launcher has ended: {text}"))

    def _beat(self) -> None:
        self._own.number += 1
        self._own.step, self._own.phase = self.progress.step, self.progress.phase
        self._measure_standstill()
        self._publish()
        keys = ["failure", "stop", "last_step", _beat_key(self._neighbour), *map(_beat_key, self._unopened)]
        failure, stop, last_step, neighbour, *unopened = self._store.multi_get(keys)
        if failure:
            self._end(RankFailure.from_json(failure), found_here=False)
        if stop and not self.stop_reason:
            self.stop_reason = stop.decode()
            self._hold()
        if last_step and self._holding:
            self._holding = False
            self.progress.run_until(int(last_step))
        for beat in filter(None, unopened):
            self._open(_heartbeat(beat))
        self._check_neighbour(_heartbeat(neighbour) if neighbour else None)
        if self._rank == 0 and self.progress.has_stepped and self._stands_still(self._own):
            self._check_standstill()

    def _publish(self) -> None:
        self._store.set(_beat_key(self._rank), json.dumps(asdict(self._own)))

    def _wait(self, seconds: float) -> None:
        """Wait for the next heartbeat, a signal, or the end of a rank on this host."""
        ready = {descriptor for descriptor, _ in self._poller.poll(seconds * 1000)}
        if self._wake_receiver in ready:
            os.read(self._wake_receiver, 64)
        ended = [rank for rank, descriptor in self._processes.items() if descriptor in ready]
        for rank in ended:
            self._poller.unregister(self._processes[rank])
            self._process_ended(rank)
        if self._signals and self._signals.fileno() in ready:
            self._handle(self._signals.received())

    def _wake(self) -> None:
        os.write(self._wake_sender, b"x")

    def _handle(self, signals: list[signal.Signals]) -> None:
        now = time.monotonic()
        for number in signals:
            if self._signalled_at is None:
                self._signalled_at = now
                reason = f"{number.name} to rank {self._rank} ({self._own.host}, pid {self._own.pid})"
                self._store.compare_set("stop", "", reason)
            elif now - self._signalled_at > SAME_SIGNAL_S:
                print(f"torchtitan_npu: ended at once by a second {number.name}", file=sys.stderr, flush=True)
                os._exit(128 + number)

    def _hold(self) -> None:
        """Take part in the agreement on the last step: the largest one that a rank has started."""
        self._holding = True
        self._store.set(f"started/{self._rank}", str(self.progress.hold()))
        if self._store.add("holding", 1) == self._world_size:
            started = self._store.multi_get([f"started/{rank}" for rank in range(self._world_size)])
            self._store.set("last_step", str(max(map(int, started))))

    def _measure_standstill(self) -> None:
        """Measure how long the main thread has been in one call."""
        frame = sys._current_frames().get(self._main or 0)
        place: list[object] = [self._own.step, self._own.phase]
        innermost = frame
        while frame is not None:
            place.append((id(frame), frame.f_lasti))
            frame = frame.f_back
        now = time.monotonic()
        if tuple(place) != self._place:
            self._place, self._moved_at = tuple(place), now
        self._own.still = now - self._moved_at
        still = self._own.still > min(SETTLE_S, self._limits.train / 2)
        stack = traceback.format_stack(innermost, STACK_LINES) if still and innermost is not None else []
        self._own.stack = "".join(stack)

    def _stands_still(self, beat: Heartbeat) -> bool:
        limit = max(self._limits.train, SAVE_LIMIT_S) if beat.phase == PHASES[-1] else self._limits.train
        return beat.still > limit - 2 * INTERVAL_S * (beat.rank != self._rank)

    def _check_standstill(self) -> None:
        beats = list(self._all_beats().values())
        if all(map(self._stands_still, beats)):
            self._end(_rank_behind(beats))

    def _check_neighbour(self, beat: Heartbeat | None) -> None:
        now = time.monotonic()
        number = beat.number if beat else 0
        if number != self._seen["number"] or self._neighbour == self._rank or (beat and beat.done):
            self._seen = {"number": number, "at": now}
            return
        silent = now - self._seen["at"]
        if silent > (self._limits.train if self.progress.has_stepped else self._limits.start):
            self._end(self._unresponsive(beat or Heartbeat(self._neighbour, "host not known", 0), silent))

    def _unresponsive(self, beat: Heartbeat, seconds: float) -> RankFailure:
        what = f"has not responded for {seconds:.0f} s, since {beat.where}"
        if beat.rank not in self._processes:
            return beat.failure(what, hangs=True)
        return beat.failure(what, STATES.get(_process_state(beat.pid), ""), hangs=True)

    def _open(self, beat: Heartbeat) -> None:
        """Watch the process of another rank on this host."""
        self._unopened.discard(beat.rank)
        try:
            self._processes[beat.rank] = os.pidfd_open(beat.pid)
        except ProcessLookupError:
            self._process_ended(beat.rank)
        except OSError:  # an old container runtime does not allow it: a missing heartbeat shows the end, later
            pass
        else:
            self._poller.register(self._processes[beat.rank], select.POLLIN)

    def _process_ended(self, rank: int) -> None:
        beat = _heartbeat(self._store.get(_beat_key(rank)))
        if not beat.done:
            what = f"ended without an error message, last seen in {beat.where}: it was killed, or it exited early"
            self._end(beat.failure(what, "torchrun reports its exit code, unless that is 0"))

    def _all_beats(self) -> dict[int, Heartbeat]:
        """Return the heartbeats of all ranks that have started and not ended."""
        texts = self._store.multi_get([_beat_key(rank) for rank in range(self._world_size)])
        beats = {rank: _heartbeat(text) for rank, text in enumerate(texts) if text}
        return {rank: beat for rank, beat in beats.items() if not beat.done}

    def _record(self, failure: RankFailure) -> RankFailure:
        """Record ``failure`` if it is the job's first, and return the first one."""
        try:
            return RankFailure.from_json(self._store.compare_set("failure", "", failure.to_json()))
        except DistError:  # the launcher of node 0 has ended
            return failure

    def _cause(self, error: BaseException) -> RankFailure:
        """Return the failure of this rank by ``error``, or of the rank that made its collective fail."""
        self._own.step, self._own.phase = self.progress.step, self.progress.phase
        text = f"{type(error).__name__}: {error}".partition("\n")[0]
        own = self._own.failure(f"failed in {self._own.where}: {text}")
        if self._world_size == 1 or not is_communication_error(error):
            return own
        try:
            before = self._all_beats()
            deadline = time.monotonic() + SETTLE_S
            while time.monotonic() < deadline:
                if failure := self._store.get("failure"):
                    return RankFailure.from_json(failure)
                time.sleep(0.1)
            now = self._all_beats()
        except DistError:
            return own
        others = [beat for rank, beat in now.items() if rank != self._rank]
        for beat in others:
            if beat.rank in before and beat.number == before[beat.rank].number:
                return self._unresponsive(beat, SETTLE_S)
        still = [beat for beat in others if beat.still > SETTLE_S]
        return _rank_behind(still) if still else own

    def _end(self, failure: RankFailure, found_here: bool = True) -> None:
        """Record ``failure``, if it is the first, and end this process, unless the main thread is about to."""
        first = self._record(failure)
        if first.hangs and first.rank in self._processes:
            _kill(self._processes[first.rank], first.pid)
        if first != failure or not found_here:
            self._await_end()
        if self._reporting.is_set():
            self._closing = True
            return
        write_error_file(first.report, EXIT_FAILED, first, later=True)
        _print_last(first)
        os._exit(EXIT_FAILED)

    def _await_end(self) -> None:
        """Give the rank that recorded the failure time to print it, until torchrun signals this one."""
        poller = select.poll()
        if self._signals:
            poller.register(self._signals.fileno(), select.POLLIN)
        poller.poll(SETTLE_S * 1000)


STATES = {
    "T": "the process is stopped (SIGSTOP); a stopped process cannot show its stack",
    "t": "the process is stopped by a debugger",
    "D": "the process waits in the kernel for a device or a file system; it cannot show its stack",
}
"""Hints by the state of a process in /proc."""


def _process_state(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return ""


def _kill(descriptor: int, pid: int) -> None:
    """Kill a process that hangs. If it can still run, SIGABRT lets it show its stack first (faulthandler)."""
    try:
        if _process_state(pid) not in STATES:
            signal.pidfd_send_signal(descriptor, signal.SIGABRT)
            poller = select.poll()
            poller.register(descriptor, select.POLLIN)
            if poller.poll(2000):
                return
        signal.pidfd_send_signal(descriptor, signal.SIGKILL)
    except ProcessLookupError:
        pass  # another rank has killed it


def _rank_behind(beats: list[Heartbeat]) -> RankFailure:
    """Return the failure of the rank that the others wait for.

    It is the one in the earliest phase. Of several, it is the only one whose innermost call is not in torch.
    """
    first = min(beat.position for beat in beats)
    behind = [beat for beat in beats if beat.position == first]
    outside = [beat for beat in behind if not _innermost_file(beat.stack).startswith(TORCH)]
    chosen = outside[0] if len(outside) == 1 else behind[0]
    others = [str(beat.rank) for beat in behind if beat is not chosen]
    what = f"hangs: no progress for {chosen.still:.0f} s in {chosen.where}"
    if others and len(outside) != 1:
        what += f", like rank {', '.join(others[:8])}; none is behind the others"
    return chosen.failure(what, chosen.stack.rstrip(), hangs=True)


TORCH = str(Path(torch.__file__).parent)


def _innermost_file(stack: str) -> str:
    files = [line for line in stack.splitlines() if line.startswith('  File "')]
    return files[-1].split('"')[1] if files else ""


def _beat_key(rank: int) -> str:
    return f"beat/{rank}"


def _heartbeat(text: bytes) -> Heartbeat:
    return Heartbeat(**json.loads(text))


def _print_last(failure: RankFailure) -> None:
    details = [f"  {line}" for line in failure.details.splitlines()]
    print(*details, f"torchtitan_npu: first failure: {failure}", sep="\n", file=sys.stderr)
    sys.stdout.flush()
    sys.stderr.flush()
