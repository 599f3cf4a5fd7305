"""``torchtitan-npu launch``: environment profiles, one-line errors, one log per rank, the first failure first."""

from __future__ import annotations

import io
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure

from tests._helpers.nodes import free_port
from torchtitan_npu.cli.doctor.environment import SELECTORS, addresses, find_conflicts, hccl_choice, interface_towards
from torchtitan_npu.cli.doctor.host import check_interfaces
from torchtitan_npu.cli.launch import command
from torchtitan_npu.cli.launch import environment_profile as profile
from torchtitan_npu.cli.launch.failure_report import (
    KILLED_AFTER,
    REPORT_TIMEOUT,
    DeferErrors,
    Failure,
    describe,
    failures_of,
    gather_reports,
    refusal,
    write_report,
)
from torchtitan_npu.errors import UsageError

ROOT = Path(__file__).resolve().parents[2]
JOB = ["--training.local_batch_size=1", "--training.seq_len=32", "--training.steps=1", "--comm.trace_buf_size=0"]


def launch_command(folder: Path, environment: dict[str, str], *job: str) -> tuple[list[str], dict[str, Any]]:
    config = f"--job.config_file={ROOT / 'train_configs/llama3_debugmodel.toml'}"
    command = [sys.executable, "-m", "torchtitan_npu.cli.main", "launch", config]
    command += [*JOB, f"--job.dump_folder={folder / 'job'}", *job]
    set_here = {"LOGS": str(folder / "logs")}
    return command, {"cwd": ROOT, "env": os.environ | set_here | environment, "text": True}


def launch(folder: Path, *job: str, **environment: str) -> subprocess.CompletedProcess[str]:
    command, options = launch_command(folder, environment, *job)
    return subprocess.run(command, **options, capture_output=True, timeout=200)


@pytest.mark.slow  # two ranks import TorchTitan; the order of failures is tested below
def test_an_invalid_job_is_one_line(tmp_path: Path) -> None:
    """Every rank exits, and only one of them prints the reason."""
    result = launch(tmp_path, "--parallelism.data_parallel_shard_degree=1", NPROC="2", OMP_NUM_THREADS="1")
    assert result.returncode == 2
    errors = [line for line in result.stderr.splitlines() if "error" in line.lower() or "Traceback" in line]
    assert len(errors) == 1 and errors[0].startswith("launch: error: 2 ranks (torchrun's --nproc_per_node")
    assert "first failure" not in result.stderr and "[rank1]:" not in result.stdout + result.stderr
    assert len(list(tmp_path.glob("logs/node0/*/*/attempt_0/*/stderr.log"))) == 2


@pytest.mark.parametrize(
    ("environment", "error"),
    [
        ({"argument": "--nproc=2"}, "--nproc: arguments are keys of the job"),
        ({"argument": "--nproc_per_node"}, "--nproc_per_node: arguments are keys of the job"),
        ({"argument": "-m"}, "-m: arguments are keys of the job"),
        ({"NNODES": "two"}, "NNODES=two is not a number"),
        ({"NPROC": "-1"}, "NPROC=-1 is not a number"),
        ({"NPROC": "0"}, "NPROC=0: must be at least 1"),
        ({"NNODES": "2"}, "NODE_RANK is not set: set it to the number of this node, 0 to 1"),
        ({"NNODES": "2", "NODE_RANK": "2"}, "NODE_RANK=2: must be 0 to 1 with NNODES=2"),
        ({"NNODES": "2", "NODE_RANK": "1"}, "MASTER_ADDR is not set: set it to the name or address of node 0"),
        ({"MASTER_PORT": "0"}, "MASTER_PORT=0: must be 1 to 65535"),
        ({"MASTER_PORT": "65536"}, "MASTER_PORT=65536: must be 1 to 65535"),
    ],
    ids=str,
)
def test_an_invalid_option_is_one_line(environment: dict[str, str], error: str, tmp_path: Path) -> None:
    job = [value for name, value in environment.items() if name == "argument"]  # an option of torchrun
    variables = {name: value for name, value in environment.items() if name != "argument"}
    result = launch(tmp_path, *job, **variables)
    assert (result.returncode, result.stdout) == (2, "")
    assert result.stderr.count("\n") == 1 and result.stderr.startswith(f"launch: error: {error}")


def test_a_failed_rendezvous_is_one_line(tmp_path: Path) -> None:
    with socket.socket() as other:  # not a launcher
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = str(other.getsockname()[1])
        result = launch(tmp_path, NNODES="2", NODE_RANK="0", MASTER_ADDR="127.0.0.1", MASTER_PORT=port)
    assert result.returncode == 2 and "Traceback" not in result.stderr
    line = result.stderr.splitlines()[-1]
    assert line.startswith(f"launch: error: rendezvous of 2 nodes failed at MASTER_ADDR=127.0.0.1 MASTER_PORT={port}: ")
    assert "EADDRINUSE" in line and line.endswith(
        "(is another launch running there, or is this not the address of this node?)"
    )


def test_a_signal_during_the_rendezvous_ends_the_launcher(tmp_path: Path) -> None:
    """torchrun waits in C++ for the answer of node 0, where no Python handler runs."""
    with socket.socket() as node_0:
        node_0.bind(("127.0.0.1", 0))
        node_0.listen()
        node_0.settimeout(100)
        rendezvous = {"NNODES": "2", "NODE_RANK": "1", "MASTER_ADDR": "127.0.0.1", "NPROC": "1"}
        with launched_job(tmp_path, rendezvous | {"MASTER_PORT": str(node_0.getsockname()[1])}) as launched:
            connection, _ = node_0.accept()
            with connection:
                launched.send_signal(signal.SIGTERM)
                try:
                    assert launched.wait(timeout=20) == -signal.SIGTERM  # 143 in a shell
                finally:
                    launched.kill()  # SIGTERM did not work


RANK = """
import os, sys, time
if "LOCAL_RANK" in os.environ:
    if os.environ["RANK"] == os.environ.get("FAILS"):
        os.makedirs(os.environ["LOGS"] + "/node0/another_launch/attempt_0")  # newer than this launch
        sys.stderr.write("Traceback (most recent call last):\\nRuntimeError: planted\\n")
        sys.stderr.flush()
        os._exit(1)
    print("the rank runs", flush=True)
    time.sleep(600)
"""
"""The start of a fake rank. The launcher and torchrun are the real ones."""


def first_on_path(folder: Path, file: str, text: str) -> dict[str, str]:
    """Write ``text`` to ``file`` and return an environment in which Python finds it first."""
    path = folder / "first" / file
    path.parent.mkdir(parents=True)
    path.write_text(text)
    return {"PYTHONPATH": os.pathsep.join([str(folder / "first"), str(ROOT)])}


@contextmanager
def launched_job(folder: Path, environment: dict[str, str]) -> Iterator[subprocess.Popen[str]]:
    command, options = launch_command(folder, environment)
    with subprocess.Popen(command, **options, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as launched:
        try:
            yield launched
        finally:
            launched.terminate()  # do not wait for the ranks if the test fails


def wait_for(glob: str, folder: Path, text: str) -> None:
    deadline = time.monotonic() + 100
    while not any(text in path.read_text() for path in folder.glob(glob)):
        assert time.monotonic() < deadline, f"no {text!r} in {glob}"
        time.sleep(0.05)


def test_a_job_is_shown_and_logged(tmp_path: Path) -> None:
    rank = "import os\nif 'LOCAL_RANK' in os.environ:\n    print('step:  1', flush=True)\n    os._exit(0)\n"
    result = launch(tmp_path, **first_on_path(tmp_path, "sitecustomize.py", rank), OMP_NUM_THREADS="1", NPROC="2")
    console = result.stdout + result.stderr
    assert result.returncode == 0, console[-3000:]
    assert "launch: profile cpu: nothing to add\nlaunch: kept your settings: OMP_NUM_THREADS=1\n" in console
    assert "[rank0]:step:  1" in console and "[rank1]:" not in console
    for local_rank in (0, 1):
        (log,) = tmp_path.glob(f"logs/node0/*/*/attempt_0/{local_rank}/stdout.log")
        assert "step:  1" in log.read_text()


def test_ctrl_c_is_reported_last(tmp_path: Path) -> None:
    with launched_job(tmp_path, first_on_path(tmp_path, "sitecustomize.py", RANK)) as launched:
        wait_for("logs/node0/*/*/attempt_0/0/stdout.log", tmp_path, "the rank runs")
        launched.send_signal(signal.SIGINT)
        _, errors = launched.communicate(timeout=100)
    assert launched.returncode == 128 + signal.SIGINT
    assert errors.splitlines()[-1] == "launch: ended by SIGINT"
    assert all(line.startswith("[rank0]:") for line in errors.splitlines() if "Traceback" in line)  # not the launcher's


STOPS = """
import json, os, signal, sys, time
if "LOCAL_RANK" in os.environ:
    def stop(*_):
        text = "Stopped by SIGTERM to rank 0 after step 7"
        message = {"message": text, "errorCode": 75, "extraInfo": {"py_callstack": text, "timestamp": "1"}}
        with open(os.environ["TORCHELASTIC_ERROR_FILE"], "w") as file:
            json.dump({"message": message}, file)
        os._exit(75)
    signal.signal(signal.SIGTERM, stop)
    print("the rank runs", flush=True)
    if os.environ["RANK"] == os.environ.get("SIGNALLED"):
        os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(600)
"""
"""A rank that stops as torchtitan_npu.train does; tests/test_failing_jobs.py has the real one."""


@pytest.mark.parametrize("signalled", ["launcher", "rank"])
def test_a_job_that_stops_after_a_signal_has_its_own_exit_code(signalled: str, tmp_path: Path) -> None:
    environment = first_on_path(tmp_path, "sitecustomize.py", STOPS) | {"SIGNALLED": "0" if signalled == "rank" else ""}
    with launched_job(tmp_path, environment) as launched:
        wait_for("logs/node0/*/*/attempt_0/0/stdout.log", tmp_path, "the rank runs")
        if signalled == "launcher":
            launched.send_signal(signal.SIGTERM)
        _, errors = launched.communicate(timeout=100)
    assert launched.returncode == 75, errors
    assert errors.splitlines()[-1] == "launch: Stopped by SIGTERM to rank 0 after step 7"


@pytest.mark.slow  # three processes import torch
def test_a_signal_while_waiting_for_reports_shows_the_known_failures(tmp_path: Path) -> None:
    """Node 0 has failed and waits for the report of node 1, which still runs."""
    rendezvous = {"NNODES": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "NPROC": "1"}
    rendezvous |= first_on_path(tmp_path, "sitecustomize.py", RANK) | {"FAILS": "0"}
    node_0, node_1 = (launched_job(tmp_path, rendezvous | {"NODE_RANK": node}) for node in "01")
    with node_0 as failed, node_1 as running:
        wait_for("logs/node1/*/*/attempt_0/0/stdout.log", tmp_path, "the rank runs")
        wait_for("logs/node0.failures.json", tmp_path, "planted")
        failed.send_signal(signal.SIGTERM)
        _, report = failed.communicate(timeout=REPORT_TIMEOUT / 2)  # the signal ends the wait
        running.send_signal(signal.SIGTERM)
        _, errors = running.communicate(timeout=100)
    assert failed.returncode == running.returncode == 128 + signal.SIGTERM
    lines = report[report.index("first failure:") :].splitlines()
    assert lines[0].startswith("first failure: rank 0 (node 0, ") and lines[2] == "  RuntimeError: planted"
    assert lines[-2].startswith("node 1 has not reported") and lines[-1] == "launch: ended by SIGTERM"
    assert report.count("Traceback") == 1
    assert errors.splitlines()[-1] == "launch: ended by SIGTERM" and "Traceback" not in errors


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_during_the_import_of_torch_is_one_line(number: signal.Signals, tmp_path: Path) -> None:
    torch = f"import os, time\nos.kill(os.getpid(), {int(number)})\ntime.sleep(600)\n"
    result = launch(tmp_path, **first_on_path(tmp_path, "torch/__init__.py", torch))
    assert (result.returncode, result.stderr) == (128 + number, f"launch: ended by {number.name}\n")


@pytest.mark.parametrize("file", ["logs", "logs/node0", "logs/node0.failures.json/file", "/proc/self"])
def test_a_log_folder_that_cannot_be_written_is_one_line(file: str, tmp_path: Path) -> None:
    if file == "/proc/self":  # not even root can create a folder there
        (tmp_path / "logs").mkdir()
        (tmp_path / "logs/node0").symlink_to(file)
    else:
        (tmp_path / file).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / file).touch()
    result = launch(tmp_path)
    assert (result.returncode, result.stdout) == (2, "")
    assert result.stderr.count("\n") == 1 and result.stderr.startswith(f"launch: error: LOGS={tmp_path / 'logs'}: ")


def test_a_python_without_torch_is_one_line(tmp_path: Path) -> None:
    command = [sys.executable, "-S", "-m", "torchtitan_npu.cli.main", "launch"]  # -S: without site-packages
    environment = os.environ | {"PYTHONPATH": str(ROOT), "LOGS": str(tmp_path)}
    result = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert result.returncode == 2
    assert result.stderr == f"launch: error: {sys.executable} has no torch: see docs/how-to/install.md\n"


@pytest.mark.parametrize("name", profile.names())
def test_a_shipped_profile_has_reasons_and_no_conflicts(name: str) -> None:
    variables = profile.read(name)
    assert profile.apply(name, {}) == {variable.name: variable.value for variable in variables}
    assert len({variable.name for variable in variables}) == len(variables)
    assert all(variable.reason for variable in variables)


def test_variables_of_the_user_are_kept() -> None:
    own = {"TASK_QUEUE_ENABLE": "0", "ASCEND_LAUNCH_BLOCKING": "1", "HCCL_BUFFSIZE": ""}
    with pytest.raises(UsageError, match="HCCL_BUFFSIZE= is not an integer"):  # an empty value counts as set
        profile.apply("npu", own)
    own["HCCL_BUFFSIZE"] = "120"
    added = profile.apply("npu", own)
    assert not set(added) & set(own) and "CPU_AFFINITY_CONF" in added
    assert find_conflicts(own | added) == []
    assert profile.apply("none", own) == {}


@pytest.mark.parametrize(
    ("name", "environment", "error"),
    [
        ("npuu", {}, "^PROFILE=npuu: no such profile; did you mean 'npu'"),
        (
            "npu",
            {"ASCEND_LAUNCH_BLOCKING": "1"},
            r"^ASCEND_LAUNCH_BLOCKING=1 .* \(TASK_QUEUE_ENABLE comes from PROF",
        ),
        ("cpu", {"HCCL_ALGO": "level0:ring"}, "level0:NA$"),  # no variable is of the profile
    ],
)
def test_a_profile_that_cannot_be_applied(name: str, environment: dict[str, str], error: str) -> None:
    with pytest.raises(UsageError, match=error):
        profile.apply(name, environment)


def test_the_old_name_of_a_variable_in_the_profile_is_an_error() -> None:
    old, new = "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF"
    own = {old: "max_split_size_mb:128"}
    with pytest.raises(UsageError) as error:
        profile.apply("cuda", own)
    assert str(error.value) == (
        f"{old}=max_split_size_mb:128 is the old name of {new}, which PROFILE=cuda sets to expandable_segments:True; "
        f"set {new} instead, or PROFILE=none"
    )
    assert profile.apply("none", own) == {} and new not in profile.apply("cuda", {new: own[old]})  # the advice works
    assert new in profile.apply("cuda", {old: "expandable_segments:True"})  # equal values do not conflict
    with pytest.raises(UsageError, match=f"; keep {new}$"):  # the user set both
        profile.apply("cuda", own | {new: "expandable_segments:True"})


def test_a_profile_of_the_user_needs_reasons(tmp_path: Path) -> None:
    path = tmp_path / "mine.env"
    path.write_text("# About the file.\n\n# a = b\n# and more\nONE=a=b;c:d\n")
    assert profile.read(str(path)) == [profile.Variable("ONE", "a=b;c:d", "a = b and more")]
    path.write_text("# About the file.\n\nONE=1\n")
    with pytest.raises(UsageError, match=r"mine.env:3: ONE needs a comment above it"):
        profile.read(str(path))
    path.write_text("# why\nexport ONE=1\n")
    with pytest.raises(UsageError, match=r"mine.env:2: 'export ONE=1' is not NAME=value"):
        profile.read(str(path))


def test_a_profile_that_includes_itself_is_an_error(tmp_path: Path) -> None:
    one, two = tmp_path / "one.env", tmp_path / "two.env"
    one.write_text(f"include cpu\ninclude {two}\n")
    two.write_text(f"include cpu\ninclude {one}\n")
    with pytest.raises(UsageError, match=f"^{one} includes itself: {one} -> {two} -> {one}$"):
        profile.read(str(one))
    two.write_text("include cpu\n")  # including a profile twice is allowed
    assert profile.read(str(one)) == 2 * profile.read("cpu")


def failure(rank: int, when: float, error: str = "", exit_code: int = 1) -> Failure:
    killed = exit_code == -signal.SIGTERM
    return Failure(rank, rank // 2, f"host{rank // 2}", exit_code, when, error, f"log{rank}", killed)


def test_the_cause_comes_first() -> None:
    now = time.time()
    killed = failure(3, now - 100, "step 7", -signal.SIGKILL)  # its last line is old, and torchrun did not kill it
    timed_out = failure(1, now, "Traceback\nRuntimeError: timed out")
    silent = failure(0, now - 200, "")
    ended = failure(2, now - 300, "step 7", -signal.SIGTERM)
    lines = describe({0: [silent, timed_out], 1: [ended, killed]}, 3).splitlines()
    assert lines[0].startswith("first failure: rank 3 (node 1, host1), killed by SIGKILL, at ")
    assert lines[1:3] == ["  step 7", "  log: log3"]
    assert [line.split(",")[0] for line in lines[3:6]] == [f"later: rank {r} (node {r // 2}" for r in (1, 0, 2)]
    assert "RuntimeError: timed out (log: log1)" in lines[3] and "killed by torchrun" in lines[5]
    assert lines[6].startswith("node 2 has not reported")


def test_a_refused_job_is_told_from_a_failed_one(tmp_path: Path) -> None:
    def rank(number: int, code: int, text: str, cause: Any = None) -> Failure:
        log = tmp_path / str(number)
        log.mkdir(exist_ok=True)
        (log / "stderr.log").write_text(text)
        return Failure(number, 0, "host", code, 0.0, text, str(log), code == -signal.SIGTERM, cause)

    refused = rank(0, 2, "a warning\ntorchtitan_npu: error: training.steps is 0\n")
    killed = rank(1, -signal.SIGTERM, "")
    assert refusal([killed, refused]) == "training.steps is 0"
    assert refusal([refused, rank(2, 2, "")]) == "training.steps is 0"
    assert refusal([refused, rank(3, 1, "RuntimeError")]) is None
    assert refusal([rank(4, 2, "torchtitan_npu: first failure: rank 4", {"rank": 4})]) is None
    assert refusal([killed]) is None


def test_the_cause_that_the_ranks_have_found_comes_first() -> None:
    now = time.time()
    cause = {"rank": 2, "host": "host1", "pid": 7, "what": "ended without an error message", "details": "a hint"}
    later = replace(failure(0, now, "Connection closed by peer"), cause=cause)
    lines = describe({0: [later]}, 1).splitlines()
    assert lines[0].startswith("first failure: rank 2 (host1, pid 7), exit code 0, before ")
    assert lines[1:3] == ["  ended without an error message", "  a hint"]
    assert lines[3].startswith("later: rank 0 (node 0, host0), exit code 1: Connection closed by peer")
    killed = failure(2, now + 1, "step 7", -signal.SIGTERM)  # not by torchrun
    lines = describe({0: [later], 1: [killed]}, 2).splitlines()
    assert lines[0].startswith("first failure: rank 2 (node 1, host1), killed by SIGTERM, at ")
    assert lines[1:4] == ["  ended without an error message", "  a hint", "  step 7"]


def ended_rank(folder: Path, rank: int, exit_code: int, last: float, seen: float, raised: str = "") -> ProcessFailure:
    """Return a failure as torchrun records it, with the times of the last output and of its detection."""
    log = folder / "none_x" / "attempt_0" / str(rank)
    log.mkdir(parents=True)
    (log / "stdout.log").write_text("step 7\n")
    if raised:
        error = {"message": raised, "extraInfo": {"py_callstack": raised, "timestamp": str(int(last))}}
        (log / "error.json").write_text(json.dumps({"message": error}))
    for file in log.iterdir():
        os.utime(file, (last, last))
    failure = ProcessFailure(rank, 1, exit_code, str(log / "error.json"))
    if not raised:
        failure.timestamp = int(seen)
    return failure


@pytest.mark.parametrize(
    ("cause", "other", "shown", "followed"),
    [
        # Rank 1 raises but does not exit, because of another thread. Rank 0 times out.
        ((-signal.SIGTERM, 0, 9, "planted"), (1, 8, 8, "timed out"), "planted", "exit code 1: timed out"),
        ((-signal.SIGKILL, 0, 39, "planted"), (1, 8, 8, "timed out"), "planted", "exit code 1: timed out"),
        # Rank 0 does not exit after the failure of rank 1.
        ((1, 0, 0, "planted"), (-signal.SIGKILL, -9, KILLED_AFTER), "planted", "killed by SIGKILL: killed by torchrun"),
        ((3, 0, 0), (-signal.SIGKILL, -9, KILLED_AFTER), "step 7", "killed by SIGKILL: killed by torchrun"),
        # Another process killed rank 1, such as the kernel's out-of-memory killer.
        ((-signal.SIGKILL, 0, 1), (-signal.SIGTERM, -9, 2), "step 7", "killed by SIGTERM: killed by torchrun"),
        ((-signal.SIGKILL, 0, 1), (-signal.SIGKILL, -9, 31), "step 7", "killed by SIGKILL: killed by torchrun"),
    ],
    ids=str,
)
def test_a_rank_killed_by_torchrun_is_not_the_cause(
    cause: tuple[int, float, float], other: tuple[int, float, float], shown: str, followed: str, tmp_path: Path
) -> None:
    """Each rank: exit code, seconds of its last output and of its end, its error."""
    now = time.time()
    failures = {
        rank: ended_rank(tmp_path, rank, code, now + last, now + seen, *raised)
        for rank, (code, last, seen, *raised) in enumerate((other, cause))
    }
    lines = describe({0: failures_of(ChildFailedError("train", failures), 0, tmp_path)}, 1).splitlines()
    assert lines[0].startswith("first failure: rank 1 (node 0, ") and lines[1] == f"  {shown}"
    assert lines[2] == f"  log: {tmp_path / 'none_x/attempt_0/1'}"
    assert lines[3].startswith("later: rank 0 (node 0, ") and f"), {followed}" in lines[3]


def test_reports_of_an_earlier_launch_are_ignored(tmp_path: Path) -> None:
    now = time.time()
    for node in (0, 1):
        write_report(tmp_path, node, [failure(2 * node, now, "error")])
    assert set(gather_reports(tmp_path, [0, 1], started=now)) == {0, 1}
    os.utime(tmp_path / "node0.failures.json", (now - 3600, now - 3600))
    assert set(gather_reports(tmp_path, [0, 1], started=now, timeout=0)) == {1}


def test_errors_of_rank_0_are_deferred() -> None:
    console = io.StringIO()
    shown = DeferErrors(console, seconds=60)
    print("step 1", file=shown)
    for line in ("Traceback (most recent call last):", "RuntimeError: timed out"):
        print(line, file=shown)
    assert console.getvalue() == "step 1\n"
    shown.release()
    assert console.getvalue().endswith("step 1\nTraceback (most recent call last):\nRuntimeError: timed out\n")
    print("step 2", file=shown)
    print("[rank0]:[E1115 12:00:00 ProcessGroup.cpp] Watchdog caught a time-out", file=shown)
    shown.release(drop=True)
    assert console.getvalue().endswith("timed out\nstep 2\n")


def test_the_output_of_a_job_that_survives_its_error_is_shown() -> None:
    console = io.StringIO()
    shown = DeferErrors(console, seconds=0.05)
    print("Traceback (most recent call last):\nstep 2", file=shown)
    deadline = time.monotonic() + 10
    while "step 2" not in console.getvalue() and time.monotonic() < deadline:
        time.sleep(0.01)
    print("step 3", file=shown)
    assert console.getvalue() == "Traceback (most recent call last):\nstep 2\nstep 3\n"


def test_errors_of_a_failed_job_have_no_time_limit() -> None:
    console = io.StringIO()
    shown = DeferErrors(console, seconds=0.05)
    print("Traceback (most recent call last):", file=shown)
    shown.hold()
    time.sleep(0.3)
    print("RuntimeError: timed out", file=shown)
    assert console.getvalue() == ""
    shown.release()
    assert console.getvalue() == "Traceback (most recent call last):\nRuntimeError: timed out\n"


def test_the_docs_show_the_profiles() -> None:
    rows = [
        [cell.strip() for cell in line.split("|")[1:-1]]
        for line in (ROOT / "docs/how-to/launch.md").read_text().splitlines()
        if line.startswith("| `")
    ]
    npu, aiv = profile.apply("npu", {}), profile.apply("npu_aiv", {})
    assert [[f"`{name}`", npu.get(name, ""), value] for name, value in aiv.items()] == [
        row for row in rows if row[0].strip("`") in aiv
    ]


# --- network interfaces ---


SEVERAL = {"docker0": "172.17.0.1", "enp1": "10.0.0.2", "bond0": "192.168.7.2"}


def test_interfaces_of_this_host() -> None:
    found = addresses()
    assert "lo" not in found and all(address.count(".") == 3 for address in found.values())
    for name, address in found.items():
        assert interface_towards(address, found) == name
    assert interface_towards("no-such-host.invalid", found) is None


def test_hccl_takes_the_first_by_name_and_docker_last() -> None:
    assert hccl_choice(SEVERAL) == "bond0"
    assert hccl_choice({"docker0": "172.17.0.1"}) == "docker0"
    assert hccl_choice({}) is None


def test_the_doctor_warns_of_a_choice() -> None:
    line = check_interfaces(SEVERAL, {})
    assert line.status == "yellow" and "HCCL takes bond0" in line.what
    assert check_interfaces(SEVERAL, {"HCCL_SOCKET_IFNAME": "=enp1"}).status == "green"
    assert check_interfaces({"eth0": "10.0.0.2"}, {}).status == "green"


def test_the_launcher_chooses_the_interface_towards_node_0(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (*SELECTORS, "GLOO_SOCKET_IFNAME"):
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    monkeypatch.setattr(command, "addresses", lambda: SEVERAL)
    command.choose_interface("10.0.0.2")  # node 0's own address
    assert (os.environ["HCCL_SOCKET_IFNAME"], os.environ["GLOO_SOCKET_IFNAME"]) == ("=enp1", "enp1")
    monkeypatch.setenv("HCCL_SOCKET_IFNAME", "mine")
    command.choose_interface("192.168.7.2")
    assert os.environ["HCCL_SOCKET_IFNAME"] == "mine"
