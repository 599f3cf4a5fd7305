"""The Gluon kernel of the indexer's scores, on a Hopper GPU or else in a simulator, against the oracle."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests._helpers.sparse_oracle import ARRANGEMENTS, Documents
from tests.gpu_kernels.gluon_simulator import simulated
from tests.gpu_kernels.kernel_checks import DEVICE, HALF_TYPES
from tests.gpu_kernels.test_gpu_lightning_indexer import arguments, check, parts_of
from torchtitan_npu.gpu_kernels.lightning_indexer import gluon, gluon_top_k
from torchtitan_npu.gpu_kernels.registry import KERNELS
from torchtitan_npu.ops.core.gpu import is_hopper

CASES: dict[str, Any] = {
    "several row blocks of a program": ("TND", [(30, 150), (0, 2), (3, 40), (9, 3)], 20, (64, 1), "contiguous"),
    "several key heads, some heads": ("BSND", [(5, 200)] * 2, 64, (40, 2), "strided"),
    "few heads": ("BSND", [(70, 300)], 130, (6, 1), "contiguous"),
}
IN_SIMULATOR = ("several row blocks of a program", "several key heads, some heads")
"""Cases of the default run."""


def kernel() -> Any:
    if is_hopper(torch.empty(0, device=DEVICE)):
        return gluon.npu_lightning_indexer
    return simulated(gluon, "npu_lightning_indexer", select_top_k=simulated(gluon_top_k, "select_top_k"))


@pytest.mark.parametrize(
    "case", [pytest.param(case, marks=[pytest.mark.slow] * (case not in IN_SIMULATOR)) for case in CASES]
)
@pytest.mark.parametrize("dtype", HALF_TYPES)
def test_agrees_with_the_oracle(dtype: torch.dtype, case: str) -> None:
    layout, sizes, top_k, heads, arranged = CASES[case]
    docs = Documents(layout, sizes, True, dtype, torch.Generator().manual_seed(0), ARRANGEMENTS[arranged])
    check(docs, parts_of(docs, heads, 128), top_k, kernel())


def test_chunks_of_rows(half: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """The workspace holds the scores of 16 rows, and is written three times."""
    monkeypatch.setattr("torchtitan_npu.gpu_kernels.lightning_indexer.triton.WORKSPACE", 0)
    docs = Documents("BSND", [(18, 90)] * 2, True, half, torch.Generator().manual_seed(0))
    check(docs, parts_of(docs, (40, 1), 128), 70, kernel())


def test_nan_is_selected() -> None:
    docs = Documents("BSND", [(1, 70)], False, torch.bfloat16, torch.Generator().manual_seed(0))
    parts = parts_of(docs, (64, 1), 128)
    parts[1][0][66] = torch.nan
    indices, values = (tensor.flatten().cpu() for tensor in kernel()(**arguments(docs, parts, 2)))
    assert 66 in indices.tolist() and values[indices == 66].isnan().all() and values.isnan().sum() == 1


@pytest.mark.parametrize(
    ("heads", "key_heads", "size", "suits"),
    [(64, 1, 128, True), (8, 1, 128, True), (128, 2, 128, True), (65, 1, 128, False), (64, 1, 64, False)],
)
def test_choice_of_the_kernel(heads: int, key_heads: int, size: int, suits: bool) -> None:
    query, key = (torch.zeros(1, 2, n, size, dtype=torch.bfloat16) for n in (heads, key_heads))
    first, options = KERNELS["npu_lightning_indexer"][0], {"layout_query": "BSND", "sparse_count": 2}
    assert first.hopper and first.suits(query=query, key=key, **options) == suits
    assert not first.suits(query=query.float(), key=key.float(), **options)
