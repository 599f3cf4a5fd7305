"""Matrix products under tensor parallel with the real torch_npu: products cause no collectives of their own.

torch_npu registers its own strategies for the two operators. Ours replace them because none of theirs costs less.
"""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from unittest.mock import patch

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

from tests._helpers.undecomposed_matmul import our_matmul_sharding
from tests.contract.contract_step import RANKS, job, model_args, train_step
from tools.bench.matmul_sharding import SIZES, aten, bytes_moved, step, step_row
from torchtitan_npu.config.job_config import JobConfig
from torchtitan_npu.distributed import matmul_sharding
from torchtitan_npu.planner import fake_device, fake_ranks
from torchtitan_npu.torch_internals.dtensor import clear_sharding_cache

PAGE = (Path(__file__).parents[2] / "docs" / "explanation/matmul-sharding.md").read_text()


@pytest.mark.parametrize("ours", [True, False])
def test_jobs_use_our_strategies_unless_the_option_is_false(ours: bool) -> None:
    assert JobConfig().npu.matmul_sharding
    config = job("llama3", (), {"tp": 2})
    config.npu.matmul_sharding = ours
    clear_sharding_cache()
    with patch.object(matmul_sharding, "cheapest", wraps=matmul_sharding.cheapest) as strategy, fake_ranks(RANKS):
        train_step(config, model_args("llama3", config))
    assert strategy.called == ours


@pytest.mark.parametrize("sizes", SIZES)
@pytest.mark.parametrize("op", [aten.matmul, aten.matmul_backward])
def test_torch_npus_strategies_never_send_less(op: torch._ops.OpOverloadPacket, sizes: str) -> None:
    theirs, ours = (bytes_moved(op, sizes, ours) for ours in (False, True))
    assert all(our <= their for our, their in zip(ours, theirs, strict=True))
    # they do not support a Partial factor, nor uneven shards
    assert ours.count(0) > theirs.count(0)


@pytest.mark.parametrize("frozen", ["input", "weight", None])
def test_frozen_operands(frozen: str | None) -> None:
    """torch_npu's shape function returns a gradient for a frozen operand too."""
    with fake_ranks(2), our_matmul_sharding(mesh := init_device_mesh("npu", (2,))), fake_device():
        operands = {name: DTensor.from_local(torch.ones(4, 4, device="npu"), mesh) for name in ("input", "weight")}
        for name, operand in operands.items():
            operand.requires_grad_(name != frozen)
        nn.functional.linear(**operands).sum().backward()
        assert [name for name, x in operands.items() if x.grad is None] == ([frozen] if frozen else [])


@pytest.mark.parametrize(("model", "norms"), [("llama3", 13), pytest.param("qwen3", 33, marks=pytest.mark.slow)])
def test_every_collective_of_a_step(model: str, norms: int) -> None:
    (_, theirs), (parallel, calls) = (step(model, ours) for ours in (False, True))
    # the sequence is gathered before attention, feed-forward and output, and reduce-scattered after embedding,
    # attention and feed-forward; the backward pass does the reverse
    sections = 2 * len(parallel.layers) + 1
    # norms see a rank's own tokens or heads: the gradients of their weights are Partial, and FSDP needs them reduced
    weights = [tuple(parameter.shape) for name, parameter in parallel.named_parameters() if "norm" in name]
    assert len(weights) == norms
    assert Counter(call.shape for call in calls if call.kind == "all_reduce") == Counter(weights)
    assert Counter(call.kind for call in calls) == {
        "all_gather_into_tensor": 2 * sections,
        "reduce_scatter_tensor": 2 * sections,
        "all_reduce": norms,
    }
    assert theirs == calls  # torch_npu's strategies are as good here
    assert step_row(model, theirs, calls) in PAGE


@pytest.mark.parametrize("model", [pytest.param("deepseek_v3", marks=pytest.mark.slow), "deepseek_v32"])
def test_deepseeks_latents_send_less_than_with_torch_npus_strategies(model: str) -> None:
    """torch_npu reduce-scatters over the batch, and needs an all-to-all to shard the gradient by sequence."""
    (parallel, theirs), (_, ours) = (step(model, ours) for ours in (False, True))
    assert Counter(x.kind for x in theirs)["shard_dim_alltoall"] == len(parallel.layers)
    assert Counter(x.kind for x in ours)["shard_dim_alltoall"] == 0
    assert len(ours) == len(theirs) - len(parallel.layers)
    assert sum(x.sent for x in ours) < sum(x.sent for x in theirs)
    assert step_row(model, theirs, ours) in PAGE
