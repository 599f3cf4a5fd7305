"""Whole tensor-parallel steps with matrix products kept whole, as on an NPU: the same losses, and what they send."""

from __future__ import annotations

from collections import Counter
from typing import Any
from unittest.mock import patch

from tests._helpers import deepseek_v32_training as deepseek_v32
from tests._helpers import layouts
from tests._helpers.multirank import run_on_ranks
from tools.bench.collectives import Collective, Collectives
from tools.bench.undecomposed_matmul import undecomposed_matmul
from torchtitan_npu.distributed import matmul_sharding

MIN_CHOICES = 8
"""Forward and backward of several kinds of layers, decided once each."""
ONE_STEP = {"training.steps": 1, "training.local_batch_size": 4, "training.global_batch_size": 4}


def train(model: str, ours: bool) -> tuple[list[float], list[Collective]]:
    """A step of a job that asks for our strategies, or does not."""
    asked = {"npu.matmul_sharding": ours}
    with Collectives() as collectives:
        if model == "deepseek_v32":
            losses = deepseek_v32.train({"tp": 2}, asked, stop=1).losses
        else:
            losses = layouts.train(model, {"tp": 2}, {**ONE_STEP, **asked}).losses
    return losses, collectives.calls


def train_whole_and_decomposed(model: str) -> Any:
    """Losses and collectives of a step with whole products and our strategies, then with torch's decomposed ones."""
    with (
        undecomposed_matmul(),
        patch.object(matmul_sharding, "cheapest", wraps=matmul_sharding.cheapest) as choices,
    ):
        whole = train(model, True)
    return whole, train(model, False), choices.call_count


def test_llama3() -> None:
    for (our_losses, our_calls), (losses, calls), choices in run_on_ranks(2, train_whole_and_decomposed, "llama3"):
        assert choices >= MIN_CHOICES
        assert our_losses == losses  # the same products of the same numbers
        assert our_calls == calls  # decomposed, they cost nothing: all that is sent is what the plan asks for


def test_deepseek_v32() -> None:
    """Each layer's input has two projections to latents, whose gradients are sums over the ranks.

    Decomposed, both stay sums, and so does the input's gradient, their sum, which is scattered once. Ours scatter each
    latent's gradient: one more collective a layer, and fewer bytes if the latents are narrower than the input. Here
    they are together as wide.
    """
    args = deepseek_v32.SMALLER
    latents = (args["q_lora_rank"], args["kv_lora_rank"] + args["qk_rope_head_dim"])
    assert sum(latents) == args["dim"]
    times = 2 * args["n_layers"]  # a step has two micro-batches
    for (our_losses, our_calls), (losses, calls), choices in run_on_ranks(
        2, train_whole_and_decomposed, "deepseek_v32"
    ):
        assert choices >= MIN_CHOICES
        assert our_losses == losses
        ours, theirs = Counter(our_calls), Counter(calls)
        assert _widths(ours - theirs) == Counter(latents * times)
        assert _widths(theirs - ours) == Counter([args["dim"]] * times)
        assert sum(x.sent for x in our_calls) == sum(x.sent for x in calls)


def _widths(calls: Counter[Collective]) -> Counter[int]:
    """How often tensors of each width were scattered; nothing else was sent."""
    assert {call.kind for call in calls} == {"reduce_scatter_tensor"}
    return Counter(call.shape[-1] for call in calls.elements())
