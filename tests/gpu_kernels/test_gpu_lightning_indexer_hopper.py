"""The Gluon kernel of the indexer's scores, on a Hopper GPU or else in a simulator, against the oracle."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.gpu_kernels.gluon_simulator import on_hopper, simulated
from tests.gpu_kernels.kernel_checks import HALF_TYPES, docs_of
from tests.gpu_kernels.test_gpu_lightning_indexer import check, check_nan, parts_of
from torchtitan_npu.gpu_kernels.lightning_indexer import gluon, gluon_top_k

CASES: dict[str, Any] = {
    "several row blocks of a program": ("TND", [(30, 150), (0, 2), (3, 40), (9, 3)], 20, (64, 1), "contiguous"),
    "several key heads, some heads": ("BSND", [(5, 200)] * 2, 64, (40, 2), "strided"),
    "few heads": ("BSND", [(70, 300)], 130, (6, 1), "contiguous"),
}
IN_SIMULATOR = ("several row blocks of a program", "several key heads, some heads")
"""Cases of the default run."""


def kernel() -> Any:
    return on_hopper(gluon, "npu_lightning_indexer", select_top_k=simulated(gluon_top_k, "select_top_k"))


@pytest.mark.parametrize(
    "case", [pytest.param(case, marks=[pytest.mark.slow] * (case not in IN_SIMULATOR)) for case in CASES]
)
@pytest.mark.parametrize("dtype", HALF_TYPES)
def test_agrees_with_the_oracle(dtype: torch.dtype, case: str) -> None:
    layout, sizes, top_k, heads, arranged = CASES[case]
    docs = docs_of(layout, sizes, dtype, arranged=arranged)
    check(docs, parts_of(docs, heads, 128), top_k, kernel())


def test_chunks_of_rows(half: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """The workspace holds the scores of 16 rows, and is written three times."""
    monkeypatch.setattr("torchtitan_npu.gpu_kernels.lightning_indexer.triton.WORKSPACE", 0)
    docs = docs_of("BSND", [(18, 90)] * 2, half)
    check(docs, parts_of(docs, (40, 1), 128), 70, kernel())


def test_nan_is_selected() -> None:
    check_nan(docs_of("BSND", [(1, 70)], torch.bfloat16, causal=False), (64, 1), 128, kernel())
