"""Ten steps of training with compiled regions are eager's, to the bit, and nothing is compiled after the second."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from tests import layouts
from tests.models import deepseek_v32_training
from tests.models.test_qwen3_vl_training import DATA, SIZES
from tests.multirank import run_on_ranks
from tests.training import Record, assert_same_gradients, recording, train_until

STEPS = 10
COMPILED = {"compile.enable": True, "npu.bypass_codegen": True}
TINIER = {"training.seq_len": 16, "training.global_batch_size": 2, "training.local_batch_size": 1}
PICTURES = {**DATA, "training.seq_len": 64}
TWO_LAYERS = {"n_layers": 2, "dim": 32}
LAYOUTS: dict[str, tuple[int, dict[str, int]]] = {"one": (1, {}), "fsdp2": (2, {}), "tp2": (2, {"tp": 2})}


def job(model: str, layout: dict[str, int], options: dict[str, Any]) -> Any:
    if model == "deepseek_v32":
        layouts.add_flavor(model, "tiny", deepseek_v32_training.SMALLER)
        own = {"model.name": model, "model.flavor": "tiny", "model.converters": []}
        return layouts.job_config("deepseek_v3", layout, {**TINIER, **own, **options})
    if model == "qwen3_vl":
        layouts.TINY[model] = ("qwen3_vl", "debugmodel", {**SIZES, "enable_weight_tying": False})
        return layouts.job_config(model, layout, {**TINIER, **PICTURES, **options})
    name, flavor, sizes = layouts.TINY[model]
    layouts.TINY[model] = (name, flavor, {**sizes, **TWO_LAYERS})
    return layouts.job_config(model, layout, {**TINIER, **options})


def train(model: str, layout: dict[str, int], options: dict[str, Any]) -> tuple[Record, tuple[int, int]]:
    from torch._dynamo.utils import counters

    torch._dynamo.reset()
    counters.clear()
    with recording(job(model, layout, {"training.steps": STEPS, **options})) as (trainer, record):
        train_until(trainer, 2)
        after_two = counters["stats"]["unique_graphs"]
        train_until(trainer, STEPS)
    return record, (after_two, counters["stats"]["unique_graphs"])


def train_both(
    ranks: int, model: str, degrees: dict[str, int], options: dict[str, Any]
) -> Iterator[tuple[Record, Record]]:
    """What each rank saw, eager and compiled."""
    eager = run_on_ranks(ranks, train, model, degrees, {}, process_group=False)
    compiled = run_on_ranks(ranks, train, model, degrees, {**COMPILED, **options}, process_group=False)
    for (theirs, none), (ours, (after_two, after_all)) in zip(eager, compiled, strict=True):
        assert none == (0, 0)
        assert 0 < after_two == after_all  # graphs
        assert len(ours.losses) == len(theirs.losses) == STEPS and ours.losses[0] != ours.losses[-1]
        assert ours.gradients.keys() == theirs.gradients.keys() and len(ours.gradients) > 10
        yield ours, theirs


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("model", [*layouts.TINY, "deepseek_v32", "qwen3_vl"])
def test_compiled_training_is_eagers_to_the_bit(model: str, layout: str) -> None:
    ranks, degrees = LAYOUTS[layout]
    for ours, theirs in train_both(ranks, model, degrees, {}):
        assert ours.losses == theirs.losses and ours.norms == theirs.norms
        assert [name for name, g in theirs.gradients.items() if not torch.equal(ours.gradients[name], g)] == []


def test_expert_parallel() -> None:
    """The number of tokens that a rank gets differs from step to step: no guard fails of it."""
    for ours, theirs in train_both(2, "deepseek_v3", {"ep": 2}, {}):
        assert ours.losses == theirs.losses and ours.norms == theirs.norms


def test_async_tensor_parallel_in_training() -> None:
    """Products by parts, and sums of two ranks in the other order: the same numbers to the rounding of float32."""
    for ours, theirs in train_both(2, "llama3", {"tp": 2}, {"npu.graph_passes": ["async_tp"]}):
        assert_same_gradients(ours, theirs)
        assert ours.losses == pytest.approx(theirs.losses, rel=1e-4)
