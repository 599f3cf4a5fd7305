"""The tool that measures sparse attention's memory: the fused operators take no more than half of eager's."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_fused_attention_takes_at_most_half(tmp_path: Path) -> None:
    out = tmp_path / "memory.json"
    options = ["--seq-len", "2048", "--json", str(out)]
    subprocess.run([sys.executable, ROOT / "tools" / "bench" / "dsa_memory.py", *options], check=True, timeout=300)
    eager, fused = json.loads(out.read_text())["rows"]
    assert (eager["attention"], fused["attention"]) == ("eager", "npu_dsa")
    scores = 2048 * 2048 * 8 * 4  # of the debug model's heads in float32: eager attention keeps them more than once
    assert eager["peak_bytes"] > 2 * scores
    assert 0 < fused["peak_bytes"] <= eager["peak_bytes"] / 2
