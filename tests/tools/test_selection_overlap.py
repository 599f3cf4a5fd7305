"""The overlap of the keys that neighbouring queries select, against sets in Python."""

from __future__ import annotations

import sys
from pathlib import Path
from statistics import mean

import pytest
import torch

from torchtitan_npu.layers.sparse_attention import select

sys.path.insert(0, str(Path(__file__).parents[2] / "tools" / "bench"))

import selection_overlap as bench


def test_overlap_against_sets() -> None:
    first, last, length, topk = 16, 96, 96, 16
    torch.manual_seed(0)
    scores = torch.rand(2, length, length).cumsum(1)  # neighbours have similar scores
    mask = select(scores, torch.ones(1, length, length, dtype=torch.bool).tril(), topk)
    sequences = [[set(row.nonzero().flatten().tolist()) for row in rows] for rows in mask]
    expected = {"next": mean(len(keys[i] & keys[i + 1]) / topk for keys in sequences for i in range(first, last - 1))}
    for size in bench.BLOCKS:
        expected[f"union {size}"] = mean(
            len(set.union(*keys[i : i + size])) / topk for keys in sequences for i in range(first, last, size)
        )
    for size in bench.RECENT:
        expected[f"recent {size}"] = mean(
            sum(i - size < key <= i for key in keys[i]) / topk for keys in sequences for i in range(first, last)
        )
    assert bench.overlap(mask, first, last) == pytest.approx(expected, rel=1e-5)
    assert 0.1 < expected["next"] < 0.99 and 1.1 < expected["union 16"] < 6 and expected["recent 64"] < 1


def test_random_selections_overlap_as_expected() -> None:
    """Of v visible keys, a query selects each with probability k / v, and the next query with k / (v + 1)."""
    length, topk = 256, 64
    mask = bench.random_mask(length, topk, torch.device("cpu"))
    assert mask.sum(-1).eq(torch.arange(1, length + 1).clamp(max=topk)).all()
    share = mean(topk / (visible + 1) for visible in range(topk + 1, length))
    assert bench.overlap(mask, topk, length)["next"] == pytest.approx(share, abs=0.02)


def test_ranges_cover_all_queries_that_select() -> None:
    assert bench.ranges(32, 200) == {
        "all": (32, 200),
        "1 to 2 × top-k": (32, 64),
        "2 to 4 × top-k": (64, 128),
        "4 to 8 × top-k": (128, 200),
    }
