"""The measured peak memory of sparse attention: the fused operators need at most half of eager attention."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.slow  # two processes import TorchTitan
def test_fused_attention_needs_at_most_half() -> None:
    command = [sys.executable, ROOT / "tools/bench/peak_memory.py", "attention", "--seq-len", "2048"]
    printed = subprocess.run(command, check=True, timeout=300, stdout=subprocess.PIPE, text=True).stdout
    eager, fused = (line.split(" | ") for line in printed.splitlines()[-2:])
    assert (eager[0], fused[0]) == ("| eager", "| npu_dsa")
    scores = 2048 * 2048 * 8 * 4  # float32 scores of all heads, which eager attention stores more than once
    assert int(eager[1]) > 2 * scores / 2**20
    assert 0 < int(fused[1]) <= int(eager[1]) / 2
