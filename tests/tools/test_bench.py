"""The benchmarks without a GPU, and the docs they write from numbers that are not all there."""

from __future__ import annotations

import json
import os
import runpy
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[2] / "tools" / "bench"))

import models
import record
import render
import render_curves

ROOT = Path(__file__).parents[2]
BENCH = ROOT / "tools" / "bench"


@pytest.mark.parametrize(
    "program",
    ["basic_kernels", "sparse_attention", "attention_sweep", "indexer_kernels", "host_dispatch", "rehearsed_memory"],
)
def test_without_a_gpu(program: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(sys, "argv", [f"{program}.py", *(["--device", "cuda"] if program == "host_dispatch" else [])])
    with pytest.raises(SystemExit, match=f"{program}.py measures a GPU, and there is none here"):
        runpy.run_path(str(BENCH / f"{program}.py"), run_name="__main__")


def test_models_without_a_gpu() -> None:
    """In a process of its own: it imports nothing of TorchTitan before the platform is prepared."""
    no_gpu = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, BENCH / "models.py"], capture_output=True, text=True, env=no_gpu, timeout=120
    )
    assert done.returncode == 1 and done.stderr == "models.py measures a GPU, and there is none here\n"


def test_rows_of_a_run_that_is_not_over_are_beside_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(record, "installed", lambda names: {"attn_gym": "0.0.17"} if names == record.PEERS else {})
    file, rows = tmp_path / "ops.json", [{"op": "swiglu"}]
    file.write_text("as it was")
    record.write_partial(file, rows, "cpu")
    assert file.read_text() == "as it was"
    assert json.loads((tmp_path / "ops.partial.json").read_text())["rows"] == rows
    record.write(file, [*rows, {"op": "permute"}], "cpu", copy_GB_s=1.0)
    assert [path.name for path in tmp_path.iterdir()] == ["ops.json"]
    written = json.loads(file.read_text())
    assert len(written["rows"]) == 2 and written["copy_GB_s"] == 1.0 and written["torch"] == torch.__version__
    assert "Triton not installed, attn_gym 0.0.17, " in render.source(written)


def test_a_row_that_took_too_long_is_no_result(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As one that ran is, and one that did not fit."""
    results = [{"tokens_per_second": 1.0, "memory": 1}, {"failed": "out of memory"}]
    too_long = models.in_a_process(4, "eager", 3, [], patience=0)
    monkeypatch.setattr(models, "need_gpu", lambda: None)
    monkeypatch.setattr(record, "machine", lambda device: "cpu")
    monkeypatch.setattr(sys, "argv", ["models.py", "--only", "eager", "--json", str(tmp_path / "models.json")])
    for second, failed in zip((results[1], too_long), (0, 1), strict=True):
        rows = iter([results[0], second])  # of 4 layers and of 8
        monkeypatch.setattr(models, "in_a_process", lambda *_, rows=rows: next(rows))
        assert models.main() == failed
        assert (tmp_path / "models.partial.json").exists() == failed
    assert "it did not end in 0 s" not in (tmp_path / "models.json").read_text()


@pytest.fixture
def docs(tmp_path: Path) -> Path:
    """The pages, without the numbers and the pictures."""
    (tmp_path / "images").mkdir()
    (tmp_path / "benchmarks").mkdir()
    for page in render.PAGES:
        shutil.copy(render.DOCS / page, tmp_path)
    return tmp_path


def test_the_docs_are_what_the_numbers_say(docs: Path) -> None:
    render.render(render.NUMBERS, docs)
    for page in render.PAGES:
        assert (docs / page).read_text() == (render.DOCS / page).read_text(), "run python tools/bench/run.py --render"
    assert {path.name for path in (docs / "images").iterdir()} == {"performance_curves.png", "performance_scaling.png"}


def test_runs_that_differ_are_divided_in_one_way_alone() -> None:
    """Fused runs that are all below the eager ones; and such as are the same."""
    eager = {name: [30.0 + place, 20.0] for place, name in enumerate(("eager", "absorbed", "nudged 1", "nudged 2"))}
    for shift, ways in ((-9.0, 1), (0.0, 35)):
        fused = {f"fused {place}": [loss + shift for loss in losses] for place, losses in enumerate(eager.values())}
        (line,) = render_curves.by_chance(eager | fused, list(fused))
        assert line.startswith(
            f"Of the 35 ways to divide these runs into two halves, this one among them, {ways} leave"
        ), line


def test_the_docs_name_what_is_not_among_the_numbers(docs: Path) -> None:
    def cut(part: str, keep: Any, **change: Any) -> None:
        numbers = json.loads((render.NUMBERS / f"{part}.json").read_text())
        numbers["rows"] = [row for row in numbers["rows"] if keep(row)]
        (docs / "benchmarks" / f"{part}.json").write_text(json.dumps(numbers | change))

    cut("curves", lambda row: row["variant"] == "eager")
    permute = {"op": "permute forward", "shape": "4 × 2", "eager": 0.26, "peers": {}, "ours": 0.13, "limit": 0.1}
    cut("ops", lambda row: False, rows=[permute])
    cut("indexer", lambda row: row.get("length") == 4096, date="2026-11-15", triton="3.6.0", peers={"attn_gym": "1.2"})
    failed = {"what": "attn_gym", "length": 4096, "failed": "ImportError: no such module"}
    cut("attention", lambda row: False, rows=[failed])
    cut("models", lambda row: row["variant"] == "dsa")
    cut("host_dispatch_cuda", lambda row: bool(row["us"].pop("eager")))
    render.render(docs / "benchmarks", docs)
    page = (docs / "performance.md").read_text()
    assert "Not measured: eager, latent vectors; eager, nudged; eager, nudged again; fused; " in page
    assert "performance_curves.png" not in page and not (docs / "images" / "performance_curves.png").exists()
    assert "Not measured: rms norm forward; unpermute forward; grouped matmul forward." in page
    assert "| Permute (4 × 2) | 260.0 µs | 130.0 µs | 130.0 µs | 50.0% |" in page
    assert "| attn_gym | 4096 | failed: `ImportError: no such module` |" in page
    assert "Triton 3.6.0, attn_gym 1.2, 2026-11-15" in page
