"""Seeded orders of streams: a missing synchronization gives a wrong number, a correct program never does."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize(
    ("seeds", "programs"),
    [
        (20, ["wait_for_a_stream", "read_a_copy", "free_memory_in_use", "swap_optimizer", "copies"]),
        pytest.param(5, ["fsdp_prefetch", "key_exchange", "expert_exchange"], marks=pytest.mark.slow),
    ],
    ids=["programs", "jobs"],
)
def test_results_depend_on_the_order_only_without_synchronization(seeds: int, programs: list[str]) -> None:
    """A few of the seeds of docs/results/emulator.md."""
    planted = [f"planted {name}" for name in programs[:3] if seeds == 20]
    command = [sys.executable, "tools/emulator_seeds.py", "--seeds", str(seeds), "--programs"]
    ran = subprocess.run([*command, ",".join([*programs, *planted])], capture_output=True, text=True, cwd=ROOT)
    assert ran.returncode == 0, ran.stdout + ran.stderr
