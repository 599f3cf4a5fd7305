"""Experts in compiled regions: which blocks include them, token counts and load balancing."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.utils import counters
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torchtitan.models.moe.moe import MoE

from tests._helpers.converted_models import build, step, tokens
from tests._helpers.deepseek_v32_models import start_batch
from torchtitan_npu.compile.block_regions import compile_block, has_static_sizes

CONVERTERS = ("npu_permute", "npu_gmm")


def moes(model: nn.Module) -> list[Any]:
    return [module for module in model.modules() if isinstance(module, MoE)]


def trained(name: str, compiled: bool) -> list[Tensor]:
    """Return losses, gradients and token counts of three steps with different expert biases.

    The model has activation checkpointing, which must not count tokens twice.
    """
    model: Any = build(name, *CONVERTERS, n_layers=2)
    (moe,) = moes(model)
    moe.count_in_recomputation = False
    model.layers["1"] = checkpoint_wrapper(model.layers["1"], early_stop=False)  # as in TorchTitan
    if compiled:
        compile_block(model.layers["1"])
    seen: list[Tensor] = []
    for number in range(3):
        if number == 2:
            counters["stats"].clear()
        start_batch(model)
        model.zero_grad()
        made = step(model)
        assert moe.tokens_per_expert.sum() == tokens()[:, 1:].numel() * moe.router.top_k
        seen += [made.loss, *made.grads.values(), moe.tokens_per_expert.clone()]
        moe.tokens_per_expert.zero_()
        moe.expert_bias.copy_(torch.linspace(-1, 1, len(moe.expert_bias)).roll(number))
    return seen


@pytest.mark.parametrize("name", [pytest.param("deepseek_v3", marks=pytest.mark.slow), "deepseek_v32"])
def test_tokens_are_counted_and_experts_balanced(name: str) -> None:
    torch.compiler.reset()
    eager, compiled = (trained(name, compiled) for compiled in (False, True))
    assert counters["stats"]["unique_graphs"] == 0  # in the third step
    assert len(eager) == len(compiled) > 30
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(compiled, eager, strict=True))
    counts = [count for count in eager if count.shape == eager[-1].shape]
    assert not torch.equal(counts[0], counts[-1])  # the biases changed the routing


@pytest.mark.parametrize(
    ("converters", "name", "regions"),
    [
        (CONVERTERS, "deepseek_v3", 1),
        (CONVERTERS, "deepseek_v32", 2),
        (CONVERTERS[:1], "deepseek_v3", 1),
        (CONVERTERS[1:], "deepseek_v3", 1),
        (CONVERTERS[:1], "deepseek_v32", 1),
    ],
)
def test_regions(converters: tuple[str, ...], name: str, regions: int) -> None:
    """With both converters the regions include the experts; else they are attention, or the part before it."""
    model: Any = build(name, *converters, n_layers=2)
    (moe,) = moes(model)
    assert has_static_sizes(moe) == (converters == CONVERTERS)
    assert compile_block(model.layers["1"]) == regions
