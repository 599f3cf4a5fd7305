"""Watch the ranks of a job: name the first one that fails or hangs, and end the remaining ones.

Each rank has a thread that writes a heartbeat to torchrun's store every second, with its step, its phase and how long
its main thread has been in one call. It finds four faults:

- A rank on this host ended without saying why: its process descriptor becomes readable at once.
- A rank does not respond: its neighbour, the rank before it, sees no new heartbeat within the limit.
- No rank makes progress: rank 0 sees that every main thread has been in one call for longer than the limit.
- An exception: the rank itself records it. A failed collective is blamed on the rank that caused it.

The limit is the time-out of collectives and ``TRACE_S``. If no rank is behind the others, all may run the same long
call, and the limit is ``LONG_CALL_S``. The first rank to record a failure in the store wins. All ranks name that
failure in their last line and end.
"""

from __future__ import annotations

import logging
import os
import select
import socket
import sys
import threading
import time
import traceback
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta

from torch.distributed import DistError, HashStore, PrefixStore, Store, TCPStore
from torchtitan.config.job_config import Comm

from torchtitan_npu.components.job_control.heartbeat import (
    PHASES,
    Heartbeat,
    RankFailure,
    StallTimer,
    StepProgress,
    is_communication_error,
    ranks_behind,
    stall_failure,
    write_error_file,
)
from torchtitan_npu.components.job_control.process import STOPPED_STATES, RankProcess, StopSignals
from torchtitan_npu.errors import ERROR_PREFIX, EXIT_FAILED, EXIT_USAGE, UsageError
from torchtitan_npu.log import log_on_first_rank

INTERVAL_S = 1.0
"""Seconds between heartbeats."""
SETTLE_S = 3.0
"""Seconds until a failed collective is blamed on a rank without a heartbeat, and until later ranks end themselves."""
TRACE_S = 3.0
"""torch_npu's watchdog writes its trace within a second after a collective has timed out, and then ends nothing."""
SAME_SIGNAL_S = 2.0
"""A scheduler may signal a rank directly and through torchrun. Signals within this time count as one."""
LONG_CALL_S = 1800.0
"""A file system may block one write for minutes, and all ranks may compile operators in one call for as long."""


@dataclass(frozen=True)
class Limits:
    """Seconds after which a rank counts as hanging, before and after the end of the first step."""

    start: float
    train: float

    def of_call(self, phase: str, others_wait: bool) -> float:
        """Return the limit of one call after the first step, on a rank in ``phase``."""
        return self.train if others_wait and phase != PHASES[-1] else max(self.train, LONG_CALL_S)


class RankMonitor:
    """Run the monitor thread of this rank. Create it, and call every method without underscore, in the main thread."""

    def __init__(self, store: Store, rank: int, world_size: int, local_ranks: Iterable[int], limits: Limits) -> None:
        self.progress = StepProgress(self._check_thread)
        self.stop_reason = ""
        """The signal and the rank that received it, if a stop is requested."""
        self._store, self._rank, self._world_size, self._limits = store, rank, world_size, limits
        self._beat_now = Heartbeat(rank, socket.gethostname(), os.getpid())
        self._neighbour = (rank + 1) % world_size
        self._neighbour_number = -1
        self._neighbour_seen_at = time.monotonic()
        self._unwatched_ranks = set(local_ranks) - {rank}
        self._processes: dict[int, RankProcess] = {}
        self._signals: StopSignals | None = None
        self._signalled_at: float | None = None
        self._stall_timer = StallTimer(min(SETTLE_S, limits.train / 2))
        self._holding = False
        self._reporting = threading.Event()
        self._closing = False
        self._wake_receiver, self._wake_sender = os.pipe()
        self._poller = select.poll()
        self._poller.register(self._wake_receiver, select.POLLIN)
        watched = range(world_size) if rank == 0 else {self._neighbour, *self._unwatched_ranks}
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
        is_usage = isinstance(error, UsageError)  # its message says what to change: no stack
        shown = f"{ERROR_PREFIX}rank {self._rank}: {error}\n" if is_usage else traceback.format_exc()
        first = self._record(self._cause(error))
        self._kill_if_hanging(first)
        if first.rank == self._rank:
            text = shown
            print(shown, file=sys.stderr, end="")
        else:
            text = f"{first.report}\n{shown}"
            last = (str(error).splitlines() or [""])[0]
            print(f"rank {self._rank}: {type(error).__name__}: {last}, after the first failure", file=sys.stderr)
        code = EXIT_USAGE if is_usage else EXIT_FAILED
        write_error_file(text, code, first, later=first.rank != self._rank)
        _print_last(first)

    def finish_stop(self, message: str, exit_code: int) -> None:
        """Wait until all ranks have saved, ignore further signals, and leave ``message`` to torchrun."""
        self._store.add("stopped", 1)
        deadline = time.monotonic() + LONG_CALL_S
        while self._store.add("stopped", 0) < self._world_size and time.monotonic() < deadline:
            time.sleep(0.05)
        if self._signals:
            self._signals.ignore()
        write_error_file(message, exit_code)

    def finish(self) -> None:
        """Wait until all ranks have trained their last step. Until then, other ranks find one that hangs or ends."""
        self._store.add("finished", 1)
        while self._store.add("finished", 0) < self._world_size:
            self._check_thread()
            time.sleep(0.05)

    def _check_thread(self) -> None:
        if not self._thread.is_alive():
            raise RuntimeError("the monitor thread of this rank has ended by the error above")

    def close(self) -> None:
        """Tell the other ranks that this one ends as it should, and end the thread."""
        self._closing = True
        self._wake()
        self._thread.join()
        if self._signals:
            self._signals.close()
        for process in self._processes.values():
            process.close()
        for descriptor in (self._wake_receiver, self._wake_sender):
            os.close(descriptor)

    # The thread

    def _run(self) -> None:
        try:
            while not self._closing:
                self._beat()
                self._wait(0.05 if self._holding else INTERVAL_S)
            if not self._reporting.is_set():
                self._beat_now.done = True
                self._publish()
        except DistError as error:  # the store is in the launcher of node 0
            if self._reporting.is_set() or self._closing:
                return
            text = str(error).partition("\n")[0]
            self._end(self._beat_now.failure(f"lost the store of torchrun on node 0, whose launcher has ended: {text}"))

    def _beat(self) -> None:
        self._beat_now.number += 1
        self._beat_now.step, self._beat_now.phase = self.progress.step, self.progress.phase
        self._stall_timer.update(self._beat_now)
        self._publish()
        keys = ["failure", "stop", "last_step", _beat_key(self._neighbour), *map(_beat_key, self._unwatched_ranks)]
        failure, stop, last_step, neighbour, *unwatched = self._store.multi_get(keys)
        if failure:
            self._end(RankFailure.from_json(failure), found_here=False)
        if stop and not self.stop_reason:
            self.stop_reason = stop.decode()
            self._agree_on_last_step()
        if last_step and self._holding:
            self._holding = False
            self.progress.run_until(int(last_step))
        for beat in map(Heartbeat.from_json, filter(None, unwatched)):  # of other ranks on this host
            self._unwatched_ranks.discard(beat.rank)
            process = self._processes[beat.rank] = RankProcess(beat.pid)
            if process.descriptor is not None:
                self._poller.register(process.descriptor, select.POLLIN)
        if self._world_size > 1:
            self._check_neighbour(Heartbeat.from_json(neighbour) if neighbour else None)
            self._check_stall()

    def _publish(self) -> None:
        self._store.set(_beat_key(self._rank), self._beat_now.to_json())

    def _wake(self) -> None:
        os.write(self._wake_sender, b"x")

    def _wait(self, seconds: float) -> None:
        """Wait for the next heartbeat, a signal, or the end of a rank on this host."""
        ready = {descriptor for descriptor, _ in self._poller.poll(seconds * 1000)}
        if self._wake_receiver in ready:
            os.read(self._wake_receiver, 64)
        for rank in [rank for rank, process in self._processes.items() if process.has_ended()]:
            process = self._processes.pop(rank)
            if process.descriptor is not None:
                self._poller.unregister(process.descriptor)
            process.close()
            beat = Heartbeat.from_json(self._store.get(_beat_key(rank)))
            if not beat.done:
                what = f"ended without an error message, last seen in {beat.where}: it was killed, or it exited early"
                self._end(beat.failure(what, "torchrun reports its exit code, unless that is 0"))
        now = time.monotonic()
        for number in self._signals.received() if self._signals and self._signals.fileno() in ready else []:
            if self._signalled_at is None:
                self._signalled_at = now
                reason = f"{number.name} to rank {self._rank} ({self._beat_now.host}, pid {self._beat_now.pid})"
                self._store.compare_set("stop", "", reason)
            elif now - self._signalled_at > SAME_SIGNAL_S:
                print(f"torchtitan_npu: ended at once by a second {number.name}", file=sys.stderr, flush=True)
                os._exit(128 + number)

    def _agree_on_last_step(self) -> None:
        """Publish the last step that this rank has started. The last rank to do so publishes the largest of all."""
        self._holding = True
        self._store.set(f"started/{self._rank}", str(self.progress.hold()))
        if self._store.add("holding", 1) == self._world_size:
            started = self._store.multi_get([f"started/{rank}" for rank in range(self._world_size)])
            self._store.set("last_step", str(max(map(int, started))))

    def _check_stall(self) -> None:
        """End the job if no rank makes progress. One that waits for another gives it the time of a collective."""
        if self._rank != 0 or not self.progress.has_stepped or self._beat_now.stalled_s <= self._limits.train:
            return
        beats = list(self._all_beats().values())
        behind = ranks_behind(beats)
        # The ranks ahead wait, also if they are about to save: the phase of those behind decides
        limit = self._limits.of_call((behind or beats)[0].phase, others_wait=bool(behind))
        delay = 2 * INTERVAL_S  # the age of a heartbeat
        if all(beat.stalled_s > limit - delay for beat in beats):
            self._end(stall_failure(beats))

    def _check_neighbour(self, beat: Heartbeat | None) -> None:
        now = time.monotonic()
        number = beat.number if beat else 0
        if number != self._neighbour_number or (beat and beat.done):
            self._neighbour_number, self._neighbour_seen_at = number, now
            return
        silent = now - self._neighbour_seen_at
        if silent > (self._limits.train if self.progress.has_stepped else self._limits.start):
            self._end(self._unresponsive(beat or Heartbeat(self._neighbour, "host not known", 0), silent))

    def _unresponsive(self, beat: Heartbeat, seconds: float) -> RankFailure:
        what = f"has not responded for {seconds:.0f} s, since {beat.where}"
        process = self._processes.get(beat.rank)
        return beat.failure(what, STOPPED_STATES.get(process.state(), "") if process else "", hangs=True)

    def _all_beats(self) -> dict[int, Heartbeat]:
        """Return the heartbeats of all ranks that have started and not ended."""
        texts = self._store.multi_get([_beat_key(rank) for rank in range(self._world_size)])
        beats = {rank: Heartbeat.from_json(text) for rank, text in enumerate(texts) if text}
        return {rank: beat for rank, beat in beats.items() if not beat.done}

    def _record(self, failure: RankFailure) -> RankFailure:
        """Record ``failure`` if it is the job's first, and return the first one."""
        try:
            return RankFailure.from_json(self._store.compare_set("failure", "", failure.to_json()))
        except DistError:  # the launcher of node 0 has ended
            return failure

    def _cause(self, error: BaseException) -> RankFailure:
        """Return the failure of this rank by ``error``, or of the rank that made its collective fail."""
        self._beat_now.step, self._beat_now.phase = self.progress.step, self.progress.phase
        text = f"{type(error).__name__}: {error}".partition("\n")[0]
        of_this_rank = self._beat_now.failure(f"failed in {self._beat_now.where}: {text}")
        if self._world_size == 1 or not is_communication_error(error):
            return of_this_rank
        try:
            before = self._all_beats()
            deadline = time.monotonic() + SETTLE_S
            while time.monotonic() < deadline:
                if failure := self._store.get("failure"):
                    return RankFailure.from_json(failure)
                time.sleep(0.1)
            now = self._all_beats()
        except DistError:
            return of_this_rank
        of_others = [beat for rank, beat in now.items() if rank != self._rank]
        for beat in of_others:
            if beat.rank in before and beat.number == before[beat.rank].number:
                return self._unresponsive(beat, SETTLE_S)
        stalled = [beat for beat in of_others if beat.stalled_s > SETTLE_S]
        return stall_failure(stalled) if stalled else of_this_rank

    def _end(self, failure: RankFailure, found_here: bool = True) -> None:
        """Record ``failure``, if it is the first, and end this process, unless the main thread is about to."""
        first = self._record(failure)
        self._kill_if_hanging(first)
        if first != failure or not found_here:
            # give the rank that recorded the failure time to print it, until torchrun signals this one
            poller = select.poll()
            if self._signals:
                poller.register(self._signals.fileno(), select.POLLIN)
            poller.poll(SETTLE_S * 1000)
        if self._reporting.is_set():
            self._closing = True
            return
        try:
            write_error_file(first.report, EXIT_FAILED, first, later=True)
        finally:  # also if the disk is full
            with _logging_stopped():
                _print_last(first)
                os._exit(EXIT_FAILED)

    def _kill_if_hanging(self, failure: RankFailure) -> None:
        process = self._processes.get(failure.rank)
        if failure.hangs and process:
            try:
                is_first = self._store.add("killed", 1) == 1
            except DistError:  # the launcher of node 0 has ended
                is_first = True
            process.kill(shows_stack=is_first)


def _beat_key(rank: int) -> str:
    return f"beat/{rank}"


def _print_last(failure: RankFailure) -> None:
    details = [f"  {line}" for line in failure.details.splitlines()]
    sys.stdout.flush()
    sys.stderr.write("\n".join([*details, f"torchtitan_npu: first failure: {failure}\n"]))
    sys.stderr.flush()


@contextmanager
def _logging_stopped() -> Iterator[None]:
    """Let no other thread log. The main thread may still run, and its message would follow the last line."""
    locks = [handler.lock for handler in logging.getLogger().handlers if handler.lock]
    held = [lock for lock in locks if lock.acquire(timeout=1.0)]  # a thread may block while it writes a message
    try:
        yield
    finally:
        for lock in held:
            lock.release()


def start_monitor(comm: Comm) -> RankMonitor | None:
    """Return the monitor of this rank, or ``None`` if there is no store of torchrun that outlives the ranks."""
    limits = Limits(comm.init_timeout_seconds + TRACE_S, comm.train_timeout_seconds + TRACE_S)
    variables = os.environ
    if comm.mode != "default":  # a job without communication
        return None
    world_size = int(variables.get("WORLD_SIZE", "1"))
    if world_size == 1:
        return RankMonitor(HashStore(), 0, 1, [], limits)
    if variables.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        log_on_first_rank("Not started by torchrun: ranks are not watched, and signals end the job at once")
        return None
    timeout = timedelta(seconds=comm.init_timeout_seconds)
    address = variables["MASTER_ADDR"], int(variables["MASTER_PORT"])
    store = TCPStore(*address, is_master=False, wait_for_workers=False, timeout=timeout)
    attempt = variables.get("TORCHELASTIC_RESTART_COUNT", "0")
    rank, local = int(variables["RANK"]), int(variables["LOCAL_RANK"])
    local_ranks = range(rank - local, rank - local + int(variables["LOCAL_WORLD_SIZE"]))
    return RankMonitor(PrefixStore(f"torchtitan_npu/{attempt}", store), rank, world_size, local_ranks, limits)
