"""``torchtitan-npu demo`` trains a small model twice and compares."""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path

import pytest

from torchtitan_npu.cli.main import main

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.slow
@pytest.mark.parametrize("model", ["deepseek_v32", "glm_moe_dsa"])
def test_the_converted_model_trains_alike(model: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["demo", "--model", model, "--out", str(tmp_path / "demo")]) == 0
    output = capfd.readouterr().out
    assert f"plot: {tmp_path}/demo/comparison.png" in output and f"{model}_debugmodel.toml" in output
    assert (tmp_path / "demo/comparison.png").exists() and (tmp_path / "demo/report.md").exists()


def test_another_model_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["demo", "--model", "glm"])
    assert ended.value.code == 2
    assert len(capsys.readouterr().err.splitlines()) == 1


PYTHON = """#!/bin/sh
case "$1 $2" in
    "-c import sys; print"*) echo "$VERSION" ;;
    "-m venv") mkdir -p "$3/bin" && touch "$3/bin/activate" && cp "$0" "$3/bin/pip" ;;
    install*) echo "output of pip" && test "$FAILS" = no ;;
esac
"""


@pytest.mark.parametrize(
    ("version", "packages", "calls", "fails"),
    [
        ("linux 3 12", "install torch", 3, "no"),
        ("linux 3 11", "install the versions of constraints.txt", 4, "no"),  # two processes at a time
        ("linux 3 11", "", 1, "yes"),
    ],
)
def test_the_set_up_is_a_line_per_step(version: str, packages: str, calls: int, fails: str, tmp_path: Path) -> None:
    """With another program in place of Python and pip. Their output is in a log."""
    (tmp_path / "python").write_text(PYTHON)
    (tmp_path / "python").chmod(0o755)
    environment = os.environ | {"VENV": str(tmp_path / "venv"), "PYTHON": str(tmp_path / "python")}
    environment |= {"FAILS": fails, "VERSION": version}
    command = ["bash", "-c", ". tools/setup_env.sh && echo active"]
    result = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    log = tmp_path / "venv/setup.log"
    first, create, *rest = re.sub(r" \(\d+ s\)", "", result.stdout).splitlines()
    assert first.startswith("setting up ") and create == f"create {tmp_path}/venv: done"
    if fails == "no":
        steps = ["install pip", packages, "install torchtitan-npu and what it needs"]
        assert rest == [f"{step}: done" for step in steps] + ["active"]
        assert not result.stderr and log.read_text() == "output of pip\n" * calls
    else:
        assert result.returncode == 1 and not rest
        error = "error: could not install pip; is the package index reachable?"
        assert result.stderr == f"output of pip\n{error} All output: {log}\n"
