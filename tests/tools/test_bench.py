"""The benchmarks: every program imports, and the tables of the docs are current."""

from __future__ import annotations

import importlib
import re
import shutil
import sys
from pathlib import Path

import pytest
import torch

from torchtitan_npu.ops import OPS

sys.path.insert(0, str(Path(__file__).parents[2] / "tools" / "bench"))

import harness
import indexer_kernels
import run
import step_profile

BENCH = Path(harness.__file__).parent


@pytest.mark.parametrize("program", sorted(path.stem for path in BENCH.glob("*.py")))
def test_every_program_imports_without_a_device(program: str) -> None:
    importlib.import_module(program)


def test_benchmarks_call_existing_operators() -> None:
    called = {name for path in BENCH.glob("*.py") for name in re.findall(r"\bnpu\.(npu_\w+)", path.read_text())}
    assert len(called) > 8 and called <= OPS.keys()


def test_the_tables_of_the_docs_are_current(tmp_path: Path) -> None:
    docs = tmp_path / "docs"
    shutil.copytree(run.DOCS, docs)
    run.render(docs)
    for page in docs.rglob("*.md"):
        expected = (run.DOCS / page.relative_to(docs)).read_text()
        assert page.read_text() == expected, "run python tools/bench/run.py --render"


def test_the_permutation_test_of_curves() -> None:
    """If all fused runs are below the eager ones, no other division differs as much. Equal runs differ in none."""
    eager = {name: [30.0 + run, 20.0] for run, name in enumerate(("eager", "absorbed", "nudged 1", "nudged 2"))}
    for shift, divisions in ((-9.0, 1), (0.0, 35)):
        fused = {f"fused {number}": [loss + shift for loss in losses] for number, losses in enumerate(eager.values())}
        line = run.permutation_test(eager | fused, list(fused))
        assert line.startswith(f"Of the 35 divisions of these runs into two halves, {divisions} have"), line


def test_fp8_inputs_of_the_indexer_have_exact_bfloat16_values() -> None:
    """So our scores can be compared with those of a kernel that takes FP8, without a difference by rounding."""
    torch.manual_seed(0)
    shapes = {"query": (1, 5, 64, 128), "key": (1, 5, 1, 128), "weights": (1, 5, 64)}
    tensors = {name: torch.randn(shape, dtype=torch.bfloat16) for name, shape in shapes.items()}
    fp8 = indexer_kernels.in_fp8(**tensors)
    rounded = indexer_kernels.from_fp8(fp8)
    scale = fp8["kv_scales"].double()[:, None, None]
    exact = {"query": fp8["q"].double(), "key": fp8["kv"].double()[:, None] * scale}
    scales = {"query": 1.0, "key": scale}
    for name, values in exact.items():
        assert torch.equal(rounded[name][0].double(), values)
        # e4m3 rounds to 3 bits after the leading one, and values below its smallest normal number to a multiple.
        distance = (values - tensors[name][0].double()).abs()
        assert (distance <= tensors[name][0].double().abs() * 2.0**-4 + scales[name] * 2.0**-10).all()
    assert torch.equal(rounded["weights"], tensors["weights"])
    assert fp8["ke"].tolist() == [1, 2, 3, 4, 5]


def test_a_missing_peer_has_a_row() -> None:
    row = harness.of_peer(indexer_kernels.deep_gemm_error, {}, {}, 1.0, what="scores", length=4)
    assert row["failed"].startswith("ModuleNotFoundError") and row["length"] == 4


def test_a_wrong_result_ends_a_benchmark() -> None:
    torch.manual_seed(0)
    exact = torch.randn(64, 64, dtype=torch.float64)
    assert 0.5 < harness.error(exact.bfloat16(), exact) <= 1.01
    for wrong in (exact * (1 + 2**-6), -exact, exact.roll(1, 0), exact * torch.nan):
        with pytest.raises(SystemExit, match="wrong result"):
            harness.error(wrong.bfloat16(), exact)


def test_the_work_of_a_step() -> None:
    """Bytes of a tensor count once per read and once per write; an expanded tensor has the bytes of its memory."""
    a, b, sums = torch.ones(4, 8), torch.ones(8, 2), torch.zeros(4, 2)
    with step_profile.Work() as work:
        sums.copy_(a @ b)
        sums.add_(torch.ones(1).expand(4, 2))
    assert work.flops["aten::mm"] == 2 * 4 * 8 * 2
    assert work.bytes["aten::mm"] == 4 * (32 + 16 + 8)
    assert work.bytes["aten::copy_"] == 4 * (8 + 8)
    assert work.bytes["aten::add_"] == 4 * (8 + 1 + 8)
