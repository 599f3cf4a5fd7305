"""tools/chaos.py: seeded faults in small jobs, which end as documented and resume without losing anything."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tools.chaos import main
from tools.fault_injection.cases import Outcome, compare
from tools.fault_injection.jobs import STEPS, Reference, curve

ROOT = Path(__file__).parents[2]


def test_ten_seeded_faults(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Every kind of fault but a slow rank, in all four phases. A pipeline without FSDP starts in the least time."""
    failed = main(["--seed=45", "--cases=10", "--jobs=llama3:pp2", f"--work={tmp_path}", "--parallel=2"])
    printed = capsys.readouterr().out
    assert not failed and "10 faults, 0 with problems" in printed, printed


def write_run(folder: Path, loss: float, checksum: str) -> None:
    (folder / f"checkpoint/step-{STEPS}").mkdir(parents=True)
    files = {"__0_0.distcp": {"size": 1, "checksum": checksum}}
    manifest = {"manifest": json.dumps({"files": files})}
    (folder / f"checkpoint/step-{STEPS}/manifest.json").write_text(json.dumps(manifest))
    (folder / "curve0").write_text(json.dumps({"step": 1, "loss": loss.hex()}) + "\n")


@pytest.mark.parametrize(
    ("loss", "checksum", "problem"),
    [
        (1.5, "a", ""),
        (1.5 + 2**-52, "a", "rank 0 step 1: "),
        (1.5, "b", "the last checkpoint differs"),
    ],
)
def test_one_other_bit_is_a_problem(loss: float, checksum: str, problem: str, tmp_path: Path) -> None:
    write_run(tmp_path / "expected", 1.5, "a")
    write_run(tmp_path / "actual", loss, checksum)
    outcome = Outcome("", 0, "", "", "")
    reference = Reference(tmp_path / "expected", curve(tmp_path / "expected"), [])
    compare(reference, tmp_path / "actual", outcome)
    assert len(outcome.problems) == bool(problem) and "".join(outcome.problems).startswith(problem)


@pytest.mark.slow
def test_an_interrupted_campaign_leaves_no_process(tmp_path: Path) -> None:
    command = [sys.executable, ROOT / "tools/chaos.py", "--jobs=llama3:pp2", f"--work={tmp_path}"]
    with subprocess.Popen(command, env=os.environ | {"PYTHONPATH": str(ROOT)}) as process:
        file = tmp_path / "reference/llama3_pp2/job/pid0"
        while not file.exists():
            time.sleep(0.1)
        process.send_signal(signal.SIGTERM)
        assert process.wait(timeout=30) == 128 + signal.SIGTERM
    deadline = time.monotonic() + 30
    while Path(f"/proc/{file.read_text()}").exists():
        assert time.monotonic() < deadline
        time.sleep(0.1)
