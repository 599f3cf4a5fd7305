"""The workspaces that planner and emulator count, against numbers known from CANN's tiling."""

from __future__ import annotations

import pytest
import torch

from torchtitan_npu.emulator.workspaces import SYSTEM, dense_indexer_loss, dense_indexer_statistics, workspace

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


def test_dense_indexer_loss() -> None:
    """As in the warm-up of the 671B model with 8192 tokens. The scores of all heads are 128 × 1024 in each tile."""
    query, query_index, key_index = (tokens(heads, 128)[:, :8192] for heads in (128, 64, 1))
    size = dense_indexer_loss(query, query, query_index, key_index, torch.empty(1, 8192, 64, device="meta"))
    tile = (128 + 2 * 64) * 128 * 1024 * 4  # bytes; each of 24 cores has two
    assert 0 < size - 24 * 2 * tile < 128 << 20
    packed = dense_indexer_statistics(key_index.flatten(0, 1), "TND", actual_seq_klen=[4096, 8192])
    statistics = [dense_indexer_statistics(key_index, "BSND"), packed]
    assert [size - SYSTEM - 24 * (2 << 20) for size in statistics] == [24 * 8 * 8192 * 4, 24 * 8 * 4096 * 4]
