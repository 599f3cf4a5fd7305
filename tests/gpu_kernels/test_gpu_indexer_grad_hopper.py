"""The Gluon kernel of the indexer's gradients, on a Hopper GPU or else in a simulator, against the oracle."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from torch import Tensor

from tests._helpers.sparse_oracle import Documents
from tests.gpu_kernels.gluon_simulator import on_hopper, simulated
from tests.gpu_kernels.kernel_checks import DEVICE, HALF_TYPES, docs_of
from tests.gpu_kernels.test_gpu_indexer_loss import check_gradients_of_scores
from torchtitan_npu.gpu_kernels.lightning_indexer import gluon_grad, gluon_pairs
from torchtitan_npu.gpu_kernels.sparse_flash_attention.triton_rows import Rows

CASES: dict[str, Any] = {
    "all keys, an odd number of rows": ("TND", [(4, 150), (0, 2), (3, 2)], 192, 6, 0, "head by head"),
    "the same keys at first, then others": ("BSND", [(3, 300)] * 2, 200, 64, 70, "strided"),
    "other keys, documents of a batch": ("BSND", [(5, 150), (2, 90)], 64, 40, 0, "contiguous"),
    "more entries than are compared at once": ("TND", [(3, 2500)], 2300, 64, 2200, "contiguous"),
}


def function(name: str) -> Any:
    """Return a function of the kernel's module, or its simulation."""
    plan_pairs = simulated(gluon_pairs, "plan_pairs")
    return on_hopper(gluon_grad, name, WORKSPACE=gluon_grad.WORKSPACE, plan_pairs=plan_pairs)


def run(**call: Any) -> tuple[Tensor, Tensor, Tensor]:
    return function("npu_lightning_indexer_grad")(**call)


def ascending(docs: Documents, top_k: int, same: int, free: bool = True) -> list[Tensor]:
    """Select keys in ascending order. With ``free``, some entries before the last key have none."""
    selected = docs.select_ascending(top_k, same)
    if free:
        for chosen in selected:
            chosen[1::2, :, 5::50] = -1
    return selected


@pytest.mark.parametrize("dtype", HALF_TYPES)
@pytest.mark.parametrize("case", CASES)
def test_agrees_with_the_oracle(dtype: torch.dtype, case: str) -> None:
    layout, sizes, top_k, heads, same, arranged = CASES[case]
    docs = docs_of(layout, sizes, dtype, arranged=arranged)
    check_gradients_of_scores(run, docs, (heads, 1), 128, ascending(docs, top_k, same))


@pytest.mark.parametrize("dtype", HALF_TYPES)
def test_shared_keys_at_other_entries(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows of two documents share keys of a block at least, and are copied in two chunks.

    A pair is of both documents, and a third document has all keys selected: these are not copied.
    """
    monkeypatch.setattr(gluon_grad, "WORKSPACE", 0)
    docs = docs_of("TND", [(13, 150), (6, 120), (4, 90)], dtype)
    selected = ascending(docs, 100, 0, free=False)
    for chosen in selected[:2]:
        for one, other in zip(chosen[1:, 0], chosen[:-1, 0], strict=True):
            assert torch.isin(one, other).sum() >= 64 and (one != other)[:64].any()
    check_gradients_of_scores(run, docs, (6, 1), 128, selected)


CHANGES = ("an entry without a key", "a key twice", "another order", "no keys", *["nothing"] * 6)


def random_rows(count: int, top_k: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return the keys of rows, ascending except for a change, with the first key and the visible keys of each row."""
    draw = random.Random(0)
    indices, visible = torch.full((count, top_k), -1, dtype=torch.int32), torch.empty(count, dtype=torch.int32)
    first = torch.tensor([draw.choice((0, 0, 0, 200)) for _ in range(count)], dtype=torch.int32)
    for at, row in enumerate(indices):
        visible[at] = seen = draw.choice((0, top_k, top_k + 20, 2 * top_k))
        keys = sorted(draw.sample(range(seen), draw.choice((min(seen, top_k), seen // 3))))
        change = draw.choice(CHANGES)
        entry = draw.randrange(max(1, len(keys) - 1))
        if change == "an entry without a key":
            keys[entry : entry + 1] = [draw.choice((-1, seen, seen + 1))]
        elif change == "a key twice":
            keys[entry + 1 : entry + 2] = keys[entry : entry + 1]
        elif change == "another order":
            keys[entry : entry + 2] = keys[entry : entry + 2][::-1]
        elif change == "no keys":
            keys = [seen] * top_k
        row[: len(keys)] = torch.tensor(keys, dtype=torch.int32)[:top_k]
    return indices, first, visible


RowOfKeys = tuple[list[int], int, int]
"""Indices, first key and number of visible keys."""
KEYS = 64
"""Entries of a block."""


def keys_at_entries(row: RowOfKeys) -> list[int | None]:
    """Return the key at each entry as an index into all keys, or None."""
    indices, first, visible = row
    return [first + index if 0 <= index < visible else None for index in indices]


def blocks_of(row: RowOfKeys) -> int:
    """Return the number of blocks up to the last key."""
    return max((1 + at // KEYS for at, key in enumerate(keys_at_entries(row)) if key is not None), default=0)


def common_blocks(row_0: RowOfKeys, row_1: RowOfKeys) -> int:
    """Return the number of blocks before the first one with an entry at which row 1 has a key that row 0 has not."""
    entries = enumerate(zip(keys_at_entries(row_0), keys_at_entries(row_1), strict=True))
    different = [at // KEYS for at, (key_0, key_1) in entries if key_1 not in (None, key_0)]
    return min(blocks_of(row_0), blocks_of(row_1), *different)


def orders_with_shared_keys_first(pair: tuple[RowOfKeys, RowOfKeys]) -> list[list[int]] | None:
    """Return the entries of both rows in their new order, or None if the keys do not ascend or are of two documents."""
    keys = [[index for index in indices if 0 <= index < visible] for indices, _, visible in pair]
    ascend = all(held == sorted(set(held)) == row[0][: len(held)] for held, row in zip(keys, pair, strict=True))
    if not ascend or pair[0][1] != pair[1][1]:
        return None
    shared = set(keys[0]) & set(keys[1])
    return [sorted(range(len(row[0])), key=lambda at: row[0][at] not in shared) for row in pair]


@pytest.mark.parametrize("top_k", [1, 2, 64, 100, 300])
@pytest.mark.parametrize("may_copy", [False, True], ids=["no copies", "copies"])
def test_plan_of_pairs(top_k: int, may_copy: bool) -> None:
    """A pair is copied with shared keys first if more blocks are common then. Copies are not initialised."""
    of_rows = random_rows(201, top_k)
    indices = of_rows[0]
    d_scores = torch.arange(indices.numel(), dtype=torch.float32).view(indices.shape)
    tensors = [tensor.to(DEVICE) for tensor in (indices, d_scores)]
    copies = [torch.randint_like(tensor, -2, top_k + 2) for tensor in tensors]
    plan = torch.empty(101, 4, dtype=torch.int32, device=DEVICE)
    its_rows = Rows(*(tensor.to(DEVICE) for tensor in of_rows[1:]))
    function("plan_pairs")(*tensors, its_rows, plan, copies if may_copy else None)

    rows: list[RowOfKeys] = list(zip(*(tensor.tolist() for tensor in of_rows), strict=True))
    for last, got in zip(range(200, -1, -2), plan.tolist(), strict=True):
        pair = rows[last], rows[last - 1] if last else ([-1] * top_k, 0, 0)
        common, copied = common_blocks(*pair), False
        if may_copy and (orders := orders_with_shared_keys_first(pair)):
            ordered = [([row[0][at] for at in order], *row[1:]) for row, order in zip(pair, orders, strict=True)]
            copied = common_blocks(*ordered) > common
        if copied:
            common = common_blocks(*ordered)
            for at, row, order in zip((last, last - 1), ordered, orders, strict=True):
                assert keys_at_entries((copies[0][at].tolist(), *row[1:])) == keys_at_entries(row)
                assert copies[1][at].tolist() == d_scores[at, order].tolist()
        assert got == [common, *map(blocks_of, pair), int(copied)]
    assert set(plan[:, 3].tolist()) == ({0, 1} if may_copy and top_k > KEYS else {0})


def test_entries_without_a_key_are_ignored(half: torch.dtype) -> None:
    """Keys that the row may not attend to are ignored, wherever they are, and so are rows without keys."""
    docs = docs_of("BSND", [(4, 70)], half)
    clean = ascending(docs, 66, 66)
    clean[0][1] = -1
    call, expected = check_gradients_of_scores(run, docs, (3, 1), 128, clean)
    call["query"][:, 1] = call["weights"][:, 1] = torch.nan
    call["key"][:, 69] = torch.nan
    indices = call["sparse_indices"]
    indices[:, :3][indices[:, :3] < 0] = 69
    indices[:, 3][indices[:, 3] < 0] = 70
    call["dy"][indices >= 69] = torch.nan
    # also at an address that is no multiple of 4 bytes
    call["dy"] = torch.cat([call["dy"].new_zeros(1), call["dy"].flatten()])[1:].view_as(call["dy"])
    for one, other in zip(run(**call), expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-2, atol=1e-2)  # sums in another order, then rounded


def test_blocks_of_entries_may_be_empty(half: torch.dtype) -> None:
    """Of two rows of a program, one has a key in the first block only and the other in the last."""
    docs = docs_of("BSND", [(4, 300)], half)
    selected = torch.full((4, 1, 256), -1, dtype=torch.int32)
    selected[[0, 3], 0, 0], selected[[1, 2], 0, 192] = 5, 7
    check_gradients_of_scores(run, docs, (64, 1), 128, [selected])
