"""The Gluon kernels of the indexer's loss, on a Hopper GPU or else in a simulator, against the oracle."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.gpu_kernels.gluon_simulator import on_hopper, simulated
from tests.gpu_kernels.kernel_checks import docs_of
from tests.gpu_kernels.test_gpu_indexer_loss import check_loss, make
from torchtitan_npu.gpu_kernels.indexer_kl_loss import gluon
from torchtitan_npu.gpu_kernels.lightning_indexer import gluon_grad, gluon_pairs

SCALE = (512 + 64) ** -0.5
CASES: dict[str, Any] = {
    "several tiles of a program": ("TND", [(3, 150), (0, 2), (2, 3)], 130, (6, 3), "head by head"),
    "all heads, several blocks": ("BSND", [(3, 300)], 200, (128, 64), "contiguous"),
    "strided, some heads": ("BSND", [(2, 70)] * 2, 64, (72, 40), "strided"),
}
IN_SIMULATOR = ("several tiles of a program",)
"""Cases of the default run."""


@pytest.mark.parametrize(
    "case", [pytest.param(case, marks=[pytest.mark.slow] * (case not in IN_SIMULATOR)) for case in CASES]
)
def test_agrees_with_the_oracle(half: torch.dtype, case: str) -> None:
    layout, sizes, top_k, (heads, index_heads), arranged = CASES[case]
    gradients = simulated(gluon_grad, "gradients", plan_pairs=simulated(gluon_pairs, "plan_pairs"))
    run = on_hopper(gluon, "npu_sparse_lightning_indexer_grad_kl_loss", gradients=gradients)
    docs = docs_of(layout, sizes, half, arranged=arranged)
    check_loss(run, docs, *make(docs, top_k, heads, 64, torch.float32, 512, (index_heads, 128)), SCALE)
