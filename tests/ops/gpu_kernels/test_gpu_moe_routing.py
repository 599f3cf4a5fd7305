"""Tokens sorted by expert without a wait for their counts: equal to the reference."""

from __future__ import annotations

import pytest
import torch

from torchtitan_npu.ops import OPS


@pytest.mark.parametrize(
    "counts", [[[2, 0, 3], [0, 0, 1]], [[0, 4]], [[1], [2], [0]], [[0, 0], [0, 0]], [[5, 1], [2, 7]]], ids=str
)
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64], ids=str)
def test_equals_the_reference(device: str, counts: list[list[int]], dtype: torch.dtype) -> None:
    per_rank = torch.tensor(counts, dtype=dtype, device=device)
    rows = sum(map(sum, counts))
    tokens = torch.randn(rows, 3, device=device).bfloat16()
    arguments = {"tokens": tokens, "expert_token_num_per_rank": per_rank}
    defaults = {"expert_token_num_type": 1, "idx_type": 0, "tokens_dtype": None}
    for scales in (None, torch.randn(rows, device=device)):
        op = OPS["npu_moe_re_routing"]
        results = (kernel(**arguments, per_token_scales=scales, **defaults) for kernel in (op.cuda, op.reference))
        for ours, expected in zip(*results, strict=True):
            assert ours.dtype == expected.dtype and torch.equal(ours, expected)
