"""The command ``torchtitan-npu``: subcommands, help texts, ``list``, and the scripts under their documented paths."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from torchtitan_npu.cli.main import COMMANDS, main
from torchtitan_npu.converters import CONVERTERS
from torchtitan_npu.ops import OPS

ROOT = Path(__file__).resolve().parents[2]


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


def listed(what: str, capsys: pytest.CaptureFixture[str]) -> dict[str, str]:
    assert main(["list", what]) == 0
    lines = capsys.readouterr().out.splitlines()
    return {name: text.strip() for name, _, text in (line.partition(" ") for line in lines)}


def test_list(capsys: pytest.CaptureFixture[str]) -> None:
    assert listed("configs", capsys).keys() >= {str(ROOT / "train_configs/llama3_debugmodel.toml")}
    assert all(listed("configs", capsys).values())
    assert listed("converters", capsys).keys() == CONVERTERS.keys()
    assert listed("operators", capsys).keys() == OPS.keys()
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
