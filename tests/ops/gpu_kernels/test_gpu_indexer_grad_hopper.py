"""The Gluon kernel of the indexer's gradients, on a Hopper GPU or else in a simulator, against the oracle."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from tests._helpers.gluon_simulator import simulated
from tests._helpers.kernel_checks import HALF_TYPES
from tests._helpers.sparse_oracle import ARRANGEMENTS, Documents
from tests.ops.gpu_kernels.test_gpu_indexer_loss import check_gradients_of_scores
from torchtitan_npu.ops.core.triton_kernel import is_hopper
from torchtitan_npu.ops.lightning_indexer import gluon_grad, op

CASES: dict[str, Any] = {
    "all keys, an odd number of rows": ("TND", [(4, 150), (0, 2), (3, 2)], 192, 6, 0, "head by head"),
    "the same keys at first, then others": ("BSND", [(3, 300)] * 2, 200, 64, 70, "strided"),
    "other keys, documents of a batch": ("BSND", [(5, 150), (2, 90)], 64, 40, 0, "contiguous"),
    "more places than are compared at once": ("TND", [(3, 2500)], 2300, 64, 2200, "contiguous"),
}


def run(**call: Any) -> tuple[Tensor, Tensor, Tensor]:
    name = "npu_lightning_indexer_grad"
    kernel = getattr(gluon_grad, name) if is_hopper(call["query"]) else simulated(gluon_grad, name)
    return kernel(**call)


def ascending(docs: Documents, top_k: int, same: int) -> list[Tensor]:
    """Select random keys of each row, and the first ``same`` ones, in ascending order with some places left free."""
    selected = []
    for visible in docs.visible():
        order = torch.rand(visible.shape, generator=docs.generator)
        order[:, :same] = -1
        best = order.masked_fill(~visible, 2).argsort(-1)[:, :top_k]
        best = best.masked_fill(~visible.gather(-1, best), visible.shape[1]).sort().values
        chosen = torch.full((len(visible), top_k), -1, dtype=torch.int32)
        chosen[:, : best.shape[1]] = best.masked_fill(best == visible.shape[1], -1)
        chosen[1::2, 5::50] = -1
        selected.append(chosen[:, None])
    return selected


@pytest.mark.parametrize("dtype", HALF_TYPES)
@pytest.mark.parametrize("case", CASES)
def test_agrees_with_the_oracle(dtype: torch.dtype, case: str) -> None:
    layout, sizes, top_k, heads, same, arranged = CASES[case]
    docs = Documents(layout, sizes, True, dtype, torch.Generator().manual_seed(0), ARRANGEMENTS[arranged])
    check_gradients_of_scores(run, docs, (heads, 1), 128, ascending(docs, top_k, same))


def test_places_without_a_key_are_ignored(half: torch.dtype) -> None:
    """Keys that the row may not attend to are ignored, wherever they are, and so are rows without keys."""
    docs = Documents("BSND", [(4, 70)], True, half, torch.Generator().manual_seed(0))
    clean = ascending(docs, 66, 66)
    clean[0][1] = -1
    call, expected = check_gradients_of_scores(run, docs, (3, 1), 128, clean)
    call["query"][:, 1] = call["weights"][:, 1] = torch.nan
    call["key"][:, 69] = torch.nan
    indices = call["sparse_indices"]
    indices[:, :3][indices[:, :3] < 0] = 69
    indices[:, 3][indices[:, 3] < 0] = 70
    call["dy"][indices >= 69] = torch.nan
    for one, other in zip(run(**call), expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-2, atol=1e-2)  # sums in another order, then rounded


def test_blocks_of_places_may_be_empty(half: torch.dtype) -> None:
    """Of two rows of a program, one has a key in the first block only and the other in the last."""
    docs = Documents("BSND", [(4, 300)], True, half, torch.Generator().manual_seed(0))
    selected = torch.full((4, 1, 256), -1, dtype=torch.int32)
    selected[[0, 3], 0, 0], selected[[1, 2], 0, 192] = 5, 7
    check_gradients_of_scores(run, docs, (64, 1), 128, [selected])


@pytest.mark.parametrize(
    ("heads", "key_heads", "size", "suits"),
    [(64, 1, 128, True), (8, 1, 128, True), (65, 1, 128, False), (64, 2, 128, False), (64, 1, 64, False)],
)
def test_choice_of_the_kernel(heads: int, key_heads: int, size: int, suits: bool) -> None:
    query, key = torch.zeros(1, 2, heads, size).bfloat16(), torch.zeros(1, 2, key_heads, size).bfloat16()
    assert op.grad_suits_gluon(query, key) == suits
    assert not op.grad_suits_gluon(query.float(), key.float())
