"""A job that fails, hangs or is stopped names the rank, ends all ranks in time, and can be resumed."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests._helpers.entry_ranks import job_arguments, start_ranks
from torchtitan_npu.cli.launch.failure_report import stop_message

ROOT = Path(__file__).parents[1]

ENDED = "it was killed, or it exited early"
STOPPED = "the process is stopped (SIGSTOP); its log ends with its stack"
HUNG = (1, -signal.SIGABRT, -signal.SIGSEGV)
"""After SIGABRT, faulthandler reads the stacks of threads that run, which may be a segmentation fault. The stack that
the other ranks print is from a heartbeat."""
SLOW = pytest.mark.slow


@pytest.mark.parametrize(
    ("world_size", "fault", "what", "codes"),
    [
        pytest.param(3, "SIGKILL", ENDED, (-signal.SIGKILL,), marks=SLOW),
        (2, "exit", ENDED, (0,)),
        pytest.param(2, "exit without pidfd", ENDED, (0,), marks=SLOW),
        pytest.param(2, "SIGSTOP without pidfd", STOPPED, (1, -signal.SIGABRT, -signal.SIGKILL), marks=SLOW),
        pytest.param(3, "usage error", "(training): UsageError: planted.key: the planted value", (2,), marks=SLOW),
        pytest.param(3, "sys.exit", "sys.exit(0) was called before step 1000", (1,), marks=SLOW),
        pytest.param(3, "out of memory", "failed in step 3 (training): RuntimeError: ", (1,), marks=SLOW),
        (2, "data loader", "(loading data): ValueError: the planted sample is damaged", (1,)),
        # its monitor ends it, or a signal of another rank does
        (2, "SIGSTOP", STOPPED, (1, -signal.SIGABRT, -signal.SIGKILL)),
        pytest.param(3, "hang", "time.sleep(1000)", HUNG, marks=SLOW),
        pytest.param(3, "hanging data loader", "time.sleep(1000)", HUNG, marks=SLOW),
    ],
)
def test_the_first_failing_rank_is_named_by_every_rank(
    world_size: int, fault: str, what: str, codes: tuple[int, ...], tmp_path: Path
) -> None:
    timeout = 5 if fault.startswith(("SIGSTOP", "hang")) else 10  # those wait until it has elapsed
    with start_ranks(tmp_path, world_size, fault, comm__train_timeout_seconds=str(timeout)) as ranks:
        ranks.wait_for("step:  2")
        *remaining, failed = ranks.exit_codes(timeout + 60)
        assert set(remaining) == {1} and failed in codes, ranks.log(0)
    for rank in range(world_size - 1):
        name = f"rank {world_size - 1} ({os.uname().nodename}, pid {ranks.pid(world_size - 1)}) "
        assert ranks.last_line(rank).startswith(f"torchtitan_npu: first failure: {name}"), ranks.log(rank)
        assert what in ranks.log(rank)
        error = json.loads((tmp_path / f"error{rank}.json").read_text())
        assert error["message"]["cause"]["rank"] == world_size - 1
    if what == STOPPED:
        _, _, stack = ranks.log(world_size - 1).partition("Fatal Python error: Aborted\n")
        assert "in step_with_fault\n" in stack and "torchtitan_npu/train.py" in stack


@pytest.mark.slow
def test_an_error_of_the_compile_backend_is_one_line(tmp_path: Path) -> None:
    """Inductor and the pipeline stage wrap it in other errors."""
    options = {"compile__enable": "True", "npu__bypass_codegen": "inductor", "training__local_batch_size": "2"}
    options["parallelism__pipeline_parallel_degree"] = "2"
    with start_ranks(tmp_path, fault="usage error in compile", **options) as ranks:
        assert ranks.exit_codes() == [1, 2], ranks.log(1)
    assert "torchtitan_npu: error: planted.key: the planted value is wrong" in ranks.log(1).splitlines()
    assert "Traceback" not in ranks.log(1)


def losses(log: str) -> dict[int, float]:
    return {int(step): float(loss) for step, loss in re.findall(r"step: +(\d+) .*?loss: +([\d.]+)", log)}


@pytest.mark.parametrize("mode", ["async", pytest.param("disabled", marks=pytest.mark.slow)])
def test_a_signal_to_one_rank_stops_all_after_the_same_step(mode: str, tmp_path: Path) -> None:
    """The job resumes from there as if it had not stopped; the interval and the number of saved checkpoints hold."""
    options = {"training__steps": "40", "metrics__disable_color_printing": "True"}
    saved = {"checkpoint__enable": "True", "checkpoint__interval": "2", "checkpoint__keep_latest_k": "2"}
    saved["checkpoint__async_mode"] = mode
    with start_ranks(tmp_path / "straight", **options) as straight:
        with start_ranks(tmp_path / "job", fault="SIGTERM", **options, **saved) as stopped:
            assert stopped.exit_codes() == [75, 75], stopped.log(0)
        last = max(losses(stopped.log(0)))
        assert 3 <= last < 40 - 3
        straight.wait_for(f"step: {last + 3:2}")
    message = f"Stopped by SIGTERM to rank 1 ({os.uname().nodename}, pid {stopped.pid(1)}) after step {last}, saved in "
    assert message in stopped.last_line(0)
    assert message in (tmp_path / "job/error1.json").read_text()
    kept = sorted(int(path.name.removeprefix("step-")) for path in (tmp_path / "job/checkpoint").iterdir())
    assert kept[-1] == last and len(kept) <= 3  # a thread deletes the oldest
    with start_ranks(tmp_path / "job", **options, **saved) as resumed:
        resumed.wait_for(f"step: {last + 3:2}")
    assert f"Training starts at step {last + 1}" in resumed.log(0)
    expected, actual = losses(straight.log(0)), losses(resumed.log(0))
    for step in (last + 1, last + 2):
        assert actual[step] == expected[step]


def test_a_step_that_is_not_finite_stops_all_ranks(tmp_path: Path) -> None:
    saved = {"checkpoint__enable": "True", "checkpoint__interval": "1", "checkpoint__async_mode": "async"}
    with start_ranks(tmp_path, fault="nan", **saved) as ranks:
        assert ranks.exit_codes() == [3, 3], ranks.log(0)
    module = "First, when the step runs again: the output of layers.0.feed_forward, on rank 1, microbatch 1"
    checkpoint = f"The last checkpoint before step 3 is {tmp_path}/checkpoint/step-2: "
    assert "Step 3 is not finite (gradient norm nan, loss not finite on rank 1)" in ranks.log(0)
    assert "first failure" not in ranks.log(0) + ranks.log(1)
    assert {path.name for path in (tmp_path / "checkpoint").iterdir()} == {"step-1", "step-2"}
    for rank in (0, 1):  # as torchrun keeps them
        (tmp_path / f"run/attempt_0/{rank}").mkdir(parents=True)
        (tmp_path / f"error{rank}.json").rename(tmp_path / f"run/attempt_0/{rank}/error.json")
    message, code = stop_message(tmp_path) or ("", 0)
    assert code == 3 and checkpoint in message and message.endswith(module)


def test_a_second_signal_ends_a_rank_at_once(tmp_path: Path) -> None:
    """Rank 0 waits in a collective, where no Python handler runs."""
    with start_ranks(tmp_path, fault="hang", comm__train_timeout_seconds="60") as ranks:
        ranks.wait_for("planted fault", rank=1)
        os.kill(ranks.pid(0), signal.SIGTERM)
        time.sleep(1)
        assert ranks.processes[0].is_alive()
        for _ in range(20):  # a busy machine may handle two signals together
            time.sleep(2.5)
            if not ranks.processes[0].is_alive():
                break
            os.kill(ranks.pid(0), signal.SIGTERM)
        assert ranks.exit_codes() == [128 + signal.SIGTERM, 1]
    assert ranks.last_line(0) == "torchtitan_npu: ended at once by a second SIGTERM"
    assert f"first failure: rank 0 ({os.uname().nodename}, pid {ranks.pid(0)}) ended" in ranks.log(1)


def wait_for_end(pid: int) -> None:
    """Wait until a process does not exist, or is a zombie that its new parent has not seen yet."""
    deadline = time.monotonic() + 60
    while (stat := Path(f"/proc/{pid}/stat")).exists() and stat.read_text().rpartition(")")[2].split()[0] != "Z":
        assert time.monotonic() < deadline
        time.sleep(0.02)


@pytest.mark.parametrize("by_torchrun", [True, False])
def test_a_rank_ends_with_torchrun_and_not_with_a_shell(by_torchrun: bool) -> None:
    rank = "from torchtitan_npu.components.job_control.process import end_with_torchrun; import time, os\n"
    rank += "end_with_torchrun(); print(os.getpid(), flush=True); time.sleep(100)"
    parent = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {rank!r}])"
    environment = {name: value for name, value in os.environ.items() if name != "TORCHELASTIC_RUN_ID"}
    environment |= {"TORCHELASTIC_RUN_ID": "test"} if by_torchrun else {}
    command = [sys.executable, "-c", parent]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as process:
        assert process.stdout is not None
        pid = int(process.stdout.readline())
        process.kill()
    if not by_torchrun:
        time.sleep(0.2)
        os.kill(pid, signal.SIGTERM)  # it still exists
    wait_for_end(pid)


def torchrun(folder: Path, **variables: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node=2", "-m", "torchtitan_npu.train"]
    environment = os.environ | {"PYTHONPATH": str(ROOT)} | variables
    pipe = subprocess.PIPE
    arguments = job_arguments(folder)
    return subprocess.Popen([*command, *arguments], cwd=ROOT, env=environment, stdout=pipe, stderr=pipe, text=True)


@SLOW
def test_torchrun_reports_the_rank_that_exited_with_0(tmp_path: Path) -> None:
    with torchrun(tmp_path, PLANTED_FAULT="exit", PLANTED_RANK="1") as process:
        _, errors = process.communicate(timeout=120)
    assert process.returncode == 1
    _, _, cause = errors.partition("Root Cause")
    assert f"rank 1 ({os.uname().nodename}, pid " in cause and ENDED in cause


@SLOW
def test_no_rank_outlives_torchrun(tmp_path: Path) -> None:
    with torchrun(tmp_path) as process:
        assert process.stdout is not None
        for line in process.stdout:
            if "step:  2" in line:
                break
        ranks = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
        process.kill()
        assert len(ranks) == 2
        for rank in ranks:
            wait_for_end(int(rank))
