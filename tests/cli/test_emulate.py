"""The command ``torchtitan-npu emulate`` without the emulator: arguments, messages, exit codes and signals."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from torchtitan_npu.cli import emulate
from torchtitan_npu.cli.arguments import memory_size
from torchtitan_npu.emulator.build import TASK_QUEUE, BuildError
from torchtitan_npu.emulator.environment import Machine, process_variables
from torchtitan_npu.errors import UsageError

SHOW = "import os; print(*(f'{k}={v}' for k, v in os.environ.items()), sep='\\n')"


@pytest.fixture
def built(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """Replace the build: the command starts its child without compiling anything."""
    monkeypatch.setattr(emulate, "build", lambda report, cann: tmp_path / "cann")
    return tmp_path / "cann"


def test_the_child_gets_the_emulated_machine(built: Path, capfd: pytest.CaptureFixture[str]) -> None:
    options = ["--chip", "Ascend910_9362", "--devices", "2", "--memory", "1.5GiB", "--cann", "8.5", "--seed", "7"]
    assert emulate.main([*options, "--", "python", "-c", SHOW]) == 0
    seen = dict(line.split("=", 1) for line in capfd.readouterr().out.splitlines() if "=" in line)
    assert seen["NPU_EMULATOR_CHIP"] == "Ascend910_9362" and seen["NPU_EMULATOR_DEVICES"] == "2"
    assert seen["NPU_EMULATOR_MEMORY"] == str(3 * 2**29) and seen["NPU_EMULATOR_CANN"].startswith("8.5")
    assert seen["ASCEND_HOME_PATH"] == str(built) and seen["LD_LIBRARY_PATH"].startswith(str(built / "lib64"))
    assert seen["NPU_EMULATOR_SEED"] == "7" and str(built) in seen["LD_PRELOAD"]
    assert not Path(seen["NPU_EMULATOR_FOLDER"]).exists(), "the folder of the collectives is removed"


def test_the_users_task_queue_setting_is_kept() -> None:
    assert process_variables(Path("/x"), {})["TASK_QUEUE_ENABLE"] == "0"
    queued = process_variables(Path("/x"), {"TASK_QUEUE_ENABLE": "2"})
    assert queued["TASK_QUEUE_ENABLE"] == "2" and queued["LD_PRELOAD"] == f"/x/lib64/{TASK_QUEUE}"
    assert "LD_PRELOAD" not in process_variables(Path("/x"), {})
    assert process_variables(Path("/x"), {"LD_LIBRARY_PATH": "/y"})["LD_LIBRARY_PATH"] == "/x/lib64:/y"


@pytest.mark.parametrize("code", [0, 3])
def test_the_exit_code_is_the_childs(built: Path, code: int) -> None:
    assert emulate.main(["--", "python", "-c", f"raise SystemExit({code})"]) == code


def test_a_signal_reaches_the_child() -> None:
    program = (
        "import signal, sys, time\n"
        "signal.signal(signal.SIGTERM, lambda *_: sys.exit(42))\n"
        "print('ready', flush=True)\ntime.sleep(60)"
    )
    run = (
        "import os, sys; from torchtitan_npu.cli.emulate import run; "
        f"sys.exit(run([sys.executable, '-c', {program!r}], dict(os.environ)))"
    )
    process = subprocess.Popen([sys.executable, "-c", run], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None and process.stdout.readline() == "ready\n"
    began = time.monotonic()
    process.send_signal(signal.SIGTERM)
    assert process.wait() == 42 and time.monotonic() - began < 30


def test_a_child_that_a_signal_ends_is_128_and_its_number() -> None:
    killed = [sys.executable, "-c", "import os; os.kill(os.getpid(), 9)"]
    assert emulate.run(killed, dict(os.environ)) == 137


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["python", "x.py"], "unrecognized arguments"),
        (["--devices", "2"], "no command: write it after --"),
        (["--memory", "much", "--", "true"], "'much' is no size: write a number and its unit, such as 60.9GiB"),
        (["--memory", "60.9", "--", "true"], "'60.9' is no size"),
        (["--memory", "0GiB", "--", "true"], "--memory must be more than 0"),
        (["--cann", "7", "--", "true"], "invalid choice: '7'"),
        (["--devices", "0", "--", "true"], "--devices must be 1 to 64"),
        (["--seed", "0", "--", "true"], "--seed must be at least 1"),
    ],
)
def test_wrong_arguments_are_one_line(argv: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        emulate.main(argv)
    error = capsys.readouterr().err
    assert ended.value.code == 2 and message in error and error.count("\n") == 1


def test_what_is_missing_is_one_line(
    built: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert emulate.main(["--", "no-such-program"]) == 2
    assert capsys.readouterr().err == "emulate: error: there is no program no-such-program\n"

    def fail(report: object, cann: str) -> Path:
        raise BuildError("gcc is needed to build the emulator: install gcc and binutils")

    monkeypatch.setattr(emulate, "build", fail)
    assert emulate.main(["--", "true"]) == 2
    assert "install gcc" in capsys.readouterr().err


def test_torchrun_runs_with_this_python(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    module = [sys.executable, "-m", "torch.distributed.run", "x.py"]
    assert emulate.resolve(["torchrun", "x.py"], path=os.environ["PATH"]) == module
    script = tmp_path / "torchrun"
    script.touch(mode=0o755)
    assert emulate.resolve(["torchrun", "x.py"], path=os.environ["PATH"]) == [str(script), "x.py"]


def test_an_unknown_chip_lists_the_chips(built: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert emulate.main(["--chip", "Ascend910B5", "--memory", "1GiB", "--", "true"]) == 2
    error = capsys.readouterr().err
    assert error.startswith("emulate: error: Ascend910B5 is no chip of torch_npu; did you mean 'Ascend910B")
    assert "Ascend910B3, " in error and "Ascend910_9362, " in error and error.count("\n") == 1


def test_the_memory_is_that_of_the_chip(built: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert Machine().variables()["NPU_EMULATOR_MEMORY"] == str(int(60.96 * 2**30))
    assert Machine("Ascend910_9362").variables()["NPU_EMULATOR_MEMORY"] == str(int(61.27 * 2**30))
    assert Machine("Ascend910B4").variables()["NPU_EMULATOR_MEMORY"] == str(int(29.5 * 2**30))
    assert Machine("Ascend910A", memory=2**30).variables()["NPU_EMULATOR_MEMORY"] == str(2**30)
    assert emulate.main(["--chip", "Ascend950PR_9579", "--", "true"]) == 2
    assert "the memory of Ascend950PR_9579 is not known: add --memory" in capsys.readouterr().err
    with pytest.raises(UsageError, match="is no chip"):
        Machine("910B3").variables()


def test_sizes() -> None:
    assert memory_size("60.9GiB") == int(60.9 * 2**30) and memory_size("512 MiB") == 2**29
    assert memory_size("64GB") == 64 * 10**9
