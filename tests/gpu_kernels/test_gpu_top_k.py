"""Top-k in Triton and in Gluon, against torch's stable sort."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from tests.gpu_kernels.gluon_simulator import on_hopper
from tests.gpu_kernels.kernel_checks import DEVICE
from torchtitan_npu.gpu_kernels.lightning_indexer import gluon_top_k, triton_top_k

Select = Callable[[Tensor, Tensor, int, Tensor, Tensor | None, int], None]


def check(select: Select, values: Tensor, held: list[int], heads: int, count: int) -> None:
    entries = torch.empty(len(values), count, dtype=torch.int32, device=DEVICE)
    best = torch.empty(len(values), count, device=DEVICE)
    counts = torch.tensor(held, dtype=torch.int32, device=DEVICE)
    select(values.to(DEVICE), counts, heads, entries, best, max(held))
    for row, value in enumerate(values):
        number = min(held[row // heads], count)
        seen = value[: held[row // heads]]
        expected = seen.sort(descending=True, stable=True).indices[:number].sort().values
        assert entries[row].tolist() == [*expected.tolist(), *[-1] * (count - number)]
        torch.testing.assert_close(best[row, :number].cpu(), seen[expected], rtol=0, atol=0, equal_nan=True)
        assert (best[row, number:] == -torch.inf).all()


def difficult(rows: int, width: int) -> Tensor:
    """Return many equal values, both zeros, infinities and NaN."""
    choice = torch.tensor([-torch.inf, -2.0, -1e-40, -0.0, 0.0, 1e-45, 1.0, 3.4e38, torch.inf, torch.nan])
    likely = torch.tensor([1.0, 9, 1, 9, 9, 0.2, 0.5, 0.2, 0.1, 0.1]).expand(rows, -1)
    return choice[likely.multinomial(width, replacement=True, generator=torch.Generator().manual_seed(0))]


@pytest.mark.parametrize("segment", [16, 64])
def test_triton_agrees_with_a_stable_sort(segment: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """In one round and in several."""
    monkeypatch.setattr(triton_top_k, "SEGMENT", segment)
    check(triton_top_k.select_top_k, difficult(8, 45), [3, 0, 20, 45], 2, 4)


@pytest.fixture
def gluon() -> Select:
    return on_hopper(gluon_top_k, "select_top_k")


@pytest.mark.parametrize("segment", [1024, 4096])
@pytest.mark.parametrize("count", [40, 500])
def test_gluon_agrees_with_a_stable_sort(
    gluon: Select, segment: int, count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(gluon.__globals__, "SEGMENT", segment)  # type: ignore[attr-defined]
    check(gluon, difficult(8, 3000), [3, 0, 1200, 2998], 2, count)


def test_gluon_selects_in_rounds_of_several_warps(gluon: Select, monkeypatch: pytest.MonkeyPatch) -> None:
    """A row without values writes nothing but -1 and -inf. Threads that wrote other values would race on a GPU."""
    monkeypatch.setitem(gluon.__globals__, "SEGMENT", 4096)  # type: ignore[attr-defined]
    check(gluon, difficult(2, 9000), [0, 8999], 1, 1100)


def test_gluon_finds_the_threshold_of_any_distribution(gluon: Select) -> None:
    """The search starts from a normal distribution."""
    normal = torch.randn(1, 5000, generator=torch.Generator().manual_seed(0))
    apart = torch.where(normal > 1, normal + 1e6, normal)
    outlier = torch.where(normal == normal.max(), torch.inf, normal)
    nan = torch.where(normal > 1, normal, -torch.nan)
    rows = (normal, normal * 1e30, normal.exp() ** 9, normal.round(), normal.relu(), apart, outlier, nan)
    check(gluon, torch.cat(rows), [5000, 4999, 2050, 4000, 4500, 5000, 5000, 2049], 1, 2048)
