"""FLOPs of the npu:: operators equal those that torch counts for the same computation in plain matrix products."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

import torchtitan_npu.ops  # noqa: F401  # declares torch.ops.npu
from torchtitan_npu.planner.fake_devices import BelowSubclasses, fake_device
from torchtitan_npu.planner.flops import flops
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
    from torchtitan_npu.ops.grouped_matmul.function import grouped_matmul

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
