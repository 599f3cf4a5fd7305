"""The tool that compares converted training with eager: it runs, and its yardstick is one."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_a_row_for_each_converter_and_for_a_nudge(tmp_path: Path) -> None:
    out = tmp_path / "parity.json"
    options = ["--models", "llama3", "--steps", "2", "--seq-len", "32", "--out", str(out)]
    subprocess.run([sys.executable, ROOT / "tools" / "parity.py", *options], check=True, cwd=ROOT, timeout=300)
    rows = {row["converters"]: row for row in json.loads(out.read_text())}
    *converted, nudged = rows
    assert converted == ["npu_rms_norm", "npu_rope", "all"]
    assert all(row["loss"] < 1e-6 and row["gradient norm"] < 1e-5 for row in rows.values())
    assert rows[nudged]["gradient norm"] > 0
