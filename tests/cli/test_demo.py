"""``torchtitan-npu demo`` trains a small model twice and compares."""

from __future__ import annotations

import os
import re
import subprocess
import time
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


PYTHON = """#!/bin/sh
case "$1 $2" in
    "-c import sys; print"*) echo "$VERSION" ;;
    "-m venv") mkdir -p "$3/bin" && touch "$3/bin/activate" && cp "$0" "$3/bin/pip" ;;
    install*)
        echo "$*" >>"$VENV/pip"
        echo "output of pip"
        case "$*" in *"$FAILS"*) echo "ERROR: $FAILS" && exit 1 ;; esac
        case "$*" in *pip==*) echo "ERROR: of an earlier step" ;; esac
        sleep 0.5
        echo "$*" >>"$VENV/finished"
        ;;
esac
"""


PINNED = "install the versions of constraints.txt"
LAST = "install torchtitan-npu and what it needs"


@pytest.mark.parametrize(
    ("version", "extra", "fails", "done", "failed"),
    [
        ("linux 3 12", "", "none", ["install pip", "install torch", LAST], ""),
        ("linux 3 11", "dev", "none", ["install pip", "install torch", LAST], ""),
        ("linux 3 11", "", "none", ["install pip", PINNED, LAST], ""),
        ("linux 3 11", "", "pip==", [], "install pip"),
        ("linux 3 11", "", "triton==", ["install pip"], PINNED),  # the first of two processes
        ("linux 3 11", "", "pytest==", ["install pip"], PINNED),  # the second one
    ],
)
def test_the_set_up_is_a_line_per_step(
    version: str, extra: str, fails: str, done: list[str], failed: str, tmp_path: Path
) -> None:
    """With another program in place of Python and pip, which fails for one package. Their output is in a log."""
    (tmp_path / "python").write_text(PYTHON)
    (tmp_path / "python").chmod(0o755)
    environment = os.environ | {"VENV": str(tmp_path / "venv"), "PYTHON": str(tmp_path / "python")}
    environment |= {"FAILS": fails, "VERSION": version, "EXTRA": extra}
    command = ["bash", "-c", ". tools/setup_env.sh && echo active"]
    result = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    log = tmp_path / "venv/setup.log"
    first, create, *rest = re.sub(r" \(\d+ s\)", "", result.stdout).splitlines()
    assert first.startswith("setting up ") and create == f"create {tmp_path}/venv: done"
    assert rest == [f"{step}: done" for step in done] + ["active"] * (not failed)
    of_pip = f"ERROR: {fails}"
    assert {"output of pip", *[of_pip] * bool(failed)} <= set(log.read_text().splitlines())
    assert result.returncode == bool(failed)
    error = f"error: could not {failed}; is the package index reachable? All output: {log}"
    assert result.stderr.splitlines() == ([of_pip, error] if failed else [])
    if failed:
        time.sleep(0.6)  # a process that goes on would finish
        finished = tmp_path / "venv/finished"
        assert len(finished.read_text().splitlines() if finished.exists() else []) == len(done)
    else:
        _, *pinned, last = (tmp_path / "venv/pip").read_text().splitlines()
        assert "-c constraints.txt" in last
        assert [("--no-deps" in call) for call in pinned] == ([True, True] if PINNED in done else [False])
