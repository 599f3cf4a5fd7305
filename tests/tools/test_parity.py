"""The tool that compares converted training with eager and many ranks with one: it runs, and its yardstick is one."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from pathlib import Path

import pytest
from rich.console import Console

PIPELINES = ["PP2", "PP2, interleaved", "PP2, zero-bubble"]
ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tools"))


def test_a_row_for_each_converter_and_for_a_nudge(tmp_path: Path) -> None:
    out = tmp_path / "parity.json"
    options = ["--models", "llama3", "--steps", "2", "--seq-len", "32", "--out", str(out)]
    subprocess.run([sys.executable, ROOT / "tools" / "parity.py", *options], check=True, cwd=ROOT, timeout=300)
    rows = {row["converters"]: row for row in json.loads(out.read_text())}
    *converted, nudged = rows
    assert converted == ["npu_rms_norm", "npu_rope", "all"]
    assert all(row["loss"] < 1e-6 and row["gradient norm"] < 1e-5 for row in rows.values())
    assert rows[nudged]["gradient norm"] > 0


def test_a_row_for_each_layout() -> None:
    from curve_parity.layouts import compare_layouts, missed
    from parity import parse_args

    args = parse_args(["--layouts", "PP2", "--steps", "2", "--seq-len", "32"])
    assert args.models == ["deepseek_v32"]
    (row,) = compare_layouts("deepseek_v32", args, Console())
    assert (row["layout"], row["ranks"]) == ("PP2", 2)
    assert missed([row]) == []
    for what, wrong in (("loss", 2e-5), ("gradient norm", 2e-4), ("loss", math.nan)):
        assert len(missed([{**row, what: wrong}])) == 1


def test_a_curve_that_ends_nowhere_is_not_near() -> None:
    from curve_parity.training import apart

    assert apart([1.0, 2.0], [1.0, 2.5]) == pytest.approx(0.2)
    assert math.isnan(apart([1.0, math.nan, 1.0], [1.0, 1.0, 1.0]))


def test_ranks_are_those_that_degrees_multiply_to() -> None:
    from curve_parity.layouts import LAYOUTS, ranks_of

    on = {ranks: [layout for layout in LAYOUTS if ranks_of(layout) == ranks] for ranks in (2, 4, 8)}
    assert on[2] == ["FSDP2", "TP2", "EP2", "CP2, contiguous", "CP2, head-tail", *PIPELINES, "TP2·EP2"]
    assert sum(map(len, on.values())) == len(LAYOUTS)
