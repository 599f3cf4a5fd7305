"""HCCL between processes through torch.distributed, and in one process through its own functions."""

from __future__ import annotations

import ctypes
import itertools
import json
import multiprocessing
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.emulator.conftest import Shared
from tests.emulator.hccl_ranks import SCENARIOS
from torchtitan_npu.emulator.environment import process_variables

RANKS = Path(__file__).with_name("hccl_ranks.py")
INT32 = 2
FLOAT32 = 4
PARAMETER, UNAVAILABLE = 1, 7

Outcome = tuple[list[dict[str, str | None]], list[int], str]
"""Tracebacks of the checks by rank, exit statuses, standard error."""


def run_ranks(folder: Path, scenario: str, ranks: int, **variables: str) -> Outcome:
    found = subprocess.run(
        [sys.executable, RANKS, folder, scenario, str(ranks)],
        env={**os.environ, "NPU_EMULATOR_FOLDER": str(folder), **variables},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert found.returncode == 0, found.stderr
    results = [json.loads((folder / f"{rank}.json").read_text()) for rank in range(ranks)]
    return results, json.loads(found.stdout.splitlines()[-1]), found.stderr


@pytest.fixture(scope="module", params=["Ascend910B3", "Ascend910_9392"])
def healthy(
    request: pytest.FixtureRequest, shared: Shared[Outcome], tmp_path_factory: pytest.TempPathFactory
) -> Outcome:
    return shared(f"hccl_{request.param}", lambda: run_healthy(request.param, tmp_path_factory.mktemp("hccl")))


def run_healthy(chip: str, folder: Path) -> Outcome:
    variables = {"HCCL_EXEC_TIMEOUT": "30", "NPU_EMULATOR_CHIP": chip}
    if chip == "Ascend910_9392":
        # torch_npu calls HcclAllGatherV and HcclReduceScatterV on this chip only. The order is seeded, and groups are
        # sub-communicators.
        variables |= process_variables(Path(os.environ["ASCEND_HOME_PATH"]), os.environ, seeded=True)
        variables |= {"NPU_EMULATOR_SEED": "5", "ROOTINFO_SUBCOMM_ENABLE": "1"}
    outcome = run_ranks(folder, "healthy", 3, **variables)
    assert not list(folder.glob("comm-*")), "a communicator has left its folder"
    return outcome


@pytest.mark.parametrize("check", SCENARIOS["healthy"])
def test_collective(healthy: Outcome, check: str) -> None:
    results, statuses, _ = healthy
    assert [result[check] for result in results] == [None] * 3
    assert statuses == [0, 0, 0]


@pytest.fixture(scope="module")
def failing(tmp_path_factory: pytest.TempPathFactory) -> Outcome:
    folder = tmp_path_factory.mktemp("hccl")
    return run_ranks(folder, "failing", 5, HCCL_EXEC_TIMEOUT="2", HCCL_CONNECT_TIMEOUT="2")


@pytest.mark.parametrize(
    ("check", "ranks"), [("ranks_disagree", (0, 1)), ("a_rank_never_comes", (2,)), ("a_rank_is_killed", (2,))]
)
def test_failure(failing: Outcome, check: str, ranks: tuple[int, ...]) -> None:
    results, _, _ = failing
    assert [results[rank][check] for rank in ranks] == [None] * len(ranks)


def test_watchdog_ends_the_process(failing: Outcome) -> None:
    _, statuses, errors = failing
    assert statuses == [0, 0, 0, -signal.SIGKILL, -signal.SIGABRT]
    assert "HCCL watchdog thread terminated with exception: communicator group_name_" in errors


class Device:
    """HCCL with all ranks in this process: one communicator and one stream each."""

    def __init__(self, ranks: int) -> None:
        self.library = ctypes.CDLL("libhccl.so")
        self.ranks = ranks
        self.communicators = (ctypes.c_void_p * ranks)()
        assert self.library.HcclCommInitAll(ranks, (ctypes.c_int32 * ranks)(*range(ranks)), self.communicators) == 0
        self.streams = [ctypes.c_void_p() for _ in range(ranks)]
        for stream in self.streams:
            assert self.library.aclrtCreateStream(ctypes.byref(stream)) == 0

    def call(self, rank: int, name: str, *arguments: Any) -> int:
        function: Callable[..., int] = self.library[name]
        return function(*arguments, ctypes.c_void_p(self.communicators[rank]), self.streams[rank])

    def synchronize(self) -> list[int]:
        return [self.library.aclrtSynchronizeStream(stream) for stream in self.streams]

    def message(self) -> str:
        self.library.aclGetRecentErrMsg.restype = ctypes.c_char_p
        return self.library.aclGetRecentErrMsg().decode()

    def close(self) -> None:
        for one in self.communicators:
            self.library.HcclCommDestroy(ctypes.c_void_p(one))


@pytest.fixture
def three_ranks(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    monkeypatch.setenv("NPU_EMULATOR_FOLDER", str(tmp_path))
    device = Device(3)
    yield device
    device.close()
    assert not list(tmp_path.iterdir())


def test_all_to_all_by_a_matrix_of_counts(three_ranks: Device) -> None:
    counts = [[1, 0, 2], [3, 1, 0], [0, 2, 2]]
    matrix = (ctypes.c_uint64 * 9)(*itertools.chain(*counts))
    sent = [[100 * r + i for i in range(sum(counts[r]))] for r in range(3)]
    buffers = [(ctypes.c_int32 * 9)(*values) for values in sent]
    received = [(ctypes.c_int32 * 9)() for _ in range(3)]
    for r in range(3):
        assert three_ranks.call(r, "HcclAlltoAllVC", buffers[r], matrix, INT32, received[r], INT32) == 0
    assert three_ranks.synchronize() == [0, 0, 0]
    for r in range(3):
        expected = [value for s in range(3) for value in sent[s][sum(counts[s][:r]) : sum(counts[s][: r + 1])]]
        assert list(received[r])[: len(expected)] == expected


def test_a_group_launches_on_each_stream(three_ranks: Device) -> None:
    """Messages of a group go in any order, also to the own rank; without a group the first receive would block."""
    sent = [(ctypes.c_float * 3)(*(10 * r + s for s in range(3))) for r in range(3)]
    received = [(ctypes.c_float * 3)() for _ in range(3)]
    size = ctypes.sizeof(ctypes.c_float)
    three_ranks.library.HcclGroupStart()
    for r in range(3):
        for name, values in (("HcclRecv", received[r]), ("HcclSend", sent[r])):
            for s in range(3):
                one = ctypes.byref(values, size * s), ctypes.c_uint64(1), FLOAT32, s
                assert three_ranks.call(r, name, *one) == 0
    assert three_ranks.library.HcclGroupEnd() == 0
    assert three_ranks.synchronize() == [0, 0, 0]
    assert [list(values) for values in received] == [[10 * s + r for s in range(3)] for r in range(3)]


def test_a_send_waits_for_its_receiver(three_ranks: Device) -> None:
    value, received, status = ctypes.c_float(5), ctypes.c_float(), ctypes.c_int()
    assert three_ranks.call(0, "HcclSend", ctypes.byref(value), ctypes.c_uint64(1), FLOAT32, 1) == 0
    three_ranks.library.aclrtStreamQuery(three_ranks.streams[0], ctypes.byref(status))
    assert status.value == 1  # not ready
    assert three_ranks.call(1, "HcclRecv", ctypes.byref(received), ctypes.c_uint64(1), FLOAT32, 0) == 0
    assert three_ranks.synchronize() == [0, 0, 0]
    assert received.value == 5


def fail_in_a_group() -> None:
    """The second communicator of a group fails: its message has other bytes than expected."""
    one, two = Device(1), Device(2)
    values = (ctypes.c_float * 2)()
    assert two.call(1, "HcclSend", values, ctypes.c_uint64(2), FLOAT32, 0) == 0
    one.library.HcclGroupStart()
    assert one.call(0, "HcclBarrier") == 0
    two.streams[0] = one.streams[0]
    assert two.call(0, "HcclRecv", values, ctypes.c_uint64(1), FLOAT32, 1) == 0
    assert one.library.HcclGroupEnd() == PARAMETER
    assert "has 8 bytes, but 4 are expected" in one.message()


def test_a_failing_group(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """In a process of its own: the failed task stays an error of the device."""
    monkeypatch.setenv("NPU_EMULATOR_FOLDER", str(tmp_path))
    child = multiprocessing.get_context("fork").Process(target=fail_in_a_group)
    child.start()
    child.join(60)
    if child.is_alive():
        child.kill()
        child.join()
    assert child.exitcode == 0


def test_a_message_without_a_communicator_is_an_error(three_ranks: Device) -> None:
    for name in ("HcclSend", "HcclRecv"):
        assert (
            three_ranks.library[name](None, ctypes.c_uint64(1), FLOAT32, 0, None, three_ranks.streams[0]) == UNAVAILABLE
        )
        assert three_ranks.message() == "the communicator is NULL"


def test_a_rank_that_cannot_join_leaves_nothing(three_ranks: Device, tmp_path: Path) -> None:
    """Neither a mapping nor a folder, and the ranks that have joined go on."""
    library, (folder,) = three_ranks.library, tmp_path.iterdir()
    info, joined = ctypes.create_string_buffer(str(folder).encode(), 4108), ctypes.c_void_p()
    maps = Path("/proc/self/maps")
    before = maps.read_text().count(str(folder))
    for ranks, message in ((3, "rank 0 has joined twice"), (2, "rank 0 expects 2 ranks, others expect 3")):
        assert library.HcclCommInitRootInfo(ranks, info, 0, ctypes.byref(joined)) == PARAMETER
        assert message in three_ranks.message()
    no_device = (ctypes.c_int32 * 2)(0, 1000)
    assert library.HcclCommInitAll(2, no_device, (ctypes.c_void_p * 2)()) == PARAMETER
    assert maps.read_text().count(str(folder)) == before and list(tmp_path.iterdir()) == [folder]
    for rank in range(3):
        assert three_ranks.call(rank, "HcclBarrier") == 0
    assert three_ranks.synchronize() == [0, 0, 0]


def test_folder_of_a_killed_process_is_removed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("NPU_EMULATOR_FOLDER", str(tmp_path))
    child = os.fork()
    if child == 0:
        Device(2)
        os.kill(os.getpid(), signal.SIGKILL)
    os.waitpid(child, 0)
    (left,) = tmp_path.iterdir()
    device = Device(2)
    assert len(list(tmp_path.iterdir())) == 1 and not left.exists()
    device.close()


def test_a_forked_child_cannot_use_a_communicator(three_ranks: Device, tmp_path: Path) -> None:
    child = os.fork()
    if child == 0:
        code = three_ranks.call(0, "HcclBarrier")
        three_ranks.close()
        os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == UNAVAILABLE
    assert list(tmp_path.iterdir())
    for rank in range(3):
        assert three_ranks.call(rank, "HcclBarrier") == 0
    assert three_ranks.synchronize() == [0, 0, 0]
