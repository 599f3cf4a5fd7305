"""The work of a step: FLOPs of the npu:: operators, which torch counts in plain matrix products, and collectives."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

import torchtitan_npu.ops  # noqa: F401  # declares torch.ops.npu
from torchtitan_npu import platform
from torchtitan_npu.planner import BelowSubclasses, fake_device, fake_ranks
from torchtitan_npu.planner.work import Traffic, flops, hccl_memory
from torchtitan_npu.torch_internals.autograd import in_backward_pass
from torchtitan_npu.torch_internals.dispatch import OpOverload

npu = torch.ops.npu
BATCH, QUERIES, KEYS, HEADS, TOP_K = 2, 6, 8, 4, 3
LATENT, ROPE, INDEX_HEADS, INDEX_SIZE = 512, 64, 8, 128


class Counted(BelowSubclasses):
    """Sum the planner's FLOPs."""

    def __init__(self) -> None:
        super().__init__()
        self.forward = self.backward = 0

    def call(self, op: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        output = op(*args, **kwargs)
        if in_backward_pass():
            self.backward += flops(op, args, kwargs, output)
        else:
            self.forward += flops(op, args, kwargs, output)
        return output


def counted(compute: Callable[[], Tensor]) -> tuple[int, int]:
    """Return the planner's FLOPs of ``compute``, forward and backward."""
    with fake_device(), torch.autograd.set_multithreading_enabled(False), Counted() as mode:
        compute().float().sum().backward()
    return mode.forward, mode.backward


def plain(compute: Callable[[], Tensor], backward: bool = True) -> tuple[int, int]:
    """Return torch's FLOPs of ``compute``, forward and backward."""
    with fake_device():
        with FlopCounterMode(display=False) as forward:
            output = compute()
        with FlopCounterMode(display=False) as backward_counter:
            if backward:
                output.float().sum().backward()
    return forward.get_total_flops(), backward_counter.get_total_flops()


def leaf(*shape: int) -> Tensor:
    return torch.empty(shape, dtype=torch.bfloat16, requires_grad=True)


def selected() -> Tensor:
    return torch.zeros(BATCH, QUERIES, 1, TOP_K, dtype=torch.int32)


def test_grouped_matmul() -> None:
    from torchtitan_npu.ops.grouped_matmul.op import grouped_matmul

    rows = (3, 0, 5)

    def grouped() -> Tensor:
        return grouped_matmul(leaf(sum(rows), 32), leaf(len(rows), 32, 16), torch.tensor(rows))

    def one_by_one() -> Tensor:
        return torch.cat([leaf(n, 32) @ leaf(32, 16) for n in rows])

    assert counted(grouped) == plain(one_by_one)


def test_sparse_attention() -> None:
    """Each query attends to its selected keys. Absorbed: the value is the key without its rope part."""
    tokens = BATCH * QUERIES

    def sparse() -> Tensor:
        query, key = leaf(BATCH, QUERIES, HEADS, LATENT), leaf(BATCH, KEYS, 1, LATENT)
        ropes = {"query_rope": leaf(BATCH, QUERIES, HEADS, ROPE), "key_rope": leaf(BATCH, KEYS, 1, ROPE)}
        options = {"attention_mode": 2, "return_softmax_lse": True}
        return npu.npu_sparse_flash_attention(query, key, key, selected(), 1.0, **ropes, **options)[0]

    def scores() -> Tensor:
        return torch.bmm(leaf(tokens, HEADS, LATENT + ROPE), leaf(tokens, LATENT + ROPE, TOP_K))

    def attention() -> Tensor:
        return torch.bmm(scores().softmax(-1), leaf(tokens, TOP_K, LATENT))

    forward, backward = plain(attention)
    again, _ = plain(scores, backward=False)
    assert counted(sparse) == (forward, again + backward)


def test_indexer() -> None:
    """The forward pass scores every key. The backward pass recomputes the scores of the selected keys."""

    def indexer() -> Tensor:
        query, key = leaf(BATCH, QUERIES, INDEX_HEADS, INDEX_SIZE), leaf(BATCH, KEYS, 1, INDEX_SIZE)
        weights = leaf(BATCH, QUERIES, INDEX_HEADS)
        return npu.npu_lightning_indexer(query, key, weights, sparse_count=TOP_K, return_value=True)[1]

    def scores(keys: int) -> Callable[[], Tensor]:
        def compute() -> Tensor:
            products = torch.bmm(
                leaf(BATCH * QUERIES, INDEX_HEADS, INDEX_SIZE), leaf(BATCH * QUERIES, INDEX_SIZE, keys)
            )
            return (products.relu() * leaf(BATCH * QUERIES, INDEX_HEADS, 1)).sum(1)

        return compute

    every, _ = plain(scores(KEYS), backward=False)
    again, backward = plain(scores(TOP_K))
    assert counted(indexer) == (every, again + backward)


def test_indexer_loss() -> None:
    """One operator computes the scores of attention and indexer, and the indexer's gradients of queries and keys."""
    tokens = BATCH * QUERIES

    def loss() -> int:
        with fake_device(), Counted() as mode:
            attention = leaf(BATCH, QUERIES, HEADS, LATENT), leaf(BATCH, KEYS, 1, LATENT)
            index = leaf(BATCH, QUERIES, INDEX_HEADS, INDEX_SIZE), leaf(BATCH, KEYS, 1, INDEX_SIZE)
            statistics = [torch.ones(BATCH, 1, QUERIES, HEADS) for _ in range(2)]
            ropes = {"query_rope": leaf(BATCH, QUERIES, HEADS, ROPE), "key_rope": leaf(BATCH, KEYS, 1, ROPE)}
            weights = leaf(BATCH, QUERIES, INDEX_HEADS)
            with torch.no_grad():
                npu.npu_sparse_lightning_indexer_grad_kl_loss(
                    *attention, *index, weights, selected(), *statistics, 1.0, **ropes
                )
        return mode.forward

    def of_attention() -> Tensor:
        return torch.bmm(leaf(tokens, HEADS, LATENT + ROPE), leaf(tokens, LATENT + ROPE, TOP_K))

    def of_indexer() -> Tensor:
        return torch.bmm(leaf(tokens, INDEX_HEADS, INDEX_SIZE), leaf(tokens, INDEX_SIZE, TOP_K))

    assert loss() == plain(of_attention, backward=False)[0] + sum(plain(of_indexer))


def test_dense_indexer_loss() -> None:
    """The statistics need the indexer's scores of all keys, the loss both scores and the indexer's gradients."""
    size = 128

    def loss() -> int:
        with fake_device(), Counted() as mode, torch.no_grad():
            attention = leaf(BATCH, QUERIES, HEADS, size), leaf(BATCH, KEYS, HEADS, size)
            index = leaf(BATCH, QUERIES, INDEX_HEADS, INDEX_SIZE), leaf(BATCH, KEYS, 1, INDEX_SIZE)
            weights = leaf(BATCH, QUERIES, INDEX_HEADS)
            statistics = [torch.ones(BATCH, HEADS, QUERIES, 1) for _ in range(2)]
            of_index = npu.npu_dense_lightning_indexer_softmax_lse(*index, weights)
            ropes = {"query_rope": leaf(BATCH, QUERIES, HEADS, ROPE), "key_rope": leaf(BATCH, KEYS, HEADS, ROPE)}
            npu.npu_dense_lightning_indexer_grad_kl_loss(
                *attention, *index, weights, *statistics, *of_index, 1.0, **ropes
            )
        return mode.forward

    def of_attention() -> Tensor:
        return torch.bmm(leaf(BATCH * HEADS, QUERIES, size + ROPE), leaf(BATCH * HEADS, size + ROPE, KEYS))

    def of_indexer() -> Tensor:
        return torch.bmm(leaf(BATCH, QUERIES * INDEX_HEADS, INDEX_SIZE), leaf(BATCH, INDEX_SIZE, KEYS))

    scores = plain(of_indexer, backward=False)[0]
    assert loss() == scores + plain(of_attention, backward=False)[0] + sum(plain(of_indexer))


def test_fusion_attention() -> None:
    def fused() -> Tensor:
        query, key, value = (leaf(BATCH, HEADS, tokens, 32) for tokens in (QUERIES, KEYS, KEYS))
        return npu.npu_fusion_attention(query, key, value, HEADS, "BNSD")[0]

    def scores() -> Tensor:
        return torch.bmm(leaf(BATCH * HEADS, QUERIES, 32), leaf(BATCH * HEADS, 32, KEYS))

    def attention() -> Tensor:
        return torch.bmm(scores().softmax(-1), leaf(BATCH * HEADS, KEYS, 32))

    forward, backward = plain(attention)
    assert counted(fused) == (forward, plain(scores, backward=False)[0] + backward)


def test_traffic_of_every_all_to_all() -> None:
    traffic, key = Traffic({}), ("world", "all_to_all")

    def call(op: Any, *args: Any) -> None:
        traffic.record(op, args, {}, op(*args))

    with fake_ranks(4), fake_device():
        group = torch.distributed.group.WORLD
        assert group is not None
        x = torch.empty(8, 4)
        call(torch.ops._dtensor.shard_dim_alltoall.default, x, 0, 1, group.group_name)
        assert traffic.sent[key] == x.nbytes * 3 / 4
        functional = torch.ops._c10d_functional.all_to_all_single.default
        call(functional, x[:0], [2, 2, 2, 2], [0, 0, 0, 0], group.group_name)  # this rank only receives
        assert traffic.sent[key] == 2 * x.nbytes * 3 / 4
        call(functional, x[:0], [0, 0, 0, 0], [0, 0, 0, 0], group.group_name)
        assert traffic.calls[key] == 3 and traffic.sent[key] == 2 * x.nbytes * 3 / 4


def test_memory_of_hccl(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("HCCL_BUFFSIZE", raising=False)
    with platform.job_for("npu"):
        assert hccl_memory(["fsdp", "ep"], {"ep": 64, "tp": 32}) == 2 * (200 + 64) << 20
    with platform.job_for("cpu"):
        assert hccl_memory(["fsdp", "ep"], {}) == 0
