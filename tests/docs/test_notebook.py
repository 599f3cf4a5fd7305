"""The notebook of the demo has valid code and runs, also without Jupyter."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tools.check_docs import ROOT
from torchtitan_npu.converters import CONVERTERS


def cells() -> list[str]:
    """Return the code of the notebook."""
    notebook = json.loads((ROOT / "docs/notebooks/demo.ipynb").read_text())
    return ["".join(cell["source"]) for cell in notebook["cells"] if cell["cell_type"] == "code"]


def test_the_notebook_uses_known_converters() -> None:
    settings: dict[str, object] = {}
    exec(cells()[0], settings)
    assert set(str(settings["converters"]).split(",")) <= set(CONVERTERS)
    for code in cells()[1:]:
        compile(code, "demo.ipynb", "exec")


@pytest.mark.slow
def test_the_notebook_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    import matplotlib

    matplotlib.use("agg")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    names: dict[str, object] = {}
    settings, *rest = cells()
    exec(settings.replace("steps, ranks = 15, 2", "steps, ranks = 2, 1"), names)
    assert names["steps"] == 2
    for code in rest:
        exec(code, names)
    printed = capsys.readouterr().out
    assert "2 steps" in printed and "npu_dsa: 6 SparseAttention" in printed
