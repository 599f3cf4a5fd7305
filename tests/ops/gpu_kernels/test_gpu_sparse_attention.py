"""The Triton kernels of sparse attention and its gradient, against the float64 oracle."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from sparse_attention_check import assert_agrees
from sparse_oracle import ARRANGEMENTS, Documents

CASES = {
    "documents of a batch, some shorter": ("BSND", [(5, 7), (2, 3)], True, (4, 1), 3, True, False),
    "packed documents, one without queries, two key heads": ("TND", [(3, 4), (0, 2), (2, 7)], True, (6, 2), 9, True, 1),
    "one token": ("BSND", [(1, 1)], True, (1, 1), 1, False, False),
    "rows that see no key": ("TND", [(5, 2), (2, 2)], True, (4, 1), 4, True, False),
    "top-k wider than the sequence": ("BSND", [(3, 4)] * 2, True, (4, 1), 11, False, True),
    "every key is seen": ("BSND", [(3, 6)] * 2, False, (4, 1), 3, True, False),
    "several blocks of keys and of heads": ("TND", [(2, 70)], False, (70, 1), 69, True, False),
}


def documents(layout: str, sizes: list[tuple[int, int]], causal: bool, dtype: torch.dtype, arranged: str) -> Documents:
    return Documents(layout, sizes, causal, dtype, torch.Generator().manual_seed(0), ARRANGEMENTS[arranged])


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("case", CASES)
def test_agrees_with_the_oracle(gpu: Any, device: str, half: torch.dtype, case: str, deterministic: bool) -> None:
    layout, sizes, causal, heads, top_k, rope, value = CASES[case]
    dtype, arranged = (torch.float32, "transposed") if deterministic else (half, "contiguous")
    docs = documents(layout, sizes, causal, dtype, arranged)
    torch.use_deterministic_algorithms(deterministic)
    try:
        assert_agrees(gpu, docs, heads, top_k, rope, bool(value), device, rounds=True)
    finally:
        torch.use_deterministic_algorithms(False)
