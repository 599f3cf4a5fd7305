"""Whole tensor-parallel steps with matrix products kept whole, as on an NPU: the same losses, no further traffic."""

from __future__ import annotations

from typing import Any
from unittest.mock import patch

from tests import layouts
from tests.collectives import Collective, Collectives
from tests.models import deepseek_v32_training as deepseek_v32
from tests.multirank import run_on_ranks
from tests.whole_matmul import our_matmul_sharding, whole_matmul
from torchtitan_npu.distributed import matmul_sharding

MIN_CHOICES = 8
"""Forward and backward of several kinds of layers, decided once each."""
ONE_STEP = {"training.steps": 1, "training.local_batch_size": 4, "training.global_batch_size": 4}


def train(model: str) -> tuple[list[float], list[Collective]]:
    with Collectives() as collectives:
        if model == "deepseek_v32":
            losses = deepseek_v32.train({"tp": 2}, {}, stop=1).losses
        else:
            losses = layouts.train(model, {"tp": 2}, ONE_STEP).losses
    return losses, collectives.calls


def train_decomposed_and_whole(model: str) -> Any:
    """Losses and collectives of a step with torch's decomposed products, then with whole ones and our strategies."""
    decomposed = train(model)
    with (
        whole_matmul(),
        our_matmul_sharding(),
        patch.object(matmul_sharding, "cheapest", wraps=matmul_sharding.cheapest) as choices,
    ):
        whole = train(model)
    return decomposed, whole, choices.call_count


def test_llama3() -> None:
    for (losses, calls), (our_losses, our_calls), choices in run_on_ranks(2, train_decomposed_and_whole, "llama3"):
        assert choices >= MIN_CHOICES
        assert our_losses == losses  # the same products of the same numbers
        assert our_calls == calls  # decomposed, they cost nothing: all that is sent is what the plan asks for


def test_deepseek_v32() -> None:
    for (losses, calls), (our_losses, our_calls), choices in run_on_ranks(
        2, train_decomposed_and_whole, "deepseek_v32"
    ):
        assert choices >= MIN_CHOICES
        assert our_losses == losses
        # sums over the ranks are taken of the latents' gradients, not of the wider input's: no more bytes, more pieces
        assert sum(x.sent for x in our_calls) <= sum(x.sent for x in calls)
        assert our_calls != calls
