"""Blocks of neighbouring queries: the lists of their keys, and when the kernels use them."""

from __future__ import annotations

import pytest
import torch

from tests.gpu_kernels.kernel_checks import DEVICE
from torchtitan_npu.gpu_kernels.sparse_flash_attention import triton_query_blocks
from torchtitan_npu.gpu_kernels.sparse_flash_attention.triton_query_blocks import queries_per_block, unite
from torchtitan_npu.gpu_kernels.sparse_flash_attention.triton_rows import Rows

TOKENS, TOP_K, KEYS = 24, 40, 300


@pytest.mark.parametrize("queries", [2, 4, 8])
@pytest.mark.parametrize("block", [64, 2048])
def test_lists_of_keys(queries: int, block: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two documents, -1 anywhere, keys that are not visible or selected twice, and queries without keys."""
    monkeypatch.setattr(triton_query_blocks, "BLOCK", block)
    generator = torch.Generator().manual_seed(0)
    indices = torch.rand(TOKENS, 1, KEYS // 2, generator=generator).argsort(-1)[..., :TOP_K].int()
    indices[3], indices[5, 0, 7:20], indices[6, 0, 0] = -1, -1, indices[6, 0, 1]
    first = torch.where(torch.arange(TOKENS) < 9, 0, KEYS // 2).int()
    visible = torch.randint(0, KEYS // 2, (TOKENS,), generator=generator).int()
    visible[16:] = 0
    rows = Rows(first.to(DEVICE), visible.to(DEVICE))
    selection = unite(indices.to(DEVICE), rows, queries, KEYS, KEYS)

    selected = [
        {int(first[row]) + key for key in indices[row, 0].tolist() if 0 <= key < visible[row]} for row in range(TOKENS)
    ]
    for start in range(0, TOKENS, queries):
        of_block = selected[start : start + queries]
        keys = sorted(set().union(*of_block))
        bits = [sum((key in of_row) << row for row, of_row in enumerate(of_block)) for key in keys]
        at = start // queries
        unused = selection.keys.shape[-1] - len(keys)
        assert selection.keys[at, 0].tolist() == keys + [-1] * unused
        assert selection.chosen[at].view(torch.uint8).tolist() == bits + [0] * unused
        assert selection.counts[:, at].tolist() == [len(keys)] * 2
        assert selection.active[at] == sum(bool(of_row) << row for row, of_row in enumerate(of_block))
        assert (selection.rows.first[at], selection.rows.visible[at]) == (0, KEYS)


@pytest.mark.parametrize(
    ("heads", "queries", "keys", "block"),
    [
        (16, 4096, 4096, 4),
        (16, 4096, 8192, 4),
        (16, 4096, 131072, 1),  # few keys in common
        (16, 4097, 4096, 1),
        (32, 4096, 4096, 2),
        (32, 4096, 8192, 2),
        (64, 4096, 4096, 1),
    ],
)
def test_queries_per_block(heads: int, queries: int, keys: int, block: int) -> None:
    """The size with the least estimated time. An H200 agrees for 4096 and 8192 keys of 16 heads, and 4096 of 32."""
    assert queries_per_block(heads, queries, queries, keys, 2048, True) == block


def test_short_documents_have_their_keys_in_common() -> None:
    one, many = (queries_per_block(16, 2**17, length, length, 2048, True) for length in (2**17, 2**11))
    assert (one, many) == (1, 4)
