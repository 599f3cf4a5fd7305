"""Seeded orders of streams: a missing synchronization gives a wrong number, a correct program never does."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SEEDS = 20


def test_missing_synchronization_is_found() -> None:
    command = [sys.executable, "-m", "torchtitan_npu.cli.main", "emulate", "--seed", "1", "--", sys.executable]
    command += ["-m", "tests.emulator.stream_programs", str(SEEDS)]
    ran = subprocess.run(command, capture_output=True, text=True, cwd=ROOT)
    assert ran.returncode == 0, ran.stderr
    wrong = json.loads(ran.stdout.splitlines()[-1])
    planted = {name for name in wrong if name.endswith("planted")}
    assert len(planted) == 3 and all(wrong[name] > 0 for name in planted), wrong
    assert all(wrong[name] == 0 for name in wrong.keys() - planted), wrong


@pytest.mark.slow
def test_jobs_do_not_depend_on_the_order() -> None:
    """A few of the seeds of docs/results/emulator.md."""
    command = [sys.executable, "tools/emulator_seeds.py", "--seeds", "5"]
    ran = subprocess.run(command, capture_output=True, text=True, cwd=ROOT)
    assert ran.returncode == 0, ran.stdout + ran.stderr
