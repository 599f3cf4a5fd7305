"""Tensor-parallel steps with undecomposed matrix products, as on an NPU: losses and collectives."""

from __future__ import annotations

from collections import Counter
from typing import Any
from unittest.mock import patch

import pytest

from tests._helpers import deepseek_v32_training as deepseek_v32
from tests._helpers import layouts
from tests._helpers.collectives import Collective, Collectives
from tests._helpers.multirank import run_on_ranks
from tests._helpers.undecomposed_matmul import undecomposed_matmul
from torchtitan_npu.distributed import matmul_sharding

MIN_CHOICES = 8
"""Forward and backward of several types of layers; each is decided once."""
ONE_STEP = {"training.steps": 1, "training.local_batch_size": 4, "training.global_batch_size": 4}


def train(model: str, ours: bool) -> tuple[list[float], list[Collective]]:
    """Run a step of a job with our strategies, or without."""
    option = {"npu.matmul_sharding": ours}
    with Collectives() as collectives:
        if model == "deepseek_v32":
            losses = deepseek_v32.train({"tp": 2}, option, stop=1).losses
        else:
            losses = layouts.train(model, {"tp": 2}, {**ONE_STEP, **option}).losses
    return losses, collectives.calls


def train_both(model: str) -> Any:
    """Return losses and collectives of a step with our strategies, and of one with torch's decomposed products."""
    with (
        undecomposed_matmul(),
        patch.object(matmul_sharding, "cheapest", wraps=matmul_sharding.cheapest) as choices,
    ):
        undecomposed = train(model, True)
    return undecomposed, train(model, False), choices.call_count


def test_llama3() -> None:
    for (our_losses, our_calls), (losses, calls), choices in run_on_ranks(2, train_both, "llama3"):
        assert choices >= MIN_CHOICES
        assert our_losses == losses  # the same products of the same numbers
        assert our_calls == calls  # decomposed products send nothing: all collectives are those of the parallel plan


@pytest.mark.slow
def test_deepseek_v32() -> None:
    """Each layer's input has two latent projections, whose gradients are Partial.

    Decomposed, both stay Partial, and the input's gradient is reduce-scattered once. Our strategies reduce-scatter each
    latent's gradient: one more collective per layer, and fewer bytes if the latents are narrower than the input. Here
    they are together as wide as the input.
    """
    args = deepseek_v32.SMALLER
    latents = (args["q_lora_rank"], args["kv_lora_rank"] + args["qk_rope_head_dim"])
    assert sum(latents) == args["dim"]
    times = 2 * args["n_layers"]  # a step has two microbatches
    for (our_losses, our_calls), (losses, calls), choices in run_on_ranks(2, train_both, "deepseek_v32"):
        assert choices >= MIN_CHOICES
        assert our_losses == losses
        ours, theirs = Counter(our_calls), Counter(calls)
        assert _widths(ours - theirs) == Counter(latents * times)
        assert _widths(theirs - ours) == Counter([args["dim"]] * times)
        assert sum(x.sent for x in our_calls) == sum(x.sent for x in calls)


def _widths(calls: Counter[Collective]) -> Counter[int]:
    """Return how often tensors of each width were reduce-scattered. There are no other collectives."""
    assert {call.kind for call in calls} == {"reduce_scatter_tensor"}
    return Counter(call.shape[-1] for call in calls.elements())
