"""tools/chaos.py: seeded faults in small jobs, which end as documented and resume without losing anything."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from tools.chaos import main
from tools.fault_injection.cases import PHASES, Outcome, compare, draw, least_step
from tools.fault_injection.jobs import JOBS, STEPS, Reference, curve

ROOT = Path(__file__).parents[2]


LAYOUTS = ("llama3:pp2", "qwen3_moe:ep2", "llama3:shard2", "llama3:cp2", "llama3:replicate2")


@pytest.mark.parametrize(
    ("seed", "faults", "layouts", "row"),
    [
        (1624, 4, LAYOUTS[:2], "| llama3 pp2 | 2 | 2 |  |"),
        pytest.param(11361, 10, LAYOUTS, "| llama3 pp2 | 6 | 5 | 3 |", marks=pytest.mark.slow),
    ],
    ids=["four", "ten"],
)
def test_seeded_faults(
    seed: int, faults: int, layouts: tuple[str, ...], row: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """All four phases and each of the layouts. The ten are every kind of fault but a slow rank."""
    file = tmp_path / "outcomes.json"
    command = [f"--seed={seed}", f"--cases={faults}", f"--work={tmp_path}", f"--json={file}", "--jobs", *layouts]
    failed = main([*command, "--parallel=2", "--timeout=5"])
    printed = capsys.readouterr().out
    assert not failed and f"{faults} faults, 0 with problems" in printed, printed
    outcomes = json.loads(file.read_text())["outcomes"]
    assert {outcome["phase"] for outcome in outcomes} == set(PHASES)
    jobs = " ".join(outcome["job"] for outcome in outcomes)
    assert all(job.replace(":", " ") in jobs for job in layouts)
    assert main(["--table", str(file)]) == 0
    assert row in capsys.readouterr().out
    assert main(command[:-1]) == 2  # other jobs are another campaign


def test_an_exception_in_a_case_is_an_outcome(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "reference").write_text("")  # no baseline can be written
    file = tmp_path / "outcomes.json"
    arguments = ["--jobs=llama3:pp2", "--cases=2", f"--work={tmp_path}", f"--json={file}"]
    assert main(arguments) == 1
    assert "2 faults, 2 with problems" in capsys.readouterr().out
    outcomes = json.loads(file.read_text())["outcomes"]
    assert [outcome["ending"] for outcome in outcomes] == ["error", "error"]
    assert "NotADirectoryError" in outcomes[0]["problems"][0]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["outcomes.json", "reference"]


def write_run(folder: Path, loss: float = 1.5, checksum: str = "a", saved: int = STEPS, validated: int = 3) -> None:
    (folder / f"checkpoint/step-{saved}").mkdir(parents=True)
    files = {"__0_0.distcp": {"size": 1, "checksum": checksum}}
    manifest = {"manifest": json.dumps({"files": files})}
    (folder / f"checkpoint/step-{saved}/manifest.json").write_text(json.dumps(manifest))
    entries = [
        {"step": 1, "loss": loss.hex()},
        *({"validation": step, "loss": "0"} for step in range(1, validated + 1)),
    ]
    (folder / "curve0").write_text("".join(f"{json.dumps(entry)}\n" for entry in entries))


@pytest.mark.parametrize(
    ("run", "problem"),
    [
        ({}, ""),
        ({"loss": 1.5 + 2**-52}, "rank 0 step 1: "),
        ({"checksum": "b"}, "the last checkpoint differs"),
        ({"saved": STEPS - 2}, f"no checkpoint of step {STEPS}"),
        ({"validated": 1}, "no rank 0 validation 2"),
    ],
)
def test_one_other_bit_is_a_problem(run: dict[str, Any], problem: str, tmp_path: Path) -> None:
    write_run(tmp_path / "expected")
    write_run(tmp_path / "actual", **run)
    # it resumed after step 3, whose validation is not repeated
    outcome = Outcome("", 0, "", "", "", ending="all killed", resumed_at=4)
    reference = Reference(tmp_path / "expected", curve(tmp_path / "expected"), [])
    compare(reference, tmp_path / "actual", outcome)
    assert len(outcome.problems) == bool(problem) and "".join(outcome.problems).startswith(problem)


def test_a_job_that_finished_has_its_last_checkpoint_and_all_validations(tmp_path: Path) -> None:
    case = draw(45, 4, [JOBS["llama3:pp2"]])
    assert case.kind == "full disk, growing file" and case.is_last
    assert least_step(case, "finished: nothing was left to write") == STEPS
    write_run(tmp_path / "expected")
    write_run(tmp_path / "actual", validated=2)
    outcome = case.outcome("finished")
    outcome.resumed_at = 4
    compare(Reference(tmp_path / "expected", curve(tmp_path / "expected"), []), tmp_path / "actual", outcome)
    assert outcome.problems == ["no rank 0 validation 3"]


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
