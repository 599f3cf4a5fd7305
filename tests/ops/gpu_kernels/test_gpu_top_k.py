"""Top-k in Triton, against torch's stable sort."""

from __future__ import annotations

import pytest
import torch

from torchtitan_npu.ops.lightning_indexer.op import fits_triton
from torchtitan_npu.ops.lightning_indexer.triton_top_k import select_top_k


@pytest.mark.parametrize("segment", [16, 64])
def test_agrees_with_a_stable_sort(segment: int, device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Many equal values, both zeros, infinities and NaN; in one round and in several."""
    monkeypatch.setattr("torchtitan_npu.ops.lightning_indexer.triton_top_k.SEGMENT", segment)
    count, heads, width = 4, 2, 45
    generator = torch.Generator().manual_seed(0)
    choice = torch.tensor([-torch.inf, -2.0, -1e-40, -0.0, 0.0, 1e-45, 1.0, 3.4e38, torch.inf, torch.nan])
    held = torch.tensor([3, 0, 20, 45], dtype=torch.int32)
    likely = torch.tensor([1.0, 9, 1, 9, 9, 0.2, 0.5, 0.2, 0.1, 0.1]).expand(len(held) * heads, -1)
    values = choice[likely.multinomial(width, replacement=True, generator=generator)]
    places = torch.empty(len(values), count, dtype=torch.int32, device=device)
    best = torch.empty(len(values), count, device=device)
    select_top_k(values.to(device), held.to(device), heads, places, best)
    for row, value in enumerate(values):
        number = min(int(held[row // heads]), count)
        seen = value[: held[row // heads]]
        expected = seen.sort(descending=True, stable=True).indices[:number].sort().values
        assert places[row].tolist() == [*expected.tolist(), *[-1] * (count - number)]
        torch.testing.assert_close(best[row, :number].cpu(), seen[expected], rtol=0, atol=0, equal_nan=True)
        assert (best[row, number:] == -torch.inf).all()


def test_every_round_reduces_the_candidates() -> None:
    assert fits_triton(32768, 20000) and fits_triton(10**6, 16384) and not fits_triton(32769, 16385)
