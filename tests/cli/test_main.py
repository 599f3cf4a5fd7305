"""The command ``torchtitan-npu``: subcommands, help texts, ``list``, and the scripts under their documented paths."""

from __future__ import annotations

import os
import re
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
    command = ["bash", "-c", line + '_torchtitan_npu; echo "${COMPREPLY[@]}"']
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.split()


def test_completion(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["completion"]) == 0
    script = capsys.readouterr().out
    assert completed(script, "pl") == ["plan"]
    assert completed(script, "") == [*COMMANDS, "--help"]
    assert completed(script, "plan", "--se") == ["--search"]
    assert completed(script, "plan", "--backend", "") == ["npu", "cuda", "cpu"]
    assert completed(script, "list", "c") == ["configs", "converters"]
    assert completed(script, "convert", "from-hf", "--mod") == ["--model"]
    assert completed(script, "plan", "--config", "x") == []  # bash completes file names then


def test_an_interrupted_command_is_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupted(argv: list[str]) -> int:
        raise KeyboardInterrupt

    monkeypatch.setattr("torchtitan_npu.cli.list.command.main", interrupted)
    assert main(["list", "configs"]) == 130
    assert capsys.readouterr().err == "torchtitan-npu list: interrupted\n"


def listed(what: str, capsys: pytest.CaptureFixture[str]) -> dict[str, str]:
    assert main(["list", what]) == 0
    lines = capsys.readouterr().out.splitlines()
    return {name: text.strip() for name, _, text in (line.partition(" ") for line in lines)}


def test_list(capsys: pytest.CaptureFixture[str]) -> None:
    assert listed("configs", capsys).keys() >= {str(ROOT / "train_configs/llama3_debugmodel.toml")}
    assert all(listed("configs", capsys).values())
    assert listed("converters", capsys).keys() == CONVERTERS.keys()
    assert listed("operators", capsys).keys() == listed("ops", capsys).keys() == OPS.keys()
    models = listed("models", capsys)
    assert models.keys() >= {"llama3", "qwen3", "deepseek_v3", "deepseek_v32", "qwen3_vl"}
    assert all("debugmodel" in flavors for flavors in models.values())


def test_an_unknown_list_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["list", "cats"])
    assert ended.value.code == 2
    assert len(capsys.readouterr().err.splitlines()) == 1


@pytest.mark.parametrize("script", ["doctor.py", "compare_loss.py", "launch.sh"])
def test_documented_scripts_run_without_torch(script: str, tmp_path: Path) -> None:
    """From another folder, in a checkout that is not installed, where ``import torch`` fails."""
    (tmp_path / "torch.py").write_text("raise ImportError('no torch')\n")
    interpreter = ["bash"] if script.endswith(".sh") else [sys.executable]
    environment = os.environ | {"PYTHONPATH": str(tmp_path), "PYTHON": sys.executable}
    result = subprocess.run(
        [*interpreter, ROOT / "tools" / script, "--help"], cwd=tmp_path, env=environment, capture_output=True, text=True
    )
    assert result.returncode == 0, result.stderr
    assert "torchtitan-npu" in result.stdout


SCRIPTS = sorted(
    path.relative_to(ROOT).as_posix()
    for path in (ROOT / "tools").rglob("*")
    if (path.suffix == ".sh" and "Sourced by" not in path.read_text())
    or (path.suffix == ".py" and "__main__" in path.read_text())
)


def test_help_of_tools_runs_nothing() -> None:
    """Every script parses its arguments before it does anything: it has a parser, or passes all of them on."""
    assert {"tools/launch.sh", "tools/demo.sh", "tools/test.sh", "tools/converter_table.py"} <= set(SCRIPTS)
    parses = re.compile(r"Parser\(|--help|main\(\[.*\*sys\.argv|launch \"\$@\"")
    assert [name for name in SCRIPTS if not parses.search((ROOT / name).read_text())] == []


@pytest.mark.parametrize("script", ["converter_table.py", "config_table.py"])
def test_help_of_tables_writes_nothing(script: str) -> None:
    pages = {page: page.stat().st_mtime_ns for page in (ROOT / "docs").rglob("*.md")}
    command = [sys.executable, ROOT / "tools" / script, "--help"]
    result = subprocess.run(command, env=FROM_CHECKOUT, capture_output=True, text=True)
    assert result.returncode == 0 and result.stdout.startswith(f"usage: {script}")
    assert {page: page.stat().st_mtime_ns for page in pages} == pages


@pytest.mark.parametrize("script", ["demo.sh", "test.sh"])
def test_help_creates_no_environment(script: str, tmp_path: Path) -> None:
    environment = os.environ | {"VENV": str(tmp_path / "venv"), "PYTHON": "/bin/false"}
    result = subprocess.run(
        ["bash", ROOT / "tools" / script, "--help"], env=environment, capture_output=True, text=True
    )
    assert result.returncode == 0, result.stderr
    assert result.stdout.startswith("usage: bash tools/") and not list(tmp_path.iterdir())
