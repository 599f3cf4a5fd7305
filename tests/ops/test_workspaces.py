"""The workspaces that planner and emulator count, against numbers known from CANN's tiling."""

from __future__ import annotations

import pytest
import torch

from torchtitan_npu.ops.workspaces import SYSTEM, workspace

GIB = 1 << 30


def tokens(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.empty(1, 32768, *shape, dtype=dtype, device="meta")


def test_gradient_of_sparse_attention() -> None:
    """32k tokens and 32 heads of DeepSeek-V3.2: most of it is the query's gradient in float32."""
    heads = 32
    size = workspace(
        "npu_sparse_flash_attention_grad",
        query=tokens(heads, 512),
        key=tokens(1, 512),
        query_rope=tokens(heads, 64),
        sparse_indices=tokens(1, 2048, dtype=torch.int32),
        sparse_block_size=1,
    )
    assert size / GIB == pytest.approx(2.8, abs=0.05)


def test_other_operators_have_the_part_that_cann_reserves() -> None:
    assert workspace("npu_rms_norm") == SYSTEM
