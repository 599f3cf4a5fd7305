"""Calls that the kernels for Hopper GPUs take, and those that the registry leaves to other kernels."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from torchtitan_npu.gpu_kernels.registry import KERNELS, can_select

INDEXER, ATTENTION = "npu_lightning_indexer", "npu_sparse_flash_attention"
LOSS = "npu_sparse_lightning_indexer_grad_kl_loss"
QUERIES: dict[str, Any] = {"query": (4, 512), "key": (1, 512), "value": None, "query_rope": (4, 64)}
TAKEN: dict[str, dict[str, Any]] = {
    INDEXER: {"query": (64, 128), "key": (1, 128), "layout_query": "BSND", "sparse_count": 2},
    f"{INDEXER}_grad": {"query": (64, 128), "key": (1, 128), "sparse_indices": 8},
    LOSS: {"query": (128, 512), "query_rope": (128, 64), "query_index": (64, 128)},
    ATTENTION: QUERIES,
    f"{ATTENTION}_grad": {**QUERIES, "sparse_indices": 2048},
}
"""Arguments of each operator: heads and features of a tensor, or the number of selected keys."""
CASES: list[tuple[str, dict[str, Any], bool]] = [
    (INDEXER, {"query": (8, 128)}, True),
    (INDEXER, {"query": (128, 128), "key": (2, 128)}, True),
    (INDEXER, {"query": (65, 128)}, False),
    (INDEXER, {"query": (64, 64), "key": (1, 64)}, False),
    (f"{INDEXER}_grad", {"query": (8, 128)}, True),
    (f"{INDEXER}_grad", {"query": (65, 128)}, False),
    (f"{INDEXER}_grad", {"key": (2, 128)}, False),
    (f"{INDEXER}_grad", {"query": (64, 64), "key": (1, 64)}, False),
    (f"{INDEXER}_grad", {"sparse_indices": 7}, False),
    (LOSS, {"query": (16, 512), "query_rope": (16, 64), "query_index": (8, 128)}, True),
    (LOSS, {"query": (129, 512), "query_rope": (129, 64)}, False),
    (LOSS, {"query_index": (65, 128)}, False),
    (LOSS, {"query_index": (64, 64)}, False),
    (ATTENTION, {"dtype": torch.float16}, True),
    (ATTENTION, {"query": (4, 256), "key": (1, 256)}, False),
    (ATTENTION, {"query_rope": None}, False),
    (ATTENTION, {"query_rope": (4, 32)}, False),
    (ATTENTION, {"value": "key"}, True),
    (ATTENTION, {"value": (1, 512)}, False),
    (f"{ATTENTION}_grad", {"query": (256, 512), "query_rope": (256, 64), "sparse_indices": 64}, True),
    (f"{ATTENTION}_grad", {"sparse_indices": 100}, False),
    (f"{ATTENTION}_grad", {"value": "key"}, False),
    *((op, {}, True) for op in TAKEN),
    *((op, {"dtype": torch.float32}, False) for op in TAKEN),
]


def suits(op: str, **changes: Any) -> bool:
    dtype, arguments = changes.pop("dtype", torch.bfloat16), dict(TAKEN[op] | changes)
    for name, value in arguments.items():
        if isinstance(value, tuple):
            arguments[name] = torch.zeros(1, 2, *value, dtype=dtype)
        elif name == "sparse_indices":
            arguments[name] = torch.zeros(1, 2, 1, value, dtype=torch.int32)
    if changes.get("value") == "key":
        arguments["value"] = arguments["key"]
    kernel = KERNELS[op][0]
    assert kernel.hopper
    return kernel.suits(**arguments)


@pytest.mark.parametrize(("op", "changes", "taken"), CASES)
def test_kernel_takes(op: str, changes: dict[str, Any], taken: bool) -> None:
    assert suits(op, **changes) == taken


def test_sums_in_a_fixed_order() -> None:
    torch.use_deterministic_algorithms(True)
    assert not suits(f"{INDEXER}_grad") and suits(f"{ATTENTION}_grad")


def test_every_round_of_a_selection_reduces_the_candidates() -> None:
    def can(keys: int, count: int) -> bool:
        return can_select(torch.empty(1, keys, device="meta"), "BSND", count)

    assert can(32768, 20000) and can(10**6, 16384) and not can(32769, 16385)
