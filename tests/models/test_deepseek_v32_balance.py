"""Load balance of context parallel in the released DeepSeek-V3.2: FLOPs of a layer's attention on each of 8 ranks.

A layer runs forward and backward as each rank, on fake tensors over a fake process group, under torch's FLOP counter.
The formulas of the fused operators are defined here.
"""

from __future__ import annotations

import copy
import functools
from collections import Counter
from typing import Any

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.utils.flop_counter import FlopCounterMode

import torchtitan_npu
from tests._helpers.deepseek_v32_models import start_batch
from torchtitan_npu.config.job_config import JobConfig
from torchtitan_npu.converters.base import convert_module
from torchtitan_npu.converters.dsa import DsaConverter, NpuSparseAttention
from torchtitan_npu.models.deepseek_v32 import DeepSeekV32ModelArgs, deepseekv32_args
from torchtitan_npu.models.deepseek_v32.attention import DeepSeekV32Attention
from torchtitan_npu.models.deepseek_v32.context_parallel import DSAContextParallel
from torchtitan_npu.planner import fake_device, fake_ranks

torchtitan_npu.register()

RANKS = 8
SEQUENCE = 32768
ROTATED = deepseekv32_args["671B"].qk_rope_head_dim
Shape = tuple[int, ...]


def pairs(query: Shape, key: Shape, most: int = SEQUENCE) -> int:
    """Count the pairs of queries (1, queries, ...) and visible keys (1, keys, ...), at most ``most`` per query.

    The queries are the last tokens of the keys."""
    queries, keys = query[1], key[1]
    return sum(min(most, visible) for visible in range(keys - queries + 1, keys + 1))


def scoring(query: Shape, key: Shape, *_: Any, **__: Any) -> int:
    """Count the product of a head's query and key, and the one with the head's weight."""
    heads, width = query[2:]
    return 2 * heads * (width + 1) * pairs(query, key)


def attention(query: Shape, key: Shape, value: Shape, indices: Shape, *_: Any, **__: Any) -> int:
    """Count two products; keys have latent and rotated elements, values latent ones."""
    heads, width = query[2:]
    return 2 * heads * (2 * width + ROTATED) * pairs(query, key, indices[-1])


def attention_grad(query: Shape, key: Shape, value: Shape, indices: Shape, *_: Any, **__: Any) -> int:
    """Count one of the two forward products again, and two backward products for each."""
    heads, width = query[2:]
    again = 2 * heads * (width + ROTATED) * pairs(query, key, indices[-1])
    return again + 2 * attention(query, key, value, indices)


def indexer_grad(
    query: Shape, key: Shape, query_index: Shape, key_index: Shape, weights: Shape, indices: Shape, *_: Any, **__: Any
) -> int:
    """Count attention's scores and the indexer's again, and two backward products for each of the indexer's."""
    attended = query[2] * (query[3] + ROTATED)
    scored = query_index[2] * (query_index[3] + 1)
    return 2 * (attended + 3 * scored) * pairs(query, key, indices[-1])


def formulas() -> dict[Any, Any]:
    npu = torch.ops.npu
    return {
        npu.npu_lightning_indexer: scoring,
        npu.npu_sparse_flash_attention: attention,
        npu.npu_sparse_flash_attention_grad: attention_grad,
        npu.npu_sparse_lightning_indexer_grad_kl_loss: indexer_grad,
    }


def counted(rank: int, load_balancer: str | None) -> Counter[str]:
    """Return the FLOPs of one layer's attention on ``rank``, by operator."""
    args = copy.deepcopy(deepseekv32_args["671B"])
    config = JobConfig()
    config.training.seq_len = SEQUENCE
    args.update_from_config(config)
    with torch.device("meta"):
        layer = DeepSeekV32Attention(args).to(torch.bfloat16)
    layer.inner_attention = convert_module(layer.inner_attention, NpuSparseAttention)
    with fake_ranks(RANKS, rank):
        DSAContextParallel(init_device_mesh("cpu", (RANKS,)), load_balancer).parallelize(layer)
        return flops_of(layer, args)


def flops_of(layer: DeepSeekV32Attention, args: DeepSeekV32ModelArgs) -> Counter[str]:
    with fake_device():
        layer.to_empty(device="cpu")
        start_batch(layer, SEQUENCE)
        x = torch.zeros(1, SEQUENCE // RANKS, args.dim, dtype=torch.bfloat16, requires_grad=True)
        freqs_cis = torch.zeros(SEQUENCE, args.qk_rope_head_dim // 2, dtype=torch.complex64)
        positions = torch.zeros(1, SEQUENCE // RANKS, dtype=torch.int32)
        with FlopCounterMode(display=False, custom_mapping=formulas()) as flops:
            layer(x, freqs_cis, None, positions).sum().backward()
    return Counter({str(op): n for op, n in flops.get_flop_counts()["Global"].items()})


@functools.cache
def by_rank(load_balancer: str | None) -> list[Counter[str]]:
    return [counted(rank, load_balancer) for rank in range(RANKS)]


def imbalance(counts: list[int]) -> float:
    """Return the ratio of the largest count to the mean."""
    return max(counts) * RANKS / sum(counts)


@pytest.mark.parametrize("load_balancer", ["headtail", None])
def test_every_pair_is_scored_once(load_balancer: str | None) -> None:
    indexer = [counts["npu.npu_lightning_indexer"] for counts in by_rank(load_balancer)]
    assert sum(indexer) == 2 * 64 * (128 + 1) * SEQUENCE * (SEQUENCE + 1) // 2


def test_headtail_balances_the_work() -> None:
    ranks = by_rank("headtail")
    for op in ranks[0]:
        assert imbalance([counts[op] for counts in ranks]) <= 1.05, op
    assert {"npu." + op for op in DsaConverter.operators} <= set(ranks[0])


def test_contiguous_parts_are_not_balanced() -> None:
    ranks = by_rank(None)
    assert imbalance([counts["npu.npu_lightning_indexer"] for counts in ranks]) >= 1.85
    assert imbalance([counts.total() for counts in ranks]) > imbalance([c.total() for c in by_rank("headtail")])
