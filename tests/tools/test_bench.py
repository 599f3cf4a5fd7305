"""The benchmarks: every program imports and shows its help, and the tables of the docs are current."""

from __future__ import annotations

import re
import runpy
import shutil
import sys
from pathlib import Path

import pytest
import torch

from torchtitan_npu.ops import OPS

sys.path.insert(0, str(Path(__file__).parents[2] / "tools" / "bench"))

import harness
import render

BENCH = Path(harness.__file__).parent
PROGRAMS = sorted(path.stem for path in BENCH.glob("*.py") if "__main__" in path.read_text())


@pytest.mark.parametrize("program", [name for name in PROGRAMS if name != "moe_traffic"])  # it has no arguments
def test_every_program_shows_its_help(
    program: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", [f"{program}.py", "--help"])
    with pytest.raises(SystemExit) as ended:
        runpy.run_path(str(BENCH / f"{program}.py"), run_name="__main__")
    assert ended.value.code == 0
    assert f"python tools/bench/{program}.py" in capsys.readouterr().out


def test_benchmarks_call_existing_operators() -> None:
    called = {name for path in BENCH.glob("*.py") for name in re.findall(r"\bnpu\.(npu_\w+)", path.read_text())}
    assert len(called) > 8 and called <= OPS.keys()


def test_the_tables_of_the_docs_are_current(tmp_path: Path) -> None:
    docs = tmp_path / "docs"
    shutil.copytree(render.DOCS, docs)
    render.render(render.NUMBERS, docs)
    for page in docs.rglob("*.md"):
        expected = (render.DOCS / page.relative_to(docs)).read_text()
        assert page.read_text() == expected, "run python tools/bench/run.py --render"


def test_the_permutation_test_of_curves() -> None:
    """If all fused runs are below the eager ones, no other division differs as much. Equal runs differ in none."""
    eager = {name: [30.0 + place, 20.0] for place, name in enumerate(("eager", "absorbed", "nudged 1", "nudged 2"))}
    for shift, divisions in ((-9.0, 1), (0.0, 35)):
        fused = {f"fused {place}": [loss + shift for loss in losses] for place, losses in enumerate(eager.values())}
        (line,) = render.permutation_test(eager | fused, list(fused))
        assert line.startswith(f"Of the 35 divisions of these runs into two halves, {divisions} have"), line


def test_a_wrong_result_ends_a_benchmark() -> None:
    torch.manual_seed(0)
    exact = torch.randn(64, 64, dtype=torch.float64)
    assert 0.5 < harness.error(exact.bfloat16(), exact) <= 1.01
    for wrong in (exact * (1 + 2**-6), -exact, exact.roll(1, 0), exact * torch.nan):
        with pytest.raises(SystemExit, match="wrong result"):
            harness.error(wrong.bfloat16(), exact)
