"""Ten steps of training with compiled regions are eager's, to the bit, and nothing is compiled after the second."""

from __future__ import annotations

import functools
import os
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist

from tests import layouts
from tests.models import deepseek_v32_training
from tests.models.test_qwen3_vl_training import DATA, SIZES
from tests.multirank import free_port, run_on_ranks
from tests.training import Record, assert_same_gradients, recording, train_until

STEPS = 10
COMPILED = {"compile.enable": True, "npu.bypass_codegen": True}
TINIER = {"training.seq_len": 16, "training.global_batch_size": 2, "training.local_batch_size": 1}
PICTURES = {**DATA, "training.seq_len": 64}
TWO_LAYERS = {"n_layers": 2, "dim": 32}
EVERY = [*layouts.TINY, "deepseek_v32", "qwen3_vl"]
LAYOUTS: dict[str, tuple[int, dict[str, int]]] = {
    "one": (1, {}),
    "fsdp2": (2, {}),
    "tp2": (2, {"tp": 2}),
    "ep2": (2, {"ep": 2}),  # where the number of tokens that a rank gets differs from step to step
}
MODELS = {
    "one": EVERY,
    "fsdp2": ["qwen3_moe", "deepseek_v32"],
    "tp2": ["llama3", "deepseek_v3"],
    "ep2": ["deepseek_v3"],
}
"""Those that differ in what is compiled: of the others the regions are the same on every layout."""


class Run(NamedTuple):
    record: Record
    graphs_after_two: int
    """Compiled in the first two steps."""
    graphs: int
    """Compiled in all."""


Pair = tuple[Run, Run]
"""Eager and compiled."""


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


def train(model: str, layout: dict[str, int], options: dict[str, Any]) -> Run:
    from torch._dynamo.utils import counters

    torch._dynamo.reset()
    counters.clear()
    with recording(job(model, layout, {"training.steps": STEPS, **options})) as (trainer, record):
        train_until(trainer, 2)
        after_two = counters["stats"]["unique_graphs"]
        train_until(trainer, STEPS)
    dist.destroy_process_group()
    return Run(record, after_two, counters["stats"]["unique_graphs"])


def train_all(models: list[str], layout: dict[str, int], options: dict[str, Any], ports: list[int]) -> dict[str, Pair]:
    """By model, ten steps in eager mode and compiled. All in one call: a rank takes seconds to start."""
    runs: dict[str, Pair] = {}
    for model in models:
        for way in ({}, {**COMPILED, **options}):
            os.environ["MASTER_PORT"] = str(ports.pop())
            runs[model] = (*runs.get(model, ()), train(model, layout, way))  # type: ignore[assignment]
    return runs


def train_on(
    ranks: int, layout: dict[str, int], models: list[str], options: dict[str, Any] | None = None
) -> list[dict[str, Pair]]:
    ports = [free_port() for _ in range(2 * len(models))]
    return run_on_ranks(ranks, train_all, models, layout, options or {}, ports, process_group=False, timeout=400)


@functools.cache
def on_layout(layout: str) -> list[dict[str, Pair]]:
    ranks, degrees = LAYOUTS[layout]
    return train_on(ranks, degrees, MODELS[layout])


def assert_compiled(eager: Run, compiled: Run) -> None:
    assert (eager.graphs, eager.graphs_after_two) == (0, 0)
    assert 0 < compiled.graphs_after_two == compiled.graphs
    ours, theirs = compiled.record, eager.record
    assert len(ours.losses) == len(theirs.losses) == STEPS and ours.losses[0] != ours.losses[-1]
    assert ours.gradients.keys() == theirs.gradients.keys() and len(ours.gradients) > 10


@pytest.mark.parametrize(("layout", "model"), [(layout, model) for layout in LAYOUTS for model in MODELS[layout]])
def test_compiled_training_is_eagers_to_the_bit(layout: str, model: str) -> None:
    for runs in on_layout(layout):
        eager, compiled = runs[model]
        assert_compiled(eager, compiled)
        ours, theirs = compiled.record, eager.record
        assert ours.losses == theirs.losses and ours.norms == theirs.norms
        assert [name for name, g in theirs.gradients.items() if not torch.equal(ours.gradients[name], g)] == []


def test_deepseek_v32_under_tensor_parallel() -> None:
    """The gradients of the prolog's input, one for each of its products, are added in another order."""
    for runs in train_on(2, {"tp": 2}, ["deepseek_v32"]):
        eager, compiled = runs["deepseek_v32"]
        assert_compiled(eager, compiled)
        assert_same_gradients(compiled.record, eager.record)
        assert compiled.record.losses == pytest.approx(eager.record.losses, rel=1e-5)


@pytest.mark.parametrize("mode", ["full", "selective"])
def test_with_activation_checkpointing(mode: str) -> None:
    """What is computed again is computed alike."""
    (runs,) = train_on(1, {}, ["llama3", "deepseek_v32"], {"activation_checkpoint.mode": mode})
    for eager, compiled in runs.values():
        assert_compiled(eager, compiled)
        assert compiled.record.losses == eager.record.losses and compiled.record.norms == eager.record.norms


def test_async_tensor_parallel_in_training() -> None:
    """Products by parts, and sums of two ranks in the other order: the same numbers to the rounding of float32."""
    for runs in train_on(2, {"tp": 2}, ["llama3"], {"npu.graph_passes": ["async_tp"]}):
        eager, compiled = runs["llama3"]
        assert_compiled(eager, compiled)
        assert_same_gradients(compiled.record, eager.record)
        assert compiled.record.losses == pytest.approx(eager.record.losses, rel=1e-4)
