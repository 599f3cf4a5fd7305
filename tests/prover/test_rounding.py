"""Random rounding changes float32 results by as much as rounding does, and nothing else."""

from __future__ import annotations

import math

import pytest
import torch

from torchtitan_npu.prover.training import RandomRounding

U = torch.finfo(torch.float32).eps / 2


@pytest.mark.parametrize(("terms", "size"), [(4, 2 * U), (400, 20 * U)])
def test_a_product_changes_by_the_error_of_its_sum(terms: int, size: float) -> None:
    left, right = torch.rand(30, terms), torch.rand(terms, 30)
    exact = left @ right
    with RandomRounding(0):
        rounded = left @ right
    change = (rounded.double() - exact.double()) / exact.double()
    assert 0.3 * size < change.abs().mean() < 0.7 * size  # uniform in [-size, size], and rounded to float32
    assert change.abs().max() <= size + U
    assert change.mean().abs() < 4 * size / math.sqrt(3 * change.numel()) + U / 10


def test_seeds_repeat() -> None:
    x = torch.rand(50)
    results = []
    for seed in (1, 1, 2):
        with RandomRounding(seed):
            results.append(x * 3)
    assert torch.equal(results[0], results[1]) and not torch.equal(results[0], results[2])


def test_integers_counts_and_other_dtypes_stay() -> None:
    tokens, doubles = torch.tensor([3.0, 1.0, 3.0, 2.0]), torch.rand(9, dtype=torch.float64)
    with RandomRounding(0):
        assert torch.equal(torch.histc(tokens, bins=3, min=1, max=3), torch.tensor([1.0, 1.0, 2.0]))
        assert tokens.sum() == 9
        positions = (tokens + 1) / 2  # 2, 1, 2 and 1.5
        assert torch.equal(positions.floor(), torch.tensor([2.0, 1.0, 2.0, 1.0]))
        tripled = doubles * 3
        assert torch.equal(torch.arange(5) * 3, torch.tensor([0, 3, 6, 9, 12]))
    assert torch.equal(tripled, doubles * 3)


def test_equal_scores_are_ordered_either_way() -> None:
    scores = torch.full((2, 100), 0.01)
    with RandomRounding(0):
        first, second = scores.sigmoid()
    assert (first > second).any() and (first < second).any()
