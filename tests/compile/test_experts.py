"""Experts in compiled regions: which are, and that they count their tokens and are balanced as in eager mode."""

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
from torchtitan_npu.compile.regions import compile_block, has_known_sizes

CONVERTERS = ("npu_permute", "npu_gmm")


def moes(model: nn.Module) -> list[Any]:
    return [module for module in model.modules() if isinstance(module, MoE)]


def trained(name: str, compiled: bool) -> list[Tensor]:
    """The loss, the gradients and the counts of three steps, between which experts are balanced anew.

    Of a model with activation checkpointing, whose optimizer takes the counts as they are.
    """
    model: Any = build(name, *CONVERTERS, n_layers=2)
    (moe,) = moes(model)
    moe.counts_again = False
    model.layers["1"] = checkpoint_wrapper(model.layers["1"], early_stop=False)  # as TorchTitan does
    if compiled:
        compile_block(model.layers["1"])
    seen: list[Tensor] = []
    for number in range(3):
        if number == 2:
            counters["stats"].clear()
        start_batch(model)
        model.zero_grad()
        made = step(model)
        assert moe.tokens_per_expert.sum() == tokens()[:, 1:].numel() * moe.router.top_k  # once
        seen += [made.loss, *made.grads.values(), moe.tokens_per_expert.clone()]
        moe.tokens_per_expert.zero_()
        moe.expert_bias.copy_(torch.linspace(-1, 1, len(moe.expert_bias)).roll(number))
    return seen


@pytest.mark.parametrize("name", ["deepseek_v3", "deepseek_v32"])
def test_tokens_are_counted_and_experts_balanced_as_in_eager_mode(name: str) -> None:
    torch._dynamo.reset()
    eager, compiled = (trained(name, way) for way in (False, True))
    assert counters["stats"]["unique_graphs"] == 0  # in the third step
    assert len(eager) == len(compiled) > 30
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(compiled, eager, strict=True))
    counts = [count for count in eager if count.shape == eager[-1].shape]
    assert not torch.equal(counts[0], counts[-1])  # by the other bias


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
    """With both converters all that a graph can hold; else attention, or what comes before it."""
    model: Any = build(name, *converters, n_layers=2)
    (moe,) = moes(model)
    assert has_known_sizes(moe) == (converters == CONVERTERS)
    assert compile_block(model.layers["1"]) == regions
