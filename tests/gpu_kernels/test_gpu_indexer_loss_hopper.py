"""The Gluon kernels of the indexer's loss, on a Hopper GPU or else in a simulator, against the oracle."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests._helpers.sparse_oracle import ARRANGEMENTS, Documents
from tests.gpu_kernels.gluon_simulator import simulated
from tests.gpu_kernels.kernel_checks import DEVICE
from tests.gpu_kernels.test_gpu_indexer_loss import check_loss, make
from torchtitan_npu.gpu_kernels.indexer_kl_loss import gluon
from torchtitan_npu.gpu_kernels.lightning_indexer import gluon_grad, gluon_pairs
from torchtitan_npu.gpu_kernels.registry import KERNELS
from torchtitan_npu.ops.core.gpu import is_hopper

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
    name = "npu_sparse_lightning_indexer_grad_kl_loss"
    run = getattr(gluon, name)
    if not is_hopper(torch.empty(0, device=DEVICE)):
        plan_pairs = simulated(gluon_pairs, "plan_pairs")
        run = simulated(gluon, name, gradients=simulated(gluon_grad, "gradients", plan_pairs=plan_pairs))
    docs = Documents(layout, sizes, True, half, torch.Generator().manual_seed(0), ARRANGEMENTS[arranged])
    check_loss(run, docs, *make(docs, top_k, heads, 64, torch.float32, 512, (index_heads, 128)), SCALE)


@pytest.mark.parametrize(
    ("heads", "index_heads", "index_size", "suits"),
    [(128, 64, 128, True), (16, 8, 128, True), (129, 64, 128, False), (128, 65, 128, False), (128, 64, 64, False)],
)
def test_choice_of_the_kernel(heads: int, index_heads: int, index_size: int, suits: bool) -> None:
    sizes = ((heads, 512), (heads, 64), (index_heads, index_size))
    query, rope, index = (torch.zeros(1, 2, *size, dtype=torch.bfloat16) for size in sizes)
    kernel = KERNELS["npu_sparse_lightning_indexer_grad_kl_loss"][0]
    assert kernel.hopper and kernel.suits(query=query, query_rope=rope, query_index=index) == suits
    assert not kernel.suits(query=query.float(), query_rope=rope.float(), query_index=index.float())
