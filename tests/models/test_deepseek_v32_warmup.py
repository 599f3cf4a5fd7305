"""DeepSeek-V3.2's warm-up stage runs frozen networks forward only. The indexer's loss counts every query."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torchtitan.components.loss import IGNORE_INDEX
from torchtitan.config import JobConfig
from torchtitan.distributed.activation_checkpoint import apply_ac

from tests._helpers.converted_models import convert
from tests._helpers.deepseek_v32_models import build, model_args, start_batch, tokens
from tests._helpers.deepseek_v32_training import CONVERTERS, DIVERGENCE_TOLERANCE, SELECTIVE, WARMUP, one_rank, train
from tests._helpers.multirank import run_on_ranks
from tests._helpers.training import TOLERANCE, Record
from torchtitan_npu.distributed.activation_checkpoint import CHECKPOINTING
from torchtitan_npu.planner import Calls
from torchtitan_npu.titan_internals.rebind import copy_with_globals

PRODUCT = "npu_grouped_matmul"


@pytest.mark.parametrize("mode", ["none", "selective", "full"])
@pytest.mark.parametrize("converters", [(), ("npu_rms_norm", "npu_gmm", "npu_dsa")], ids=["eager", "converted"])
def test_only_the_indexer_has_a_backward_pass(mode: Any, converters: tuple[str, ...]) -> None:
    model: Any = convert(build(model_args(warmup=True)), *converters)
    followed = []

    def follow(network: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> None:
        followed.append(output.requires_grad)

    for block in model.layers.values():
        (block.moe if block.moe_enabled else block.feed_forward).register_forward_hook(follow)
    if mode != "none":
        config = JobConfig().activation_checkpoint
        config.mode, config.selective_ac_option = mode, "op"
        copy_with_globals(apply_ac, CHECKPOINTING)(model, config, model_compile_enabled=False, op_sac_save_list=set())
    start_batch(model)
    with Calls() as calls:
        F.cross_entropy(model(tokens()).flatten(0, 1), tokens().roll(-1).flatten()).backward()
    assert len(followed) >= 3 and not any(followed)
    forwards = 1 if mode == "none" else 2  # TorchTitan recomputes full blocks, unless early stop is set
    assert calls.count("npu")[PRODUCT] == (3 * 2 * forwards if converters else 0)  # two layers have experts
    assert all(p.grad is not None for name, p in model.named_parameters() if ".indexer." in name)


def products(layout: dict[str, int], options: dict[str, Any]) -> int:
    """Count the expert products of a rank in a step."""
    import torchtitan_npu.trainer as trainer_module

    calls = Calls()

    class Trainer(trainer_module.Trainer):
        def train_step(self, *args: Any) -> None:
            with calls:
                super().train_step(*args)

    with patch.object(trainer_module, "Trainer", Trainer):
        train(layout, {"model.converters": CONVERTERS, **options}, 1)
    return calls.count("npu")[PRODUCT]


@pytest.mark.parametrize(
    ("layout", "options", "expected"),
    [
        # eight microbatches, each with one or two of its products recomputed, and a forward on the meta device
        ({"pp": 2}, SELECTIVE, {3 * 9 + 8, 3 * 9 + 2 * 8}),
        ({"ep": 2}, {"activation_checkpoint.mode": "full"}, {3 * 2 * 2}),
    ],
    ids=["pp2 and selective AC", "ep2 and full AC"],
)
def test_experts_run_forward_only_on_any_layout(
    layout: dict[str, int], options: dict[str, Any], expected: set[int]
) -> None:
    (counted,) = {*run_on_ranks(2, products, layout, {**WARMUP, **options}, process_group=False)} - {0}
    assert counted in expected  # one layer has three products of experts


def train_without_some_labels(layout: dict[str, int], options: dict[str, Any]) -> Record:
    import torchtitan_npu.trainer as trainer_module

    class Trainer(trainer_module.Trainer):
        def batch_generator(self, *args: Any) -> Iterator[Any]:
            for inputs, labels in super().batch_generator(*args):
                # more in the first rows than in the last: parts of the batch have different numbers of labels
                missing = torch.rand(labels.shape, generator=torch.Generator().manual_seed(0)).sort(dim=0)[0] < 0.4
                yield inputs, labels.masked_fill(missing, IGNORE_INDEX)

    with patch.object(trainer_module, "Trainer", Trainer):
        return train(layout, options, 1)


@pytest.mark.parametrize(
    ("layout", "ranks", "options"),
    [
        ({}, 1, {}),
        ({}, 1, {"training.local_batch_size": 8}),  # the only case without gradient accumulation
        ({"shard": 2}, 2, {}),
        pytest.param({"replicate": 2, "shard": 1}, 2, {}, marks=pytest.mark.slow),
        ({"pp": 2}, 2, {}),
    ],
    ids=str,
)
def test_the_indexers_loss_counts_queries_without_labels_too(
    layout: dict[str, int], ranks: int, options: dict[str, Any]
) -> None:
    """Loss and gradients equal those of a batch with all labels."""
    records = run_on_ranks(ranks, train_without_some_labels, layout, options, process_group=False)
    expected = one_rank()
    assert max(record.losses[0] for record in records) != pytest.approx(expected.losses[0], rel=TOLERANCE)
    for record in records:
        assert record.indexer_losses == pytest.approx(expected.indexer_losses[:1], abs=DIVERGENCE_TOLERANCE)
        for name, gradient in record.gradients.items():
            if ".indexer." in name:
                assert (gradient - expected.gradients[name]).norm() <= TOLERANCE * gradient.norm(), name
