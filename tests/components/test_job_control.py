"""The agreement on the last step, the rank to blame, and the monitor thread, with ranks in threads and a HashStore."""

from __future__ import annotations

import io
import logging
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path

import pytest
from torch.distributed import DistNetworkError, HashStore

from torchtitan_npu.components.job_control import heartbeat, rank_monitor
from torchtitan_npu.components.job_control import process as rank_processes
from torchtitan_npu.components.job_control.heartbeat import (
    PHASES,
    Heartbeat,
    RankFailure,
    StallTimer,
    StepProgress,
    is_communication_error,
    ranks_behind,
    stall_failure,
)
from torchtitan_npu.components.job_control.process import RankProcess
from torchtitan_npu.components.job_control.rank_monitor import LONG_CALL_S, Limits, RankMonitor
from torchtitan_npu.errors import UsageError

LIMITS = Limits(start=60.0, train=60.0)
GLOO = RuntimeError("[gloo/transport/tcp/pair.cc:1] Timed out waiting for recv")


@pytest.fixture(autouse=True)
def _short_intervals(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rank_monitor, "INTERVAL_S", 0.01)
    monkeypatch.setattr(rank_monitor, "SETTLE_S", 0.15)


Start = Callable[..., RankMonitor]


@pytest.fixture
def start() -> Iterator[Start]:
    """Start monitors, and close them after the test."""
    monitors = []

    def start_monitor(store: HashStore, rank: int = 0, world_size: int = 1, limits: Limits = LIMITS) -> RankMonitor:
        monitors.append(RankMonitor(store, rank, world_size, [], limits))
        return monitors[-1]

    yield start_monitor
    for monitor in monitors:
        monitor.close()


@pytest.fixture
def exit_codes(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Record the exit codes of this process, and end only the thread that calls ``os._exit``."""
    codes: list[int] = []

    def end_thread(code: int) -> None:
        codes.append(code)
        raise SystemExit

    report = threading.excepthook
    monkeypatch.setattr(os, "_exit", end_thread)
    monkeypatch.setattr(threading, "excepthook", lambda args: args.exc_type is SystemExit or report(args))
    return codes


def beat(rank: int, step: int = 3, phase: str = "training", **fields: object) -> Heartbeat:
    return Heartbeat(rank, "host", 100 + rank, step=step, phase=phase, **fields)  # type: ignore[arg-type]


def wait_until(condition: Callable[[], object]) -> None:
    deadline = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.005)


def test_a_held_rank_waits_and_runs_up_to_the_agreed_step() -> None:
    progress = StepProgress()
    assert progress.may_start(1) and progress.may_start(2)
    assert progress.hold() == 2
    started: list[bool] = []
    waiting = threading.Thread(target=lambda: started.append(progress.may_start(3)))
    waiting.start()
    waiting.join(0.05)
    assert waiting.is_alive() and progress.step == 2
    progress.run_until(3)
    waiting.join()
    assert started == [True] and progress.step == 3
    assert not progress.may_start(4) and progress.step == 3


def test_a_rank_that_has_finished_watches_the_others(start: Start) -> None:
    """Otherwise nobody would find a rank that hangs in the validation after the last step."""
    store = HashStore()
    first, second = (start(store, rank, 2) for rank in range(2))
    waiting = threading.Thread(target=first.finish)
    waiting.start()
    wait_until(lambda: store.add("finished", 0) == 1)
    assert waiting.is_alive()
    second.finish()
    waiting.join(30)
    assert not waiting.is_alive()


def test_all_ranks_stop_after_the_same_step(start: Start) -> None:
    """A step has a collective, here a barrier: a rank that stopped earlier than another would break it."""
    store, world_size = HashStore(), 3
    collective = threading.Barrier(world_size)
    monitors = [start(store, rank, world_size) for rank in range(world_size)]
    completed = [0] * world_size

    def train(rank: int) -> None:
        while monitors[rank].progress.may_start(completed[rank] + 1):
            time.sleep(0.001 * rank)
            collective.wait(timeout=30)
            completed[rank] += 1

    threads = [threading.Thread(target=train, args=(rank,)) for rank in range(world_size)]
    for thread in threads:
        thread.start()
    wait_until(lambda: completed[0] > 3)
    store.compare_set("stop", "", "SIGTERM to rank 1")
    for thread in threads:
        thread.join(30)
    assert len(set(completed)) == 1 and completed[0] > 3
    assert {monitor.stop_reason for monitor in monitors} == {"SIGTERM to rank 1"}


@pytest.mark.parametrize(
    ("beats", "behind"),
    [
        ([beat(0), beat(1, phase="loading data")], [1]),
        ([beat(0, phase=PHASES[-1]), beat(1, step=4)], [0]),
        ([beat(0, in_library=True), beat(1, in_library=True), beat(2)], [2]),
        ([beat(0, in_library=True), beat(1), beat(2)], [1, 2]),
        ([beat(0), beat(1)], []),
        ([beat(0, in_library=True), beat(1, in_library=True)], []),
    ],
)
def test_ranks_behind(beats: list[Heartbeat], behind: list[int]) -> None:
    assert [beat.rank for beat in ranks_behind(beats)] == behind
    failure = stall_failure(beats)
    assert failure.rank == (behind or [0])[0]
    assert ("none is behind the others" in failure.what) == (not behind)


def test_the_stall_timer_measures_one_call(monkeypatch: pytest.MonkeyPatch) -> None:
    timer, state = StallTimer(show_stack_after_s=0.02), beat(0)
    done = threading.Event()

    def measure() -> None:
        deadline = time.monotonic() + 30
        while not state.stack and time.monotonic() < deadline:
            timer.update(state)
            time.sleep(0.005)
        done.set()

    threading.Thread(target=measure).start()
    assert done.wait(30)
    assert state.stalled_s > 0.02 and "done.wait(30)" in state.stack and not state.in_library
    state.step += 1
    timer.update(state)
    assert state.stalled_s == 0 and not state.stack
    monkeypatch.setattr(heartbeat, "LIBRARIES", ("threading",))
    folder = os.path.dirname(threading.__file__) + os.sep
    assert heartbeat._library_folders() == (folder,)


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (GLOO, True),
        (RuntimeError("HCCL function error: HcclAllReduce"), True),
        (DistNetworkError("the store is gone"), True),
        (RuntimeError("Connection closed by peer"), True),
        (RuntimeError("out of memory"), False),
        (ValueError("gloo is not a number"), False),
    ],
)
def test_is_communication_error(error: Exception, expected: bool) -> None:
    assert is_communication_error(error) == expected


class TestCause:
    """The rank to which rank 0 of 3 attributes its error."""

    @pytest.fixture
    def store(self) -> HashStore:
        return HashStore()

    @pytest.fixture
    def monitor(self, store: HashStore, start: Start) -> RankMonitor:
        return start(store, 0, 3)

    @pytest.fixture
    def publish(self, store: HashStore) -> Iterator[Callable[[Heartbeat], None]]:
        """Publish heartbeats with increasing numbers until the test ends."""
        ended = threading.Event()
        threads = []

        def publish_beats(beat: Heartbeat) -> None:
            while not ended.wait(0.01):
                beat.number += 1
                store.set(f"beat/{beat.rank}", beat.to_json())

        def start_publishing(beat: Heartbeat) -> None:
            threads.append(threading.Thread(target=publish_beats, args=(beat,)))
            threads[-1].start()
            wait_until(lambda: store.get(f"beat/{beat.rank}"))

        yield start_publishing
        ended.set()
        for thread in threads:
            thread.join()

    def test_an_own_error(self, monitor: RankMonitor) -> None:
        failure = monitor._cause(ValueError("wrong\nsecond line"))
        assert failure.rank == 0 and failure.what == "failed in phase 'starting': ValueError: wrong"

    def test_a_rank_without_heartbeats(self, monitor: RankMonitor, store: HashStore, publish) -> None:
        publish(beat(1))
        store.set("beat/2", beat(2).to_json())
        failure = monitor._cause(GLOO)
        assert failure.rank == 2 and failure.hangs and "has not responded" in failure.what

    def test_a_stalled_rank(self, monitor: RankMonitor, publish) -> None:
        publish(beat(1, stalled_s=9.0, in_library=True))
        publish(beat(2, stalled_s=9.0, stack="in user code"))
        failure = monitor._cause(GLOO)
        assert failure.rank == 2 and failure.details == "in user code"

    def test_no_other_rank(self, monitor: RankMonitor, publish) -> None:
        publish(beat(1))
        publish(beat(2))
        assert monitor._cause(GLOO).rank == 0

    def test_a_recorded_failure(self, monitor: RankMonitor, store: HashStore, exit_codes: list[int]) -> None:
        first = RankFailure(2, "host", 102, "failed in step 3 (training): ValueError: wrong")
        monitor._reporting.set()
        store.set("failure", first.to_json())
        assert monitor._cause(GLOO) == first
        assert not exit_codes  # the main thread reports


def test_a_usage_error_is_recorded_without_a_stack(start: Start, capsys: pytest.CaptureFixture[str]) -> None:
    store = HashStore()
    start(store, 0, 2).report(UsageError("some.key: wrong"))
    assert RankFailure.from_json(store.get("failure")).what.endswith("UsageError: some.key: wrong")
    errors = capsys.readouterr().err
    assert "torchtitan_npu: error: rank 0: some.key: wrong\n" in errors and "Traceback" not in errors


def test_nothing_is_logged_after_the_last_line(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    """The main thread goes on until the process has ended, which takes a while here."""
    stream, ended = io.StringIO(), []

    def end_thread(code: int) -> None:
        time.sleep(0.05)
        ended.append(stream.getvalue())
        raise SystemExit

    monkeypatch.setattr(os, "_exit", end_thread)
    monkeypatch.setattr(sys, "stderr", stream)
    monkeypatch.setattr(logging.getLogger(), "handlers", [logging.StreamHandler(stream)])
    monitor = start(HashStore())
    thread = threading.Thread(target=monitor._end, args=[RankFailure(1, "host", 7, "ended")])
    thread.start()
    while not ended:
        logging.warning("the main thread is busy")
    thread.join()
    assert ended[0].splitlines()[-1].startswith("torchtitan_npu: first failure: rank 1")


def test_the_rank_that_reports_a_stopped_rank_kills_it(monkeypatch: pytest.MonkeyPatch) -> None:
    store = HashStore()
    monkeypatch.setattr(rank_processes, "STACK_S", 30.0)
    with subprocess.Popen(["sleep", "100"]) as child:
        child.send_signal(signal.SIGSTOP)
        wait_until(lambda: RankProcess(child.pid).state() == "T")
        store.set("beat/1", Heartbeat(1, "host", child.pid).to_json())
        with closing(RankMonitor(store, 0, 2, [0, 1], LIMITS)) as monitor:
            wait_until(lambda: monitor._processes)
            monkeypatch.setattr(rank_monitor, "INTERVAL_S", 60.0)  # the thread may see the failure too late
            time.sleep(0.05)
            monitor.report(GLOO)
            assert child.wait(30) == -signal.SIGABRT


COUNTS = """
import os, signal, time
signal.signal(signal.SIGABRT, lambda *_: os.write(2, b"received "))
os.write(2, b"ready\\n")
while True:
    time.sleep(0.01)
"""


@pytest.mark.usefixtures("exit_codes")
def test_a_hung_rank_gets_one_sigabrt(monkeypatch: pytest.MonkeyPatch) -> None:
    """faulthandler leaves the next one to the kernel, which would end the process while it writes its stack."""
    store = HashStore()
    monkeypatch.setattr(rank_processes, "STACK_S", 0.2)
    with subprocess.Popen([sys.executable, "-c", COUNTS], stderr=subprocess.PIPE) as child:
        assert child.stderr is not None and child.stderr.readline() == b"ready\n"
        hung = Heartbeat(1, "host", child.pid)
        store.set("beat/1", hung.to_json())
        with (
            closing(RankMonitor(store, 0, 3, [0, 1, 2], LIMITS)) as one,
            closing(RankMonitor(store, 2, 3, [0, 1, 2], LIMITS)) as other,
        ):
            wait_until(lambda: 1 in one._processes and 1 in other._processes)
            threads = [
                threading.Timer(delay, monitor._kill_if_hanging, [hung.failure("hangs", hangs=True)])
                for monitor, delay in ((one, 0.0), (other, 0.05))
            ]
            for thread in threads:
                thread.start()
            assert child.stderr.read() == b"received "
            for thread in threads:
                thread.join()
        assert child.wait() == -signal.SIGKILL


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
@pytest.mark.parametrize("waits", [False, True])
def test_an_exception_in_the_monitor_thread_ends_the_rank(waits: bool, start: Start) -> None:
    """The main thread raises at its next step, or while it waits for the last step that the ranks agree on."""
    store = HashStore()
    monitor = start(store, 0, 2)
    if waits:
        monitor.progress.hold()
        threading.Timer(0.1, store.set, ["failure", "not JSON"]).start()
    else:
        store.set("failure", "not JSON")
        monitor._thread.join(30)
    with pytest.raises(RuntimeError, match="the monitor thread of this rank has ended"):
        monitor.progress.may_start(1)


@pytest.mark.parametrize("disk_is_full", [False, True])
def test_a_recorded_failure_ends_the_rank(
    disk_is_full: bool, start: Start, exit_codes: list[int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The error file in a missing folder cannot be written, as on a full disk."""
    file = tmp_path / "missing" / "error.json" if disk_is_full else tmp_path / "error.json"
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(file))
    store = HashStore()
    monitor = start(store, 0, 2)
    store.set("failure", RankFailure(1, "host", 101, "failed in step 3").to_json())
    monitor._thread.join(30)
    assert not monitor._thread.is_alive() and exit_codes == [1]
    assert file.exists() != disk_is_full


class TestStall:
    """Rank 0 in a call that takes longer than the time-out of collectives."""

    LIMITS = Limits(start=60.0, train=0.05)

    def stall(self, monitor: RankMonitor, seconds: float, phase: str = "training") -> None:
        monitor.progress.step, monitor.progress.phase = 3, phase
        monitor.progress.has_stepped = True
        monitor._thread.join(seconds)

    def test_one_rank_may_take_any_time(self, start: Start, exit_codes: list[int]) -> None:
        monitor = start(HashStore(), limits=self.LIMITS)
        self.stall(monitor, 0.4)
        assert monitor._beat_now.stalled_s > 4 * self.LIMITS.train and not exit_codes

    @pytest.mark.parametrize(
        ("first_phase", "phase", "hangs"),
        [
            ("training", "training", False),
            ("training", "loading data", True),
            (PHASES[-1], "training", True),
            (PHASES[-1], PHASES[-1], False),
        ],
    )
    def test_two_ranks(self, first_phase: str, phase: str, hangs: bool, start: Start, exit_codes: list[int]) -> None:
        """In one phase both may run the same long call. If rank 1 is in an earlier phase, rank 0 waits for it."""
        store = HashStore()
        store.set("beat/1", beat(1, phase=phase, stalled_s=9.0).to_json())
        monitor = start(store, 0, 2, limits=self.LIMITS)
        monitor._check_neighbour = lambda _: None  # type: ignore[method-assign] # rank 1 has one heartbeat only
        self.stall(monitor, 30 if hangs else 0.4, first_phase)
        assert exit_codes == ([1] if hangs else [])
        if exit_codes:
            failure = RankFailure.from_json(store.get("failure"))
            assert failure.rank == 1 and failure.what.startswith(f"hangs: no progress for 9 s in step 3 ({phase})")

    def test_the_limit_of_one_call(self) -> None:
        limits = Limits(start=303, train=103)
        assert limits.of_call("training", others_wait=True) == 103
        assert limits.of_call("training", others_wait=False) == LONG_CALL_S
        assert limits.of_call(PHASES[-1], others_wait=True) == LONG_CALL_S
        assert Limits(start=303, train=7200).of_call("training", others_wait=False) == 7200


SLEEPS = "import sys, time; print('ready', file=sys.stderr, flush=True); time.sleep(100)"


@pytest.mark.parametrize("has_pidfd", [True, False])
def test_the_process_of_another_rank(has_pidfd: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if not has_pidfd:

        def refuse(pid: int, flags: int = 0) -> int:
            raise PermissionError(pid)

        monkeypatch.setattr(os, "pidfd_open", refuse)
    monkeypatch.setattr(rank_processes, "STACK_S", 30.0)
    with subprocess.Popen(["sleep", "100"]) as child:
        process = RankProcess(child.pid)
        assert process.descriptor is None or has_pidfd
        assert not process.has_ended()
        process.kill()
        wait_until(process.has_ended)  # a zombie: its parent has not read its exit code
        process.kill()
        assert child.wait() == -signal.SIGABRT
    assert process.has_ended() and process.state() == ""
    process.close()


def test_a_process_that_waits_for_a_disk_may_show_its_stack(monkeypatch: pytest.MonkeyPatch) -> None:
    """State D lasts an instant where a page is read. To see it here, the state is replaced; the signals are real."""
    monkeypatch.setattr(RankProcess, "state", lambda _: "D")
    with subprocess.Popen([sys.executable, "-X", "faulthandler", "-c", SLEEPS], stderr=subprocess.PIPE) as child:
        assert child.stderr is not None and child.stderr.readline() == b"ready\n"
        RankProcess(child.pid).kill()
        assert b'File "<string>"' in child.stderr.read()
        assert child.wait() == -signal.SIGABRT
