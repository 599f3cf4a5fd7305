"""The measured peak memory of sparse attention: the fused operators need at most half of eager attention."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.slow  # two processes import TorchTitan
def test_fused_attention_needs_at_most_half(tmp_path: Path) -> None:
    out = tmp_path / "memory.json"
    command = [sys.executable, ROOT / "tools/bench/peak_memory.py", "attention", "--seq-len", "2048", "--json", out]
    subprocess.run(command, check=True, timeout=300)
    eager, fused = json.loads(out.read_text())["rows"]
    assert (eager["attention"], fused["attention"]) == ("eager", "npu_dsa")
    scores = 2048 * 2048 * 8 * 4  # float32 scores of all heads, which eager attention stores more than once
    assert eager["peak_bytes"] > 2 * scores
    assert 0 < fused["peak_bytes"] <= eager["peak_bytes"] / 2
