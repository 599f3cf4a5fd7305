"""The command ``torchtitan-npu``: subcommands, help texts and ``list``."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from torchtitan_npu.cli.main import COMMANDS, main
from torchtitan_npu.converters import CONVERTERS
from torchtitan_npu.ops import OPS

ROOT = Path(__file__).resolve().parents[2]
FROM_CHECKOUT = os.environ | {"PYTHONPATH": str(ROOT)}


def test_without_a_command_the_usage_is_shown(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 2 and main(["--help"]) == 0
    usage = capsys.readouterr().out
    assert all(f"  {name} " in usage for name in COMMANDS)


def test_an_unknown_command_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["compara"]) == 2
    assert capsys.readouterr().err == "torchtitan-npu: unknown command 'compara'; did you mean 'compare'?\n"


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_shows_its_usage(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    try:
        code = main([name, "--help"])
    except SystemExit as ended:
        code = int(ended.code or 0)
    assert code == 0 and f"torchtitan-npu {name}" in capsys.readouterr().out


@pytest.mark.parametrize("name", [name for name in COMMANDS if name != "launch"])  # its arguments are the job's
def test_an_invalid_argument_is_exit_code_2_in_one_line(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main([name, "--no-such-option"])
    assert ended.value.code == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"torchtitan-npu {name}: ")


HEAVY = ("torch", "torchtitan", "transformers", "datasets", "matplotlib", "tensorboard", "pandas")
"""Packages that take seconds to import."""


def test_help_and_completion_import_nothing_heavy(tmp_path: Path) -> None:
    """So that each ``--help`` takes less than a second."""
    check = f"""
import sys
from torchtitan_npu.cli.main import COMMANDS, main
for command in [*([name, "--help"] for name in COMMANDS), ["completion"]]:
    try:
        main(command)
    except SystemExit:
        pass
    found = set({HEAVY!r}) & set(sys.modules)
    assert not found, (command, found)
"""
    result = subprocess.run([sys.executable, "-c", check], cwd=tmp_path, env=FROM_CHECKOUT, capture_output=True)
    assert result.returncode == 0, result.stderr.decode()
    assert not list(tmp_path.iterdir())


def completed(script: str, *words: str) -> list[str]:
    """Return the completions that bash finds for the last of ``words``."""
    line = f"{script}\nCOMP_WORDS=(torchtitan-npu {' '.join(map(repr, words))}); COMP_CWORD={len(words)}\n"
    command = ["bash", "-c", line + '_shtab_torchtitan_npu; echo "${COMPREPLY[@]}"']
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.split()


def test_completion(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["completion"]) == 0
    script = capsys.readouterr().out
    assert completed(script, "pl") == ["plan"]
    assert completed(script, "") == list(COMMANDS)
    assert completed(script, "plan", "--se") == ["--search"]
    assert completed(script, "plan", "--backend", "") == ["npu", "cuda", "cpu"]
    assert completed(script, "list", "c") == ["configs", "converters"]
    assert completed(script, "convert", "from-hf", "--mod") == ["--model"]
    assert completed(script, "compare", "ru") == ["run"]
    assert completed(script, "compare", "--assert") == ["--assert-equal"]
    assert completed(script, "compare", "run", "--candidate") == ["--candidate-converters"]
    assert completed(script, "plan", "--config", "pyproj") == ["pyproject.toml"]
    assert main(["completion", "zsh"]) == 0
    assert capsys.readouterr().out.startswith("#compdef torchtitan-npu")


@pytest.mark.parametrize(("module", "extra"), [("shtab", "completion"), ("no_such_module", None)])
def test_a_missing_dependency_of_one_command_names_its_extra(
    module: str, extra: str | None, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fails(argv: list[str]) -> int:
        raise ModuleNotFoundError(name=f"{module}.part")

    monkeypatch.setattr("torchtitan_npu.cli.completion.main", fails)
    if extra is None:
        with pytest.raises(ModuleNotFoundError):
            main(["completion"])
    else:
        assert main(["completion"]) == 2
        advice = f"pip install 'torchtitan-npu[{extra}]'"
        assert capsys.readouterr().err == f"torchtitan-npu completion: {module} is not installed: {advice}\n"


def test_an_interrupted_command_is_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupted(argv: list[str]) -> int:
        raise KeyboardInterrupt

    monkeypatch.setattr("torchtitan_npu.cli.list.main", interrupted)
    assert main(["list", "configs"]) == 130
    assert capsys.readouterr().err == "torchtitan-npu list: interrupted\n"


def listed(what: str, capsys: pytest.CaptureFixture[str]) -> dict[str, str]:
    assert main(["list", what]) == 0
    lines = capsys.readouterr().out.splitlines()
    return {name: text.strip() for name, _, text in (line.partition(" ") for line in lines)}


@pytest.mark.parametrize("buffered", [True, False])
def test_a_closed_output_is_no_traceback(buffered: bool) -> None:
    """As with ``| head``: a print fails, or the last flush."""
    reader, writer = os.pipe()
    os.close(reader)
    command = [sys.executable, "-m", "torchtitan_npu.cli.main", "list", "configs"]
    environment = os.environ | {"PYTHONUNBUFFERED": "" if buffered else "1"}
    ran = subprocess.run(command, cwd=ROOT, env=environment, stdout=writer, stderr=subprocess.PIPE, text=True)
    os.close(writer)
    assert (ran.returncode, ran.stderr) == (128 + signal.SIGPIPE, "")


def test_list(capsys: pytest.CaptureFixture[str]) -> None:
    assert listed("configs", capsys).keys() >= {str(ROOT / "train_configs/llama3_debugmodel.toml")}
    assert all(listed("configs", capsys).values())
    assert listed("converters", capsys).keys() == CONVERTERS.keys()
    assert listed("operators", capsys).keys() == listed("ops", capsys).keys() == OPS.keys()
    models = listed("models", capsys)
    assert models.keys() >= {"llama3", "qwen3", "deepseek_v3", "deepseek_v32", "qwen3_vl"}
    assert all("debugmodel" in flavors for flavors in models.values())


@pytest.mark.parametrize("name", ["doctor", "compare", "launch"])
def test_commands_that_diagnose_run_without_torch(name: str, tmp_path: Path) -> None:
    """From another folder, in a checkout that is not installed, where ``import torch`` fails."""
    (tmp_path / "torch.py").write_text("raise ImportError('no torch')\n")
    environment = os.environ | {"PYTHONPATH": f"{tmp_path}:{ROOT}"}
    command = [sys.executable, "-m", "torchtitan_npu.cli.main", name, "--help"]
    result = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    assert "torchtitan-npu" in result.stdout
