"""Tensor-parallel steps with undecomposed matrix products, as on an NPU: losses and collectives."""

from __future__ import annotations

from typing import Any
from unittest.mock import patch

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
    with undecomposed_matmul(), patch.object(matmul_sharding, "cheapest", wraps=matmul_sharding.cheapest) as choices:
        undecomposed = train(model, True)
    return undecomposed, train(model, False), choices.call_count


def test_llama3() -> None:
    for (our_losses, our_calls), (losses, calls), choices in run_on_ranks(2, train_both, "llama3"):
        assert choices >= MIN_CHOICES
        assert our_losses == losses  # the same products of the same numbers
        assert our_calls == calls  # decomposed products send nothing: all collectives are those of the parallel plan
